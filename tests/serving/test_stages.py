"""Pipelines of engines: how layers are divided, and what the fullest stage holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving import get_engine, sglang, vllm, vllm_memory, vllm_settings
from whichlora.serving.base import Served
from whichlora.serving.block_groups import blocks, cached_layers
from whichlora.serving.rank import rank_model
from whichlora.serving.stages import Stage, received_bytes, stages_of
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB
from whichlora.workflow.combinations import shared_by_engine

LLAMA = "meta-llama/Llama-3.1-8B"
GEMMA = "google/gemma-3-1b-pt"  # 22 sliding layers, and 4 others
PARTITION, TWO = vllm_settings.PARTITION, {"pipeline_parallel_size": 2}
STAGES = {"vllm": "pipeline_parallel_size", "sglang": "pp_size"}


def served(engine: str = "vllm", model: str = LLAMA, gpu: GpuSpec = A100, **options: Any) -> Served:
    libraries = options.pop("libraries", ())
    run = RunConfig(
        model=model,
        phase="inference",
        serving=engine,
        context=8192,
        quant=options.pop("quant", "none"),
        libraries=libraries,
        serving_options=tuple(sorted(options.items())),
    )
    return resolve(load_model(model), run, gpu).served


@pytest.mark.parametrize(
    ("stages", "of_vllm", "of_sglang"),
    [
        (1, (32,), (32,)),
        (2, (16, 16), (16, 16)),
        (3, (11, 11, 10), (10, 11, 11)),
        (5, (6, 6, 7, 7, 6), (6, 6, 6, 7, 7)),  # two are left over
        (6, (5, 5, 5, 6, 6, 5), (5, 5, 5, 5, 6, 6)),
    ],
)
def test_each_engine_has_a_rule_of_its_own_for_layers_that_are_left_over(
    stages: int, of_vllm: tuple[int, ...], of_sglang: tuple[int, ...]
) -> None:
    asked = served("vllm", pipeline_parallel_size=stages)
    assert sum(of_vllm) == sum(of_sglang) == 32
    assert vllm_settings.stage_layers(asked) == of_vllm
    assert sglang.stage_layers(served("sglang", pp_size=stages)) == of_sglang


def test_layers_of_stages_may_be_stated() -> None:
    asked = served(pipeline_parallel_size=2, **{PARTITION: "8,24"})
    assert vllm_settings.stage_layers(asked) == (8, 24)
    assert vllm_memory.start(asked).stage == 2
    command = vllm.command(asked)
    assert command.startswith(f"{PARTITION}=8,24 vllm serve {LLAMA}")
    assert command.count("artition") + command.count(PARTITION) == 1


@pytest.mark.parametrize(("release", "share"), [("0.13.0", 1), ("0.15.1", 2), ("0.17.0", 1)])
def test_0_14_to_0_16_want_all_layers_on_one_stage(release: str, share: int) -> None:
    """Github.com/vllm-project/vllm/issues/34076: 3.18 GiB were said to hold 34,736 tokens."""
    small = replace(A100, memory_bytes=16 * GiB)
    asked = served(gpu=small, libraries=(("vllm", release),), **TWO)
    started = vllm_memory.start(asked)
    longest = started.max_context(131072)
    assert longest == pytest.approx(started.pool.max_context(131072) / share, rel=0.001)
    assert ("libraries vllm=0.17" in started.fault_at(longest + 16)) == (share == 2)


def test_the_last_stage_had_what_is_left_over_before_0_8() -> None:
    for version, layers in (("0.7.3", (6, 6, 6, 6, 8)), ("0.8", (6, 6, 7, 7, 6))):
        asked = served(pipeline_parallel_size=5, libraries=(("vllm", version),))
        assert vllm_settings.stage_layers(asked) == layers


@pytest.mark.parametrize("model", [LLAMA, "Qwen/Qwen2.5-0.5B"])  # the second's head is tied
def test_the_first_stage_looks_tokens_up_and_the_last_one_scores(model: str) -> None:
    whole = load_model(model)
    first, *_, last = stages = stages_of(whole, (whole.num_hidden_layers - 2, 1, 1))
    copies = 1 if whole.head_tied else 0
    table = whole.embeddings[0].num_params
    num_params = sum(stage.part.num_params for stage in stages)
    assert num_params == whole.num_params + copies * table
    assert first.is_first
    assert not first.is_last
    assert last.is_last
    assert [stage.part.num_hidden_layers for stage in stages][1:] == [1, 1]
    assert stages_of(whole, (whole.num_hidden_layers,)) == (Stage(number=1, part=whole),)


def test_later_stages_hold_what_the_stage_before_sends() -> None:
    first, last = stages_of(load_model(LLAMA), (16, 16))
    assert received_bytes(first, 2048, 2) == 0
    assert received_bytes(last, 2048, 2) == 2 * 2048 * 4096 * 2


@pytest.mark.parametrize("engine", STAGES)
def test_every_stage_has_as_many_blocks_as_the_fullest(engine: str) -> None:
    alone, start = get_engine(engine).start, get_engine(engine).start
    assert alone is not None
    assert start is not None
    again = {"restarted": True} if engine == "vllm" else {}  # without the first stage's trials
    whole = alone(served(engine, **again))
    halves = start(served(engine, **{STAGES[engine]: 2}, **again))
    assert (whole.stage, halves.stage) == (0, 2)  # which has the head, as large as the table
    assert halves.pool.block_bytes * 2 == whole.pool.block_bytes
    assert halves.pool.num_blocks > 2 * whole.pool.num_blocks
    held = sum(entry.num_bytes for entry in halves.entries_at(8192))
    assert held <= halves.budget_bytes < held + halves.pool.block_bytes


def test_a_start_fails_where_any_stage_fails() -> None:
    asked = served(model="meta-llama/Llama-3.1-70B", pipeline_parallel_size=2, restarted=True)
    assert vllm_memory.start(asked).fault == ""
    small = replace(A100, memory_bytes=60 * GiB)
    fault = vllm_memory.start(replace(asked, gpu=small)).fault
    assert fault.startswith("stage 2 of pipeline_parallel_size 2: weights alone take 65.74 GiB")


def test_a_published_first_stage_has_the_memory_that_its_log_states() -> None:
    """github.com/vllm-project/vllm/issues/34076: 16 of 48 layers on an RTX 5070 Ti, 3.18 GiB.

    nvidia-smi states 16,303 MiB of it, and torch 15.46 GiB of cards that it states so of.
    """
    gpu = replace(find_gpu("rtx-5070-ti-16gb"), memory_bytes=int(15.46 * GiB))
    asked = served(
        model="Qwen/Qwen3-30B-A3B",
        gpu=gpu,
        quant="fp8",
        libraries=(("vllm", "0.15.2"),),
        gpu_memory_utilization=0.9,
        pipeline_parallel_size=2,
    )
    first, _ = stages_of(asked.model, (16, 32))
    start = vllm_memory.start_of_stage(asked, first)
    assert start.pool.num_bytes / GiB == pytest.approx(3.18, abs=0.3)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_groups_of_layers_are_dealt_out_to_the_stages(stages: int) -> None:
    whole = load_model(GEMMA)
    layers = vllm_settings.stage_layers(served(model=GEMMA, pipeline_parallel_size=stages))
    cut = {"block_size": 16, "element_bytes": 2, "tokens_in_flight": 2048}
    kinds = cached_layers(whole)
    one = blocks(kinds, **cut)
    parts = [cached_layers(rank_model(stage.part, 1)) for stage in stages_of(whole, layers)]
    each = [blocks(kinds, part=part, **cut) for part in parts]
    assert {stage.blocks_of(8192) for stage in each} == {one.blocks_of(8192)}
    assert one.block_bytes <= sum(stage.block_bytes for stage in each) <= 1.5 * one.block_bytes


@pytest.mark.parametrize(
    ("engine", "model", "options", "fault"),
    [
        ("vllm", LLAMA, {"pipeline_parallel_size": 33}, "32 layers, too few for 33 stages"),
        ("sglang", "google/gemma-3-4b-pt", {"pp_size": 2}, "more than its text"),
        ("vllm", LLAMA, {"tensor_parallel_size": 3}, "; use tensor_parallel_size 1 with pipe"),
        ("sglang", LLAMA, {"tp_size": 6}, "by 6; use tp_size 2 with pp_size 3"),
        ("sglang", LLAMA, {"tp_size": 3, "pp_size": 2}, "tp_size 1 with pp_size 6"),
        ("vllm", LLAMA, {PARTITION: "16,16"}, "are 2 stages, and pipeline_parallel_size is 1; giv"),
        ("vllm", LLAMA, {PARTITION: "8,16", **TWO}, "24 layers, and .* has 32"),
        ("vllm", LLAMA, {PARTITION: "half", **TWO}, "one for each stage, such as 16,16"),
        ("vllm", LLAMA, {PARTITION: "16,0,16", **TWO}, "one for each stage"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    engine: str, model: str, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        served(engine, model, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (2, {}, {"tensor_parallel_size": 2}),
        (3, {"pipeline_parallel_size": 3}, {"pipeline_parallel_size": 3}),
        (
            16,
            {"pipeline_parallel_size": 2},
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 8},
        ),
        (4, {"pipeline_parallel_size": 3}, "gpus: 4, but pipeline_parallel_size is 3; give"),
        (
            4,
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 4},
            "gpus: 4, but tensor_parallel_size is 4 and pipeline_parallel_size 2",
        ),
    ],
)
def test_gpus_are_the_ranks_of_all_stages(
    gpus: int, options: dict[str, int], expected: dict[str, int] | str
) -> None:
    settings = {"serving": "vllm", "gpus": gpus, "serving_options": options}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            shared_by_engine(settings)
        return
    shared = dict(shared_by_engine(settings)["serving_options"])
    assert shared == expected
    run = RunConfig(
        model=LLAMA, phase="inference", serving="vllm", serving_options=tuple(shared.items())
    )
    assert get_engine("vllm").num_gpus(run) == gpus


def test_the_command_has_its_stages() -> None:
    assert "--pipeline-parallel-size 2" in vllm.command(served(pipeline_parallel_size=2))
    assert "--pp-size 2" in sglang.command(served("sglang", pp_size=2))


def test_notes_say_how_layers_are_divided_and_whose_bytes_these_are() -> None:
    asked = served(pipeline_parallel_size=3)
    assert vllm.notes(asked, vllm_memory.start(asked))[-1] == (
        "pipeline_parallel_size 3: 11 + 11 + 10 layers; bytes are of stage 1, the fullest"
    )
