"""What the ranks of one profile say → its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.errors import ConfigError, MeasurementError
from whichlora.profiler.profile import _worker_environment
from whichlora.profiler.ranks import merged
from whichlora.profiler.spread import spreading
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig

FIRST = {
    "outcome": "ok",
    "step_s": [1.0, 3.0],
    "batch_seq_len": [64, 32],
    "peak_allocated_bytes": 10,
    "device_used_bytes": None,
    "environment": {"device": "x"},
    "clean": True,
}
SECOND = {name: value for name, value in FIRST.items() if name != "environment"} | {
    "step_s": [2.0, 2.0],
    "peak_allocated_bytes": 12,
}


def test_the_largest_rank_is_the_record() -> None:
    assert merged([FIRST, SECOND], {}) == FIRST | {
        "step_s": [2.0, 3.0],
        "peak_allocated_bytes": 12,
    }


@pytest.mark.parametrize(
    ("second", "failures", "outcome", "detail"),
    [
        ({"outcome": "oom", "detail": "CUDA out of memory"}, {}, "oom", "rank 1 of 2: CUDA out"),
        (None, {1: -9}, "killed", "rank 1 of 2: killed by SIGKILL"),
        (None, {1: 3}, "crashed", "rank 1 of 2 ended with exit code 3"),
        (None, {}, "crashed", "rank 1 of 2 wrote nothing"),
    ],
)
def test_a_failed_rank_is_a_result(
    second: dict[str, Any] | None, failures: dict[int, int], outcome: str, detail: str
) -> None:
    told = merged([FIRST, second], failures)
    assert told["outcome"] == outcome
    assert told["detail"].startswith(detail)


def test_what_ran_out_of_memory_is_told_before_what_waited_for_it() -> None:
    waited = {"outcome": "error", "detail": "connection closed by peer"}
    told = merged([waited, {"outcome": "oom", "detail": "out of memory"}], {0: 1, 1: 1})
    assert (told["outcome"], told["detail"]) == ("oom", "rank 1 of 2: out of memory")


def spread(strategy: str, **settings: Any) -> RunConfig:
    config = ParallelConfig(strategy=strategy, gpus=4, **settings)
    return RunConfig(model="m", parallel=config, gradient_accumulation_steps=4)


def test_a_run_is_spread_as_its_strategy_says() -> None:
    assert not spreading(RunConfig(model="m")).divides
    assert spreading(spread("ddp")).micro_batches == 4
    assert not spreading(spread("ddp")).divides
    assert spreading(spread("fsdp")).divides
    assert spreading(spread("fsdp")).loads_on_host
    assert not spreading(spread("zero2")).divides_while_loading
    stage_3 = spreading(spread("zero3"))
    assert stage_3.divides_while_loading
    assert not stage_3.loads_on_host
    # transformers divides no quantised weights: each rank loads all of them
    quantised = spreading(replace(spread("zero3"), method="qlora"))
    assert not quantised.divides_while_loading
    assert not quantised.loads_on_host


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (spread("ddp", nodes=2), "nodes: 2 can't be profiled from one of them"),
        (spread("device-map"), "parallel: device-map with trainer transformers can't be"),
        (spread("pp"), "parallel: pp has no key in TrainingArguments"),
    ],
)
def test_what_cannot_be_profiled_says_why(run: RunConfig, message: str) -> None:
    with pytest.raises((ConfigError, MeasurementError), match=message):
        spreading(run)


def test_ranks_see_every_gpu_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _worker_environment("cuda", several=True)["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert _worker_environment("cpu", several=True)["CUDA_VISIBLE_DEVICES"] == ""
