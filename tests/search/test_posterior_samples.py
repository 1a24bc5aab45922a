"""The posterior samples of a shortlist err as much as a single prediction says that it may."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.counted import count_block
from whichlora.predict.judged import judged_memory
from whichlora.predict.judgement import MEMORY_CONFIDENCE, TIME_CONFIDENCE
from whichlora.predict.predict import predict
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.search.counted_training import count_together
from whichlora.search.shortlist import CountedPlan, Group, Requirements, _PosteriorSamples
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing import model as timing

GPU = find_gpu("a100-sxm-80gb")
SPEC = load_model("Qwen/Qwen2.5-0.5B")
TRAIN = RunConfig(model=SPEC.name, batch_size=2, seq_len=512, r=8)


def posterior_samples(monkeypatch: pytest.MonkeyPatch) -> _PosteriorSamples:
    monkeypatch.setattr("whichlora.search.shortlist.NUM_SAMPLES", 20_000)
    return _PosteriorSamples(np.random.default_rng(0), prior_calibration(GPU))


def test_a_training_errs_as_its_prediction_does(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {
        "batch_size": np.array([[2, 4]]),
        "seq_len": np.array([[512, 512]]),
        "r": np.array([[8], [16]]),
    }
    steps = [{512: 30.0, 256: 10.0}, {512: 15.0}]
    job = resolve(SPEC, TRAIN, GPU)
    group = Group(job=job, axes=axes, steps=steps)
    (counted,) = count_together([group], form)
    samples, calibration = posterior_samples(monkeypatch), prior_calibration(GPU)
    seconds = samples.seconds(counted, counted.whole_training(calibration))
    num_bytes = samples.num_bytes(counted)
    model = prior_calibration(GPU).time["finetune"]
    expected = []
    for r in (8, 16):
        for batch_size, counts in zip((2, 4), steps, strict=True):
            expected.append(
                sum(
                    number
                    * timing.seconds(
                        model, step_features(job, batch_size=batch_size, seq_len=width, r=r)
                    )[0]
                    for width, number in counts.items()
                )
            )
    assert seconds[0] == pytest.approx(expected)
    # the second candidate of each rank has steps of one length only: as one prediction of it
    features = step_features(job, batch_size=4, seq_len=512, r=8)
    total, _ = timing.seconds(model, features)
    of_a_search = replace(model, regime_scales={})  # whose candidates err together
    deviation = timing.log_deviation(of_a_search, features, total)
    assert np.log(seconds[1:, 1]).std() == pytest.approx(deviation, rel=0.03)
    # runs of one model and method mostly err together, and not wholly
    together = np.corrcoef(np.log(seconds[1:, :2]).T)[0, 1]
    assert 0.7 < together < 0.9999
    estimate = judged_memory(job, prior_calibration(GPU))  # samples of many runs replay none
    assert num_bytes[0][0] == pytest.approx(estimate.device_used_bytes)
    reach = np.log(estimate.bounds()[2] / estimate.device_used_bytes)
    spread = np.log(num_bytes[1:, 0]).std()
    assert spread == pytest.approx(reach / TWO_SIDED_Z[MEMORY_CONFIDENCE], rel=0.03)


@pytest.mark.parametrize("chance", [0.8, 0.9, 0.95])
def test_the_share_of_samples_that_fit_is_the_chance_to_fit(chance: float) -> None:
    samples = _PosteriorSamples(np.random.default_rng(0), prior_calibration(GPU))
    used, high = np.array([20e9]), np.array([25e9])
    reach = np.log(high / used) / TWO_SIDED_Z[MEMORY_CONFIDENCE]
    limit = used * np.exp(reach * NormalDist().inv_cdf(chance))
    fitting = (samples._bytes(used, high) <= limit).mean()
    assert fitting == pytest.approx(chance, abs=1.5 / len(samples._memory))


def test_an_inference_errs_as_its_prediction_does(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(model=SPEC.name, phase="inference", batch_size=4, prompt_len=256)
    axes = {"batch_size": np.array([[4]])}
    group = Group(job=resolve(SPEC, run, GPU), axes=axes)
    seconds, num_bytes = posterior_samples(monkeypatch).serving(count_block(group.job, group.axes))
    assert seconds.shape == num_bytes.shape == (20_000, 1)
    found = predict(SPEC, run, GPU, prior_calibration(GPU)).time
    assert seconds[0][0] == pytest.approx(found.time_per_token_s, rel=1e-6)
    reach = np.log(found.interval_s[1] / found.time_per_token_s)
    spread = np.log(seconds[1:, 0]).std()
    assert spread == pytest.approx(reach / TWO_SIDED_Z[TIME_CONFIDENCE], rel=0.03)


@pytest.mark.parametrize(("lora_alpha", "of_rank_16"), [(None, 32), (20, 20)])
def test_a_candidate_of_a_group_has_its_own_settings(
    lora_alpha: int | None, of_rank_16: int
) -> None:
    axes = {
        "batch_size": np.array([[2, 4, 8]]),
        "seq_len": np.array([[512, 480, 384]]),
        "r": np.array([[8], [16]]),
    }
    group = Group(job=resolve(SPEC, TRAIN, GPU), axes=axes, lora_alpha=lora_alpha)
    assert (group.shape, group.size) == ((2, 3), 6)
    run = group.run(4)
    assert (run.batch_size, run.seq_len, run.r, run.lora_alpha) == (4, 480, 16, of_rank_16)
    assert [run.batch_size for run in group.runs()] == [2, 4, 8, 2, 4, 8]


# --- which candidates stay


def form(run: RunConfig) -> RunConfig:
    """In which a candidate of either stage is served: merged, in 16 bit."""
    return RunConfig(model=run.model, phase="inference")


def shortlist(
    serving: list[Group],
    training: list[Group],
    calibration: Calibration,
    least: Requirements,
    served: Callable[[RunConfig], RunConfig],
) -> list[RunConfig]:
    plan = CountedPlan(lambda model: serving, lambda model: training, served)
    return plan.shortlist(calibration, least)


def training_group() -> Group:
    axes = {
        "batch_size": np.array([[1, 2, 4, 8, 16, 32]]),
        "seq_len": np.array([[512] * 6]),
        "r": np.array([[8], [16]]),
    }
    steps = [{512: 64.0 / batch_size} for batch_size in (1, 2, 4, 8, 16, 32)]
    return Group(job=resolve(SPEC, TRAIN, GPU), axes=axes, steps=steps)


def serving_group() -> Group:
    run = RunConfig(model=SPEC.name, phase="inference", prompt_len=4096, max_new_tokens=1)
    return Group(
        job=resolve(SPEC, run, GPU), axes={"batch_size": np.array([[64, 48, 32, 16, 8, 4, 2, 1]])}
    )


def requirements(**limits: Any) -> Requirements:
    none = dict.fromkeys(("inference_s", "inference_bytes", "total_s", "finetune_bytes"), math.inf)
    return Requirements(tier={SPEC.name: 0.0}, prefer="time", **(none | limits))


def used_bytes(run: RunConfig) -> int:
    return predict(SPEC, run, GPU, prior_calibration(GPU)).memory.device_used_bytes


def test_of_each_form_the_shapes_stay_that_surely_meet_the_limits() -> None:
    group = serving_group()
    by_size = {run.batch_size: used_bytes(run) for run in group.runs()}
    limit = (by_size[8] + by_size[16]) / 2
    calibration = prior_calibration(GPU)
    found = shortlist(
        [group], [training_group()], calibration, requirements(inference_bytes=limit), form
    )
    served = [run for run in found if run.phase == "inference"]
    assert {run.batch_size for run in served} == {8, 4, 2, 1}
    # as many shapes where all of them meet, the fastest per token first
    free = shortlist([group], [training_group()], calibration, requirements(), form)
    assert [run.batch_size for run in free if run.phase == "inference"] == [64, 48, 32, 16]


def test_what_can_not_be_served_is_kept_to_explain_what_is_lacking_and_nothing_else() -> None:
    calibration = prior_calibration(GPU)
    groups = [training_group()]
    refused = shortlist(
        [serving_group()], groups, calibration, requirements(inference_bytes=1.0), form
    )
    trained = [run for run in refused if run.phase == "finetune"]
    # the fastest and the smallest of the model
    smallest = min(groups[0].runs(), key=used_bytes)
    assert len(trained) == 2
    assert smallest in trained
    not_asked = shortlist([], groups, calibration, requirements(), form)
    assert {run.phase for run in not_asked} == {"finetune"}
    assert len(not_asked) > 2
    assert set(trained) <= set(not_asked)


def test_what_takes_too_long_or_too_much_is_no_best_of_a_sample() -> None:
    calibration = prior_calibration(GPU)
    groups = [training_group()]
    for limits in ({"total_s": 1e-9}, {"finetune_bytes": 1.0}):
        assert len(shortlist([], groups, calibration, requirements(**limits), form)) == 2


def test_who_prefers_memory_gets_the_smallest_first() -> None:
    groups = [training_group()]
    smallest = sorted(groups[0].runs(), key=used_bytes)
    by_memory = shortlist(
        [], groups, prior_calibration(GPU), replace(requirements(), prefer="memory"), form
    )
    # memory errs alike for all, so each sample has the same four; the fastest explains
    assert set(smallest[:4]) <= set(by_memory)
    assert len(by_memory) == 5


def test_candidates_of_several_groups_compete_with_each_other() -> None:
    whole = training_group()
    by_rank = [
        replace(whole, axes=whole.axes | {"r": whole.axes["r"][rank : rank + 1]}) for rank in (0, 1)
    ]
    least = replace(requirements(), prefer="memory")
    calibration = prior_calibration(GPU)
    together = shortlist([], [whole], calibration, least, form)
    apart = shortlist([], by_rank, calibration, least, form)
    assert set(apart) == set(together)
