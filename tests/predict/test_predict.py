"""Blocks of candidates: the same numbers as one candidate at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import every_finetune_run, every_inference_run, finetune_runs, inference_runs

from whichlora.errors import ConfigError
from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.counted import count_block
from whichlora.predict.judged import judge_block, judged_memory, judged_run, least_training_bytes
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
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
    block = judge_block(count_block(job, mesh), calibration)
    shape = tuple(len(values) for values in axes.values())
    corners = ((0,) * len(shape), tuple(size - 1 for size in shape))  # each takes a replay
    for index in corners:
        chosen = {name: values[i] for (name, values), i in zip(axes.items(), index, strict=True)}
        one = predict(model, replace(run, **chosen), gpu, calibration)
        # a block has the estimate of what the allocator keeps, a run its own replay
        memory, time = judged_memory(job, calibration, **chosen), one.time
        _, low, high = memory.bounds()
        assert memory.peak_allocated_bytes == one.memory.peak_allocated_bytes
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
        if one.fits:  # then no search prunes it, which looks at the least it needs
            assert block.least_bytes[index] <= one.usable_bytes


@settings(max_examples=100)
@given(st.data())
def test_a_block_of_training_says_what_each_run_says(data: st.DataObject) -> None:
    gpu = data.draw(DEVICES)
    run = data.draw(st.one_of(finetune_runs(), every_finetune_run()))
    axes = {"batch_size": data.draw(SIZES), "seq_len": data.draw(LENGTHS), "r": data.draw(SIZES)}
    assert_alike(run, gpu, data.draw(calibrations(gpu)), axes)


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(st.data())
def test_a_batch_is_ruled_out_by_no_more_than_what_each_rank_needs(data: st.DataObject) -> None:
    gpu = data.draw(DEVICES)
    run = data.draw(st.one_of(finetune_runs(), every_finetune_run()))
    calibration = data.draw(calibrations(gpu))
    try:
        job = resolve(load_model(run.model), run, gpu)
    except ConfigError:
        return
    ranks = data.draw(SIZES)
    batch_size, seq_len, r = np.ix_(data.draw(SIZES), data.draw(LENGTHS), ranks)
    try:
        least = least_training_bytes(
            job, calibration, batch_size=batch_size, seq_len=seq_len, least_r=min(ranks)
        )
    except ConfigError:  # experts of Llama 4 under bitsandbytes
        return
    judged = judged_memory(job, calibration, batch_size=batch_size, seq_len=seq_len, r=r)
    assert np.all(least <= judged.least())
    _, low, _ = judged.bounds()
    assert np.all(judged.least() <= low)


def test_a_batch_too_large_for_the_device_is_ruled_out() -> None:
    gpu = find_gpu("a100-sxm-80gb")
    run = RunConfig(model="meta-llama/Llama-3.1-8B")
    job = resolve(load_model(run.model), run, gpu)
    least = least_training_bytes(
        job, prior_calibration(gpu), batch_size=64, seq_len=4096, least_r=8
    )
    assert least > gpu.memory_bytes


def test_a_replay_of_the_run_narrows_what_the_allocator_may_take() -> None:
    job = resolve(
        load_model("meta-llama/Llama-3.1-8B"),
        RunConfig(model="meta-llama/Llama-3.1-8B", method="qlora", batch_size=4),
        find_gpu("h100-sxm-80gb"),
    )
    calibration = prior_calibration(job.gpu)
    estimate, replayed = judged_memory(job, calibration), judged_run(job, calibration)
    assert (estimate.is_replayed, replayed.is_replayed) == (False, True)
    assert replayed.peak_allocated_bytes == estimate.peak_allocated_bytes
    widths = [
        high - low for low, high in (estimate.reserved_interval(), replayed.reserved_interval())
    ]
    assert widths[1] < widths[0] / 2
    # the requests of the real code, with a workspace of 32 MiB after the first product of each pass
    assert replayed.peak_reserved_bytes / 2**20 == pytest.approx(30_630, rel=0.001)


def test_segments_that_a_cache_has_outgrown_make_no_request_fail() -> None:
    """The allocator gives whole segments back first, so that the card is full and nothing fails."""
    gpu, model = find_gpu("rtx-4090-24gb"), load_model("meta-llama/Llama-2-7b-hf")

    def predicted(batch_size: int) -> Prediction:
        run = RunConfig(
            model=model.name,
            phase="inference",
            batch_size=batch_size,
            prompt_len=512,
            max_new_tokens=512,
        )
        return predict(model, run, gpu, prior_calibration(gpu))

    grown = predicted(8)
    memory = grown.memory
    assert memory.device_used_bytes == memory.interval_bytes[1] == gpu.memory_bytes
    assert memory.allocated_interval_bytes[1] < 0.8 * gpu.memory_bytes
    assert memory.reserved_interval_bytes[1] == gpu.memory_bytes - memory.breakdown["context"]
    assert grown.verdict == "fits"
    # where the tensors alone may need more than the card has, that decides
    too_many = predicted(22)
    assert too_many.memory.interval_bytes[1] > gpu.memory_bytes
    assert too_many.verdict == "undecided"
