"""Evaluations on several GPUs, against those of one and by what a strategy keeps."""

from __future__ import annotations

import pytest
from devices import A100

from whichlora.parallel.communicators import communicator_bytes
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.evaluation_and_saving import evaluation_of_ranks, evaluation_peak_bytes
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.units import MiB

MODEL = load_model("meta-llama/Llama-3.2-1B")
CALIBRATION = prior_calibration(A100)


def peak(strategy: str | None, gpus: int = 4, **run: int) -> int:
    parallel = ONE_GPU if strategy is None else ParallelConfig(strategy=strategy, gpus=gpus)
    settings = {"model": MODEL.name, "method": "full", "parallel": parallel, "seq_len": 512} | run
    job = resolve(MODEL, RunConfig(**settings), A100)  # type: ignore[arg-type]
    return evaluation_peak_bytes(job, CALIBRATION, width=512)


def test_a_rank_of_ddp_has_what_one_gpu_has_and_buckets() -> None:
    added = peak("ddp", batch_size=8) - peak(None, batch_size=8)
    buckets = 2 * MODEL.num_params  # as wide as the gradients, kept between steps
    nccl = communicator_bytes(4, A100)
    assert added == pytest.approx(buckets + nccl, rel=0.01)


def test_accumulated_gradients_are_gone_by_then() -> None:
    assert peak("zero2", gradient_accumulation_steps=4) == peak("zero2")


def test_more_ranks_keep_less_beside_the_rows() -> None:
    two, eight = peak("zero3", 2), peak("zero3", 8)
    states = 14 * MODEL.num_params * (1 / 2 - 1 / 8)  # weights, their fp32 copy, two states
    assert two - eight > states
    rows = peak("zero3", 8, batch_size=8) - peak("zero3", 8, batch_size=4)
    assert rows == pytest.approx(peak(None, batch_size=8) - peak(None, batch_size=4), rel=0.02)


def test_of_stages_the_one_with_the_loss_needs_most() -> None:
    job = resolve(
        MODEL,
        RunConfig(
            model=MODEL.name,
            batch_size=8,
            seq_len=512,
            parallel=ParallelConfig(strategy="device-map", gpus=2),
        ),
        A100,
    )
    judged = evaluation_of_ranks(job, CALIBRATION)
    assert judged.moments[int(judged.position)].endswith("loss_forward")
    assert judged.device_used_bytes > 8 * 512 * 128_256 * 4 + MiB
