"""Groups of fine-tunings: bounds that never exceed what is counted, and steps counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import check_layout
from whichlora.predict.judged import judge_moments
from whichlora.predict.parallel_choice import every
from whichlora.predict.rank_time import features_of_step
from whichlora.predict.resolve import resolve
from whichlora.search.counted_training import TrainingGroup, count_together, mean_of
from whichlora.search.shortlist import Group
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("a100-sxm-80gb")
SPEC = load_model("Qwen/Qwen2.5-0.5B")
CALIBRATION = prior_calibration(GPU)


def groups(method: str, **settings: Any) -> list[TrainingGroup]:
    """On one GPU, and on two and four under every strategy that accepts the run."""
    axes = {
        "batch_size": np.array([[1, 4]]),
        "seq_len": np.array([[512, 512]]),
        "r": np.array([[8]]),
    }
    run = RunConfig(model=SPEC.name, method=method, r=8, **settings)
    asked = [ParallelConfig(strategy="auto", gpus=n, interconnect="20GB/s") for n in (2, 4)]
    found = []
    for config in (ONE_GPU, *(each for some in asked for each in every(some))):
        try:
            job = resolve(SPEC, replace(run, parallel=config), GPU)
            check_layout(job)
        except ConfigError:
            continue
        steps = [{256: 64.0 / job.at_once, 512: 8.0}, {512: 16.0 / job.at_once}]
        found.append(Group(job=job, axes=axes, steps=steps))
    return count_together(found, lambda run: RunConfig(model=run.model, phase="inference"))


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_bounds_of_time_and_memory_never_exceed_what_is_counted(
    method: str, accumulation: int
) -> None:
    counted = groups(method, gradient_accumulation_steps=accumulation)
    assert len(counted) > 8
    model = CALIBRATION.time["finetune"]
    for each in counted:
        computing = each.computing(model).work @ mean_of(model)
        whole = each.whole_training(CALIBRATION)
        seconds = whole.work @ mean_of(model) + whole.waits_s
        name = each.group.job.run.parallel.in_words
        assert (computing <= seconds * (1 + 1e-9)).all(), name
        judged = judge_moments(each.group.job, each.moments, CALIBRATION)
        assert each.least_bytes(CALIBRATION) <= np.min(judged.least()), name


def test_a_share_of_the_weights_is_the_bound_of_a_strategy_that_divides_them() -> None:
    bounds = {
        (each.group.job.run.parallel.in_words, each.gpus): each.least_bytes(CALIBRATION)
        for each in groups("lora")
    }
    whole = bounds["-", 1]
    assert bounds["ddp", 4] == whole
    assert bounds["fsdp", 2] == pytest.approx(whole / 2, rel=0.01)
    assert bounds["fsdp", 4] == pytest.approx(whole / 4, rel=0.01)
    assert bounds["zero3, offload optimizer+params", 4] < whole / 100


def test_steps_that_several_strategies_compute_alike_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counting(step: Any, **more: Any) -> Any:
        calls.append(step)
        return features_of_step(step, **more)

    monkeypatch.setattr("whichlora.search.counted_training.features_of_step", counting)
    counted = [
        each
        for each in groups("lora")
        if each.group.job.run.parallel.strategy in ("none", "ddp", "zero1", "zero2")
    ]
    for each in counted:
        each.whole_training(CALIBRATION)
    assert len(counted) >= 7
    assert len(calls) == 2  # under autocast, and in DeepSpeed's dtypes
