"""Blocks of candidates: the same numbers as one candidate at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    every_finetune_run,
    every_inference_run,
    finetune_runs,
    inference_runs,
)

from whichlora.errors import ConfigError
from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.predict import predict, predict_block
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing.model import FEATURES

DEVICES = st.sampled_from((CPU, find_gpu("a100-sxm-80gb"), find_gpu("rtx-2080-ti-11gb")))
SIZES = st.lists(st.integers(1, 96), min_size=1, max_size=3, unique=True)
LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=3, unique=True)


@st.composite
def calibrations(draw: st.DrawFn, gpu: GpuSpec) -> Calibration:
    """The prior, or one whose factors differ from it and hang together."""
    prior = prior_calibration(gpu)
    if draw(st.booleans()):
        return prior
    rng = np.random.default_rng(draw(st.integers(0, 9)))

    def like(covariance: object) -> tuple[tuple[float, ...], ...]:
        spread = np.sqrt(np.diagonal(np.array(covariance)))
        mixed = rng.normal(size=(len(spread), len(spread)))
        found = (mixed @ mixed.T) / len(spread) * np.outer(spread, spread)
        return tuple(map(tuple, found.tolist()))

    memory = replace(
        prior.memory,
        mean={part: float(rng.uniform(0.9, 1.1)) for part in PARTS},
        covariance=like(prior.memory.covariance),
    )
    time = {
        phase: replace(
            model,
            mean={name: model.mean[name] * float(rng.uniform(0.5, 2)) for name in FEATURES},
            covariance=like(model.covariance),
        )
        for phase, model in prior.time.items()
    }
    return replace(prior, memory=memory, time=time)


def assert_alike(
    run: RunConfig, gpu: GpuSpec, calibration: Calibration, axes: dict[str, list[int]]
) -> None:
    model = load_model(run.model)
    try:
        job = resolve(model, run, gpu)
    except ConfigError:
        return
    mesh = dict(zip(axes, np.ix_(*axes.values()), strict=True))
    block = predict_block(job, calibration, mesh)
    shape = tuple(len(values) for values in axes.values())
    for index in np.ndindex(shape):
        chosen = {name: values[i] for (name, values), i in zip(axes.items(), index, strict=True)}
        one = predict(model, replace(run, **chosen), gpu, calibration)
        memory, time = one.memory, one.time
        low, high = memory.interval_bytes
        for found, wanted in (
            (block.peak_allocated_bytes, memory.peak_allocated_bytes),
            (block.device_used_bytes, memory.device_used_bytes),
            (block.low_bytes, low),
            (block.high_bytes, high),
        ):
            assert found.shape == shape
            assert found[index] == pytest.approx(wanted, rel=1e-12, abs=1.0)
        seconds = time.time_per_token_s if time.step_s is None else time.step_s
        assert block.time_s[index] == pytest.approx(seconds, rel=1e-9)
        assert block.low_s[index] == pytest.approx(time.interval_s[0], rel=1e-9)
        assert block.high_s[index] == pytest.approx(time.interval_s[1], rel=1e-9)
        surely_fails = block.least_bytes[index] > one.usable_bytes and not one.fits
        assert (one.verdict == "fails") == surely_fails


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_block_of_training_says_what_each_run_says(data: st.DataObject) -> None:
    gpu = data.draw(DEVICES)
    run = data.draw(st.one_of(finetune_runs(), every_finetune_run()))
    axes = {"batch_size": data.draw(SIZES), "seq_len": data.draw(LENGTHS), "r": data.draw(SIZES)}
    assert_alike(run, gpu, data.draw(calibrations(gpu)), axes)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_block_of_inference_says_what_each_run_says(data: st.DataObject) -> None:
    gpu = data.draw(DEVICES)
    run = data.draw(st.one_of(inference_runs(), every_inference_run()))
    axes = {
        "batch_size": data.draw(SIZES),
        "prompt_len": data.draw(LENGTHS),
        "max_new_tokens": data.draw(SIZES),
        "r": data.draw(SIZES),
    }
    assert_alike(run, gpu, data.draw(calibrations(gpu)), axes)
