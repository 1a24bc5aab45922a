"""Designed calibration: which runs are worth measuring, on devices whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest

from whichlora.calibration.design import Option, PredictedTime, choose
from whichlora.calibration.fit_time import fit_phases
from whichlora.calibration.samples import Sample
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing.model import FEATURES, TimeModel, prior, prior_model, seconds

GPU = find_gpu("h100-sxm-80gb")
MODELS = ("HuggingFaceTB/SmolLM2-1.7B", "Qwen/Qwen2.5-7B", "EleutherAI/pythia-160m")
PHASE = "finetune"
OVERHEAD_S = 5.0
BATCHES = 6
BUDGET_S = 90.0


@cache
def predicted_times() -> tuple[PredictedTime, ...]:
    runs = [
        RunConfig(model=model, method=method, batch_size=batch_size, seq_len=seq_len)
        for model in MODELS
        for method in ("lora", "qlora", "dora")
        for batch_size, seq_len in ((1, 128), (1, 2048), (8, 512), (16, 2048))
    ]
    found = [step_features(resolve(load_model(run.model), run, GPU)) for run in runs]
    return tuple(PredictedTime(PHASE, {k: float(v) for k, v in one.items()}) for one in found)


def option(predicted_time: PredictedTime, model: TimeModel) -> Option:
    return Option(
        (predicted_time,), OVERHEAD_S + BATCHES * float(seconds(model, predicted_time.features)[0])
    )


def device(seed: int) -> TimeModel:
    """A device somewhere within the prior."""
    dice = random.Random(seed)
    model = prior_model(GPU, PHASE)
    _, spread = prior(GPU, PHASE)
    drawn = {
        name: value * math.exp(dice.gauss(0, min(0.6, spread[name] / value)))
        for name, value in model.mean.items()
    }
    return replace(model, mean=drawn)


def measured(truth: TimeModel, predicted_time: PredictedTime, dice: random.Random) -> Sample:
    value = float(seconds(truth, predicted_time.features)[0]) * dice.lognormvariate(0, 0.03)
    return Sample("any", predicted_time.features, value)


def designed(truth: TimeModel, dice: random.Random) -> list[Sample]:
    samples: list[Sample] = []
    model, left, open_sights = prior_model(GPU, PHASE), BUDGET_S, list(predicted_times())
    while True:
        options = [option(one, model) for one in open_sights]
        chosen = choose(options, predicted_times(), {PHASE: model}, budget_s=left)
        if chosen is None:
            return samples
        predicted_time = open_sights.pop(chosen)
        samples.append(measured(truth, predicted_time, dice))
        left -= option(predicted_time, truth).cost_s
        model = fit_phases({PHASE: samples}, GPU)[PHASE]


def in_order(order: Sequence[PredictedTime], truth: TimeModel, dice: random.Random) -> list[Sample]:
    samples, left = [], BUDGET_S
    for predicted_time in order:
        left -= option(predicted_time, truth).cost_s
        if left < 0:
            break
        samples.append(measured(truth, predicted_time, dice))
    return samples


def error(samples: Sequence[Sample], truth: TimeModel) -> float:
    model = fit_phases({PHASE: samples}, GPU)[PHASE]
    return mean(
        abs(
            math.log(
                float(seconds(model, one.features)[0]) / float(seconds(truth, one.features)[0])
            )
        )
        for one in predicted_times()
    )


@pytest.mark.slow
def test_designed_runs_teach_more_than_random_ones_and_than_a_grid() -> None:
    errors: dict[str, list[float]] = {"designed": [], "random": [], "grid": []}
    for seed in range(12):
        truth, dice = device(seed), random.Random(seed)
        shuffled = random.Random(seed + 100).sample(predicted_times(), len(predicted_times()))
        grid = [*predicted_times()[::5], *predicted_times()]
        errors["designed"].append(error(designed(truth, dice), truth))
        errors["random"].append(error(in_order(shuffled, truth, dice), truth))
        errors["grid"].append(error(in_order(grid, truth, dice), truth))
    found = {name: mean(values) for name, values in errors.items()}
    assert found["designed"] < 0.8 * min(found["random"], found["grid"]), found


def test_a_run_that_shows_what_is_known_is_not_measured() -> None:
    model = prior_model(GPU, PHASE)
    zero = tuple((0.0,) * len(FEATURES) for _ in FEATURES)
    known = replace(model, covariance=zero)
    options = [option(one, model) for one in predicted_times()]
    assert choose(options, predicted_times(), {PHASE: known}, budget_s=1e9) is None
    assert choose(options, predicted_times(), {PHASE: model}, budget_s=1e9) is not None


def test_nothing_longer_than_the_budget_is_chosen() -> None:
    model = prior_model(GPU, PHASE)
    options = [option(one, model) for one in predicted_times()]
    shortest = min(one.cost_s for one in options)
    chosen = choose(options, predicted_times(), {PHASE: model}, budget_s=1.01 * shortest)
    assert chosen is not None
    assert options[chosen].cost_s <= 1.01 * shortest
    assert choose(options, predicted_times(), {PHASE: model}, budget_s=0.9 * shortest) is None


def test_of_two_runs_that_show_the_same_the_cheaper_one_is_chosen() -> None:
    predicted_time = predicted_times()[0]
    options = [Option((predicted_time,), 20.0), Option((predicted_time,), 10.0)]
    models = {PHASE: prior_model(GPU, PHASE)}
    assert choose(options, [predicted_time], models, budget_s=100.0) == 1


def test_a_phase_that_nobody_asks_for_is_not_measured() -> None:
    other = PredictedTime("decode", predicted_times()[0].features)
    models = {phase: prior_model(GPU, phase) for phase in (PHASE, "decode")}
    options = [Option((other,), 1.0)]
    assert choose(options, predicted_times(), models, budget_s=100.0) is None
    assert choose(options, [other], models, budget_s=100.0) == 0


@pytest.mark.parametrize("options", [[], [Option((), 1.0)]])
def test_without_anything_to_see_nothing_is_chosen(options: list[Option]) -> None:
    models = {PHASE: prior_model(GPU, PHASE)}
    assert choose(options, predicted_times(), models, budget_s=10.0) is None
