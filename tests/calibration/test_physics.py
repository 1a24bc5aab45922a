"""What no device can have measured is refused, and what a real one may have is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora import families
from whichlora.calibration.share.physics import impossible
from whichlora.predict.quantities import forward_features, step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("a100-sxm-80gb")
CPU = find_gpu("cpu")
MODEL = load_model("meta-llama/Llama-3.1-8B")
SMALL = load_model("HuggingFaceTB/SmolLM2-135M")
TRAIN = RunConfig(model=MODEL.name, batch_size=4, seq_len=1024, precision="bf16-no-autocast")
SERVE = RunConfig(model=MODEL.name, phase="inference", prompt_len=512, max_new_tokens=64)


def record(run: RunConfig, **measured: Any) -> Measurement:
    return Measurement(
        id="m",
        gpu="g",
        date="2026-11-21T00:00:00+00:00",
        config=run.to_dict(),
        outcome="ok",
        **measured,
    )


def floor_s(features: Any) -> float:
    return float(max(features["products"], features["weights"]))


def at_peak(gpu: GpuSpec) -> GpuSpec:
    """A board whose products sustain what its datasheet says."""
    return replace(gpu, measured_flops_per_s={}, power_w=None)


def prompt_s(run: RunConfig, gpu: GpuSpec, *, decoding: bool, model: Any = MODEL) -> float:
    context = run.prompt_len
    job = resolve(model, run, at_peak(gpu))
    return floor_s(forward_features(job, context=context, decoding=decoding))


def test_only_what_succeeded_is_judged() -> None:
    failed = replace(record(TRAIN, step_s=(1e-9,)), outcome="oom", step_s=())
    assert impossible(replace(failed, peak_allocated_bytes=1), MODEL, GPU) == ""


def test_an_inference_has_no_training_step() -> None:
    found = impossible(record(SERVE, step_s=(1.0,)), MODEL, GPU)
    assert found == "step_s: is of fine-tuning, the run is an inference"


@pytest.mark.parametrize(
    "name", ["peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"]
)
def test_every_counter_lies_between_the_weights_and_the_device(name: str) -> None:
    assert f"{name}: " in impossible(record(TRAIN, **{name: 10**9}), MODEL, GPU)
    assert impossible(record(TRAIN, **{name: 40 * 10**9}), MODEL, GPU) == ""
    assert f"{name}: " in impossible(record(TRAIN, **{name: 100 * 10**9}), MODEL, GPU)


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(("factor", "is_refused"), [(0.82, False), (0.78, True)])
def test_a_prompt_and_a_token_take_as_long_as_their_products(
    decoding: bool, factor: float, is_refused: bool
) -> None:
    name = "decode_s_per_token" if decoding else "prefill_s"
    least = prompt_s(SERVE, GPU, decoding=decoding)
    # the fastest of the repetitions is judged
    found = impossible(record(SERVE, **{name: (2 * least, factor * least)}), MODEL, GPU)
    assert ("faster than the datasheet" in found) is is_refused


def test_the_fastest_step_of_each_length_is_judged() -> None:
    job = resolve(MODEL, TRAIN, at_peak(GPU))
    short, long = (floor_s(step_features(job, seq_len=length)) for length in (256, 1024))
    lengths = {"batch_seq_len": (256, 1024, 1024)}
    assert impossible(record(TRAIN, step_s=(short, long, long), **lengths), MODEL, GPU) == ""
    found = impossible(record(TRAIN, step_s=(short, long, short), **lengths), MODEL, GPU)
    assert found.startswith("step: ")
    found = impossible(record(TRAIN, step_s=(short, short, long), **lengths), MODEL, GPU)
    assert found.startswith("step: ")


@pytest.mark.parametrize(("factor", "is_refused"), [(0.01, False), (0.0005, True)])
def test_a_peak_that_is_a_guess_refuses_a_slipped_unit_alone(
    factor: float, is_refused: bool
) -> None:
    """The peak of a CPU is a guess; weights in a cache are read faster than the memory."""
    run = replace(SERVE, model=SMALL.name, precision="bf16-pure")
    small_weights = replace(GPU, l2_bytes=10**9)  # 0.27 GB of weights
    for gpu in (CPU, small_weights):
        least = prompt_s(run, gpu, decoding=True, model=SMALL)
        measured = record(run, decode_s_per_token=(factor * least,))
        assert bool(impossible(measured, SMALL, gpu)) is is_refused


def test_where_no_cache_is_stated_larger_weights_are_read_from_memory() -> None:
    run = replace(SERVE, model=SMALL.name, precision="bf16-pure")
    unstated = replace(GPU, l2_bytes=None)
    least = prompt_s(run, unstated, decoding=True, model=SMALL)
    found = impossible(record(run, decode_s_per_token=(0.1 * least,)), SMALL, unstated)
    assert "faster than the datasheet" in found


@pytest.mark.parametrize(("mib", "is_cached"), [(127.9, True), (128.1, False)])
def test_weights_of_128_mib_are_too_large_for_a_cache_that_nobody_stated(
    mib: float, is_cached: bool
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "tie_word_embeddings": True,
    }
    fewer = families.build(config | {"vocab_size": 1000}, name="m").num_params - 1000 * 64
    words = round((mib * 2**20 / 2 - fewer) / 64)
    spec = families.build(config | {"vocab_size": words}, name="m")
    unstated = replace(GPU, l2_bytes=None)
    run = replace(SERVE, model="m", precision="bf16-pure")
    least = prompt_s(run, unstated, decoding=True, model=spec)
    found = impossible(record(run, decode_s_per_token=(0.5 * least,)), spec, unstated)
    assert (found == "") is is_cached


def test_a_host_may_have_more_memory_than_the_file_of_its_cpu_says() -> None:
    size = 4 * CPU.memory_bytes
    assert impossible(record(TRAIN, peak_allocated_bytes=size), MODEL, CPU) == ""


def test_the_fastest_rate_that_a_library_may_choose_is_the_limit() -> None:
    """8-bit units have twice the rate of 16 bit, and no power sets a limit."""
    run = replace(SERVE, quant="int8", prompt_len=8192)
    least = prompt_s(run, GPU, decoding=False)
    assert GPU.peak_flops_per_s["int8"] == 2 * GPU.peak_flops_per_s["bf16"]
    floor = 0.8 / 2
    assert impossible(record(run, prefill_s=(1.02 * floor * least,)), MODEL, GPU) == ""
    assert impossible(record(run, prefill_s=(0.98 * floor * least,)), MODEL, GPU)
    full = replace(run, quant="none")
    least = prompt_s(full, GPU, decoding=False)
    assert impossible(record(full, prefill_s=(1.02 * floor * least,)), MODEL, GPU)


def test_only_a_quantised_mixture_may_be_smaller_than_its_stored_weights() -> None:
    """57.4 billion parameters: 107 GiB in 16 bit; in 8 and in 4 bit no less than the codes."""
    model = load_model("Qwen/Qwen2-57B-A14B")
    gpu = replace(GPU, memory_bytes=200 * 2**30)
    sizes = {"none": 107, "gptq-int8": 53.4, "gptq-int4": 26.7}
    for quant, least_gib in sizes.items():
        run = RunConfig(model=model.name, phase="inference", quant=quant)
        for factor, is_refused in ((0.99, False), (0.95, True)):
            size = round(factor * least_gib * 2**30)
            found = impossible(record(run, peak_allocated_bytes=size), model, gpu)
            assert bool(found) is is_refused, quant


@pytest.mark.parametrize(("new_tokens", "is_judged"), [(1, False), (2, True)])
def test_a_single_token_comes_from_the_prompt_and_has_no_decoding_step(
    new_tokens: int, is_judged: bool
) -> None:
    run = replace(SERVE, max_new_tokens=new_tokens)
    assert bool(impossible(record(run, decode_s_per_token=(1e-6,)), MODEL, GPU)) is is_judged
