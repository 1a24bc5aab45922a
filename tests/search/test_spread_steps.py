"""Candidates on several GPUs have the time in the search that a single prediction states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from whichlora.calibration.load import load_calibration
from whichlora.predict.counted import count_run, ranks_work
from whichlora.predict.judged import judged_ranks
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.counted_candidate import count_training
from whichlora.search.feasibility import Quantity
from whichlora.search.spread_steps import SpreadSteps
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.results import TimePrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing.model import FEATURES

A100 = find_gpu("a100-sxm-80gb")
MODEL = load_model("HuggingFaceTB/SmolLM2-135M")
LOADED = load_calibration(A100, None)
CALIBRATION = replace(  # as a search has it: one scale for a phase, whose candidates err together
    LOADED,
    time={phase: replace(model, regime_scales={}) for phase, model in LOADED.time.items()},
)


def run_of(strategy: str, **settings: object) -> RunConfig:
    parallel = ParallelConfig(strategy=strategy, gpus=4, interconnect="25GB/s")
    chosen = {"batch_size": 16, "seq_len": 2048, "gradient_accumulation_steps": 4} | settings
    return RunConfig(model=MODEL.name, method="full", parallel=parallel, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3", "pp", "device-map"])
def test_a_whole_training_is_the_sum_of_its_predicted_steps(strategy: str) -> None:
    run = run_of(strategy)
    steps = {128: 30.0, 256: 12.5, 512: 3.0}
    whole = SpreadSteps.of(resolve(MODEL, run, A100), steps).whole_training(CALIBRATION)
    mean = CALIBRATION.time["finetune"].mean
    seconds = whole.work @ np.array([mean[name] for name in FEATURES]) + whole.waits_s
    predicted = sum(
        count
        * (predict(MODEL, run_of(strategy, seq_len=width), A100, CALIBRATION).time.step_s or 0.0)
        for width, count in steps.items()
    )
    assert seconds == pytest.approx([predicted], rel=1e-9)


def in_the_search(run: RunConfig) -> tuple[Quantity, TimePrediction]:
    """Time of one step of `run` as the search has it, and as it is predicted alone."""
    counted = count_training(count_run(resolve(MODEL, run, A100)), {2048: 1.0}, profiled=[2048] * 5)
    time = CandidatePosterior([counted]).time(CALIBRATION).quantity(0)
    return time, predict(MODEL, run, A100, CALIBRATION).time


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
def test_the_posterior_of_a_spread_run_is_as_wide_as_its_prediction(strategy: str) -> None:
    time, predicted = in_the_search(run_of(strategy))
    assert time.value == pytest.approx(predicted.step_s)
    alone, alone_predicted = in_the_search(replace(run_of(strategy), parallel=ONE_GPU))

    def wider(quantity: Quantity, prediction: TimePrediction) -> float:
        low, high = prediction.interval_s
        return math.log(quantity.high / quantity.low) / math.log(high / low)

    assert wider(time, predicted) == pytest.approx(wider(alone, alone_predicted), rel=0.1)


def test_waiting_that_is_not_known_widens_the_posterior_and_no_coefficient_moves_it() -> None:
    slow = replace(run_of("ddp"), parallel=replace(run_of("ddp").parallel, interconnect="150MB/s"))
    job = resolve(MODEL, slow, A100)
    ranks = ranks_work(job)
    assert ranks is not None
    judged = judged_ranks(job, ranks, CALIBRATION)
    assert judged.waits_s > 0.5 * judged.time.total_s
    time, predicted = in_the_search(slow)
    assert time.value == pytest.approx(predicted.step_s)
    assert math.log(time.high / time.value) == pytest.approx(
        math.log(predicted.interval_s[1] / predicted.time_per_token_s / (16 * 2048 * 4 * 4)),
        rel=0.2,
    )
