"""Pipeline parallelism: stages, micro-batches under way, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from train_runs import run_ranks

from whichlora.errors import ConfigError
from whichlora.parallel import pp
from whichlora.parallel.pp import layer_range, under_way
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

MODEL = load_model("meta-llama/Llama-3.1-8B")


def job_of(gpus: int, micro_batches: int, **settings: Any) -> ResolvedRun:
    parallel = ParallelConfig(strategy="pp", gpus=gpus, options=(("pp_size", gpus),))
    run = RunConfig(
        model=MODEL.name,
        method="lora",
        seq_len=512,
        gradient_accumulation_steps=micro_batches,
        parallel=parallel,
        **settings,
    )
    return resolve(MODEL, run, find_gpu("a100-sxm-80gb"))


def test_the_last_stage_has_what_is_left_over() -> None:
    assert [len(layer_range(stage, 3, 32)) for stage in range(3)] == [10, 10, 12]


def test_the_first_stage_has_the_most_micro_batches_under_way() -> None:
    assert [under_way(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert under_way(0, 4, 2) == 2


def test_stages_hold_waiting_micro_batches_and_buffers_for_all() -> None:
    job = job_of(4, 8, gradient_checkpointing=True)
    assert job.layout is not None
    first, second, *_, last = job.layout.rank_kinds(training_step(job))
    stream = 512 * 4096 * 2

    def sizes(kind: Any, fact: Any) -> list[int]:
        entries = job.layout.ledger(kind).moments["layer_backward"]  # type: ignore[union-attr]
        return [entry.num_bytes for entry in entries if entry.fact is fact]

    assert sizes(first, pp.BUFFERS) == [8 * stream, 0]
    assert sizes(second, pp.BUFFERS) == [16 * stream, -3 * stream]
    assert sizes(first, pp.WAITING) == [3 * 8 * stream]
    assert sizes(last, pp.OUTPUTS) == [0]
    assert "loss_backward" not in job.layout.ledger(first).moments


def test_each_boundary_sends_every_micro_batch_both_ways() -> None:
    job = job_of(2, 4)
    assert job.layout is not None
    first, last = job.layout.rank_kinds(training_step(job))
    (forward,) = job.layout.messages(first)
    (backward,) = job.layout.messages(last)
    assert forward.count == backward.count
    assert forward.num_bytes == backward.num_bytes == 512 * 4096 * 2


@pytest.mark.parametrize(
    ("gpus", "micro_batches", "message"),
    [
        (4, 2, "2 micro-batches are fewer than the 4 stages of pp"),
        (64, 64, "64 stages for the 32 layers"),
    ],
)
def test_what_the_schedule_cannot_run_is_refused(
    gpus: int, micro_batches: int, message: str
) -> None:
    job = job_of(gpus, micro_batches)
    assert job.layout is not None
    step = training_step(job)
    with pytest.raises(ConfigError, match=message):
        job.layout.check(step)


@pytest.mark.oracle
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 4)])
def test_gloo_processes_keep_as_many(tmp_path: Path, stages: int, micro_batches: int) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).with_name("pipeline_stages.py")
    printed = "".join(
        run_ranks(script, str(micro_batches), world_size=stages, logs_folder=tmp_path)
    )
    kept = {
        int(stage): (int(waiting), int(buffers))
        for stage, waiting, buffers in re.findall(r"kept (\d+) (\d+) (\d+)", printed)
    }
    assert kept == {
        stage: (
            under_way(stage, stages, micro_batches),
            micro_batches * ((stage > 0) + (stage < stages - 1)),
        )
        for stage in range(stages)
    }
