"""Time of a model of which the host has a part: it computes few tokens, and a GPU many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.hosted_time import COPIES, CROSSINGS, HOST, HostedTimer, hosted_timer
from whichlora.serving.llama_cpp import stepping
from whichlora.serving.llama_cpp_memory import file_of
from whichlora.serving.step_time import PARTS, Step, own_all_reduce, step_timer
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

LLAMA, EXPERTS = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"
ONE, PROMPT = Step(1, 1000, 1), Step(0, 0, 1, 512, 512 * 513 / 2)
LINK = 25e9


def served(model: str = LLAMA, **options: object) -> Served:
    options = {"file_type": "Q4_K_M", **options}
    run = RunConfig(
        model=model,
        phase="inference",
        serving="llama-cpp",
        context=4096,
        serving_options=tuple(sorted(options.items())),
    )
    return resolve(load_model(model), run, find_target("rtx-3090-24gb")).served


def timer(model: str = LLAMA, **options: object) -> HostedTimer:
    asked = served(model, **{"host_bandwidth": "ddr5-5600", **options})
    steps = stepping(asked)
    assert steps.hosted is not None
    return hosted_timer(asked, steps.hosted, stepping=steps, link_bytes_per_s=LINK)


def test_parts_add_up_to_the_step() -> None:
    for step in (ONE, PROMPT):
        parts = timer(n_gpu_layers=20).parts(step)
        assert set(parts) == {*PARTS, HOST, COPIES, CROSSINGS}
        assert sum(parts.values()) == pytest.approx(timer(n_gpu_layers=20).seconds(step))


@pytest.mark.parametrize(
    ("model", "option", "values"),
    [(LLAMA, "n_gpu_layers", (32, 24, 16, 8, 0)), (EXPERTS, "n_cpu_moe", (1, 16, 32, 48))],
)
@pytest.mark.parametrize("step", [ONE, PROMPT])
def test_the_more_lies_on_the_host_the_longer_a_step_takes(
    model: str, option: str, values: tuple[int, ...], step: Step
) -> None:
    seconds = [timer(model, **{option: value}).seconds(step) for value in values]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.5 * seconds[0]


@pytest.mark.parametrize(
    ("model", "options"), [(LLAMA, {"n_gpu_layers": 20}), (EXPERTS, {"n_cpu_moe": 30})]
)
def test_layers_of_the_gpu_and_of_the_host_are_all_of_the_model(
    model: str, options: dict[str, object]
) -> None:
    asked = served(model)
    whole = step_timer(asked, stepping=stepping(asked), reduction_s=own_all_reduce(asked.gpu, 1))
    hosted = timer(model, **options)
    (device,) = hosted.devices
    for part in ("products", "attention", "elementwise"):
        both = device.parts(ONE)[part] + hosted.copied.parts(ONE)[part]
        assert both == pytest.approx(whole.parts(ONE)[part])


def test_a_decoding_host_is_bound_by_its_memory() -> None:
    slow, fast = (timer(n_gpu_layers=0, host_bandwidth=gbs) for gbs in ("50", "100"))
    assert slow.parts(ONE)[HOST] > 1.9 * fast.parts(ONE)[HOST]
    asked = served()
    _, *others = file_of(asked.model, "Q4_K_M")
    read = sum(tensor.num_bytes for tensor in others)
    least = read / 50e9
    assert least < slow.parts(ONE)[HOST] < 2 * least
    assert slow.parts(ONE)["products"] == slow.parts(ONE)[COPIES] == 0


def test_a_prompt_copies_what_the_host_has_and_computes_on_a_gpu() -> None:
    """From 32 tokens on: ggml-cuda's `offload_op`."""
    parts = timer(n_gpu_layers=17).parts(PROMPT)
    layers = sum(t.num_bytes for t in file_of(served().model, "Q4_K_M") if t.layer is not None)
    assert parts[HOST] == 0
    assert parts[COPIES] == pytest.approx(0.5 * layers / (0.86 * LINK), rel=0.05)
    few = Step(0, 0, 1, 31, 31 * 16)
    assert timer(n_gpu_layers=17).parts(few)[COPIES] == 0
    assert timer(n_gpu_layers=17).parts(few)[HOST] > 0


def test_pinned_weights_and_fewer_micro_batches_shorten_prompts() -> None:
    long = Step(0, 0, 1, 2048, 2048 * 1024)
    usual = timer(EXPERTS, cpu_moe=True)
    pinned = timer(EXPERTS, cpu_moe=True, load_mode="none")
    wide = timer(EXPERTS, cpu_moe=True, ubatch_size=2048)
    assert pinned.parts(long)[COPIES] == pytest.approx(0.86 * usual.parts(long)[COPIES])
    # 4 micro-batches choose nearly all experts each, and so does one
    assert wide.parts(long)[COPIES] == pytest.approx(usual.parts(long)[COPIES] / 4, rel=0.01)
    assert pinned.parts(ONE) == usual.parts(ONE)


def test_a_token_reads_its_own_experts_alone() -> None:
    hosted = timer(EXPERTS, cpu_moe=True)
    model = served(EXPERTS).model
    experts = sum(t.num_bytes for t in file_of(model, "Q4_K_M") if "_exps" in t.name)
    one = hosted.host.weight_bytes(1)
    assert one == pytest.approx(experts * 8 / 128, rel=1e-3)
    assert hosted.host.weight_bytes(10_000) == pytest.approx(experts, rel=1e-3)


def test_a_host_that_is_stated_narrows_the_interval() -> None:
    unknown = timer(n_gpu_layers=8, host_bandwidth=None)
    known = timer(n_gpu_layers=8, host_bandwidth="70.1")  # the mean of usual ones
    assert unknown.seconds(ONE) == pytest.approx(known.seconds(ONE), rel=1e-3)
    assert unknown.deviation > 1.2 * known.deviation
    assert timer(n_gpu_layers=32).deviation < known.deviation


def test_each_layer_with_experts_elsewhere_makes_gpu_and_host_wait() -> None:
    waits = [timer(EXPERTS, n_cpu_moe=layers).parts(ONE)[CROSSINGS] for layers in (10, 20)]
    assert waits[1] == 2 * waits[0]
    assert timer(n_gpu_layers=8).parts(ONE)[CROSSINGS] == pytest.approx(waits[0] / 10)


def test_gpus_have_layers_each_and_one_the_head() -> None:
    asked = served("meta-llama/Llama-3.1-70B", devices=2, n_gpu_layers=60)
    steps = stepping(asked)
    assert steps.hosted is not None
    assert [number for number, _ in steps.hosted.parts] == [0, 1]
    assert [part.scores for _, part in steps.hosted.parts] == [False, True]
    layers = [sum(part.layers) for _, part in steps.hosted.parts]
    assert sum(layers) == 59
    assert sum(steps.hosted.on_host.layers) == 21
    cards = (find_target("rtx-3090-24gb"), find_target("rtx-3060-12gb"))
    unequal = replace(asked, gpu=replace(cards[0], beside=cards))
    on_equal, on_unequal = (
        hosted_timer(each, steps.hosted, stepping=steps, link_bytes_per_s=LINK)
        for each in (asked, unequal)
    )
    assert on_unequal.seconds(ONE) > on_equal.seconds(ONE)
