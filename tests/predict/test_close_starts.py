"""Starts of serving engines whose pool is as near to what they need as pools are predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.api import estimate
from whichlora.predict.resolve import resolve
from whichlora.predict.serving import bounded
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.workflow import estimates

MODEL, GPU = "Qwen/Qwen1.5-14B", "a100-sxm-40gb"


def started(context: int, serving: str = "vllm", **options: int) -> Prediction:
    (answer,) = estimate(
        MODEL, GPU, phase="inference", serving=serving, context=context, serving_options=options
    )
    assert answer.serving is not None
    return answer


@pytest.mark.parametrize(
    ("share", "verdict", "starts"),
    [(0.5, "fits", "yes"), (0.99, "undecided", "maybe"), (1.01, "undecided", "maybe")],
)
def test_a_start_is_undecided_where_the_pool_may_be_on_either_side(
    share: float, verdict: str, starts: str
) -> None:
    longest = started(512).serving.max_context
    answer = started(round(share * longest))
    serving = answer.serving
    assert (answer.verdict, serving.starts_in_words) == (verdict, starts)
    assert serving.starts == (share < 1)
    low, high = serving.interval_kv_pool_bytes
    assert high - serving.kv_pool_bytes == serving.kv_pool_bytes - low > 0
    assert serving.is_close == (verdict == "undecided")
    if share > 1:
        assert "may not start: one sequence of" in serving.refusal("vllm")
        assert serving.reason.endswith("MiB")
    elif serving.is_close:
        assert any(note.endswith("it may not start") for note in answer.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_longest_context_is_one_that_surely_starts(engine: str) -> None:
    run = RunConfig(model=MODEL, phase="inference", serving=engine)
    (answer,) = estimates.estimate([run], [GPU], maximise="context")
    serving = answer.serving
    assert serving is not None
    assert answer.verdict == "fits"
    assert not serving.is_close
    assert serving.context < serving.max_context
    assert f"context {serving.context} is the longest of which a sequence surely" in answer.notes[0]
    assert answer.notes[0].endswith(f"; up to {serving.max_context} may")
    if engine == "vllm":
        assert started(serving.context + 16).verdict == "undecided"


def test_a_start_far_beyond_the_pool_is_refused() -> None:
    answer = started(2 * started(512).serving.max_context)
    assert (answer.verdict, answer.serving.starts_in_words) == ("fails", "no")
    assert "does not start" in answer.serving.refusal("vllm")


def test_what_llama_cpp_has_room_for_has_no_interval() -> None:
    serving = started(512, "llama-cpp").serving
    assert serving.interval_kv_pool_bytes == (serving.kv_pool_bytes,) * 2


@pytest.mark.parametrize(
    "stated", [{"num_gpu_blocks_override": 128}, {"kv_cache_memory_bytes": 1_700_000_000}]
)
def test_a_stated_pool_decides(stated: dict[str, int]) -> None:
    longest = started(512, **stated).serving.max_context
    assert (started(longest, **stated).verdict, started(longest + 16, **stated).verdict) == (
        "fits",
        "fails",
    )
    assert started(longest + 16, **stated).serving.starts_in_words == "no"
    most = started(longest, **stated)
    assert not any("may not start" in note for note in most.notes)
    low, high = most.serving.interval_kv_pool_bytes
    assert low == most.serving.kv_pool_bytes == high


STATEFUL = RunConfig(model="Qwen/Qwen3.5-9B", phase="inference", serving="vllm", context=8192)


def test_searches_state_as_many_sequences_as_an_engine_starts_with() -> None:
    card = find_gpu("rtx-3090-24gb")
    job = resolve(load_model(STATEFUL.model), STATEFUL, card)
    run, notes = bounded(job)
    assert dict(run.serving_options) == {"max_num_seqs": 32}
    assert notes == (
        "max_num_seqs 32 is given, without which vllm 0.33.0 does not start: its own 256 is more "
        "than the blocks for states of sequences",
    )
    stated = replace(STATEFUL, serving_options=(("max_num_seqs", 100),))
    job = resolve(load_model(STATEFUL.model), stated, card)
    assert bounded(job) == (job.run, ())


def test_where_and_the_longest_context_are_of_a_start_that_works() -> None:
    (asked,) = estimates.estimate([STATEFUL], ["rtx-3090-24gb"])
    (longest,) = estimates.estimate([STATEFUL], ["rtx-3090-24gb"], maximise="context")
    (placed,) = estimates.where(STATEFUL, ["rtx-3090-24gb"])
    assert placed.prediction is not None
    assert [asked.verdict, longest.verdict, placed.prediction.verdict] == ["fails", "fits", "fits"]
    assert longest.serving is not None
    assert "--max-num-seqs 32" in longest.serving.command
    assert any("max_num_seqs 32 is given" in note for note in longest.notes)


def test_a_number_of_sequences_near_the_blocks_is_undecided() -> None:
    (answer,) = estimates.estimate(
        [replace(STATEFUL, serving_options=(("max_num_seqs", 95),))], ["rtx-3090-24gb"]
    )
    assert answer.verdict == "undecided"


@pytest.mark.parametrize(
    ("model", "gpu", "options", "is_told"),
    [
        ("Qwen/Qwen3-8B", "rtx-4090-24gb", {}, True),
        ("Qwen/Qwen3-8B", "rtx-4090-24gb", {"libraries": {"vllm": "0.7.2"}}, True),
        ("Qwen/Qwen3-8B", "rtx-4090-24gb", {"context": 640}, False),
        ("Qwen/Qwen3-8B", "h100-sxm-80gb", {}, False),
        ("Qwen/Qwen3-8B", "rtx-4090-24gb", {"serving": "sglang"}, False),
        ("meta-llama/Llama-3.1-8B-Instruct", "rtx-4090-24gb", {}, False),  # another's config
    ],
)
def test_a_start_that_the_length_of_the_model_keeps_from_is_told(
    model: str, gpu: str, options: dict[str, Any], is_told: bool
) -> None:
    (answer,) = estimate(model, gpu, **{"serving": "vllm", **options})
    assert answer.serving is not None
    assert answer.serving.starts
    told = [note for note in answer.notes if note.startswith("no context is stated, so that 640 ")]
    assert bool(told) == is_told
    if told:
        longest = int(told[0].rpartition(" ")[2])
        assert 640 < longest < 40_960
        (asked,) = estimate(model, gpu, **{"serving": "vllm", **options, "context": 40_960})
        assert asked.serving is not None
        assert not asked.serving.starts
