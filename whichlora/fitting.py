"""Measurements become coefficients: regularised, non-negative, in relative error.

    minimise  sum_i ((y_i - x_i·c) / (sigma y_i))^2 + sum_j ((c_j - m_j) / s_j)^2   with c >= 0

The prior (m, s) comes from the datasheet and from other devices, so that two runs already help
and none is needed. Every fit reports the error on runs it was not fitted to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from whichlora import timing
from whichlora.architecture import ModelSpec
from whichlora.calibration import (
    TIME_PHASES,
    Calibration,
    HeldOut,
    MemoryModel,
    part_spread,
    prior_calibration,
)
from whichlora.errors import WhichLoraError
from whichlora.memory.ledger import PARTS
from whichlora.prediction import (
    ALLOCATED_PARTS,
    Job,
    forward_features,
    ledger,
    part_bytes,
    resolve,
    step_features,
)
from whichlora.results import Measurement
from whichlora.specs import GpuSpec
from whichlora.timing import FEATURES, TimeModel, prior, prior_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FindModel = Callable[[Measurement], ModelSpec]

PRIOR_WEIGHT = 4.0  # runs that the prior's noise counts for when residuals are few
FOLDS = 10
_MIN_NOISE = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation: features, the measured value, and the model it belongs to."""

    group: str
    features: Mapping[str, float]
    value: float


def solve(rows: Array, values: Array, mean: Array, spread: Array, noise: float) -> Array:
    """Non-negative coefficients of the criterion above, by stacking the prior as rows.

    Args:
        rows: features, shape [num_runs, num_features].
        values: measured, shape [num_runs].
        mean, spread: prior of each coefficient, shape [num_features].
    """
    import numpy as np
    from sklearn.linear_model import LinearRegression

    weight = 1.0 / (noise * values)
    stacked = np.vstack([rows * weight[:, None], np.diag(1.0 / spread)])
    wanted = np.concatenate([values * weight, mean / spread])
    # columns differ by ten orders of magnitude (launches against seconds): scale by the prior
    regression = LinearRegression(positive=True, fit_intercept=False).fit(stacked * spread, wanted)
    return np.asarray(regression.coef_ * spread)


def covariance_of(rows: Array, values: Array, spread: Array, noise: float) -> Array:
    """Posterior covariance of the coefficients, shape [num_features, num_features]."""
    import numpy as np

    scaled = rows * (spread / (noise * values)[:, None])
    inner = np.linalg.inv(scaled.T @ scaled + np.eye(len(spread)))
    return np.asarray(inner * np.outer(spread, spread))


def pooled_noise(residuals: Sequence[float], prior_noise: float) -> float:
    """Standard deviation of log errors, the prior counting as `PRIOR_WEIGHT` runs."""
    total = PRIOR_WEIGHT * prior_noise**2 + sum(r * r for r in residuals)
    return max(_MIN_NOISE, math.sqrt(total / (PRIOR_WEIGHT + len(residuals))))


def folds(samples: Sequence[Sample]) -> list[list[int]]:
    """Held-out index sets: one per model where there are three or more, else up to ten."""
    groups = sorted({sample.group for sample in samples})
    if len(groups) >= 3:
        return [[i for i, s in enumerate(samples) if s.group == group] for group in groups]
    count = min(FOLDS, len(samples))
    return [list(range(start, len(samples), count)) for start in range(count)]


# --- time ---------------------------------------------------------------------------------


def _active(model: TimeModel, sample: Sample) -> list[float]:
    """The sample's features, those zeroed that do not decide its time."""
    _, parts = timing.seconds(model, sample.features)
    return [
        sample.features[name] if parts[name] or name == "constant" else 0.0 for name in FEATURES
    ]


def fit_time(samples: Sequence[Sample], gpu: GpuSpec, phase: str) -> TimeModel:
    """Coefficients of one phase; which of host and device decides a run is found by iteration."""
    import numpy as np

    model = prior_model(gpu, phase)
    if not samples:
        return model
    prior_mean, prior_spread = prior(gpu, phase)
    mean = np.array([prior_mean[name] for name in FEATURES])
    spread = np.array([prior_spread[name] for name in FEATURES])
    values = np.array([sample.value for sample in samples])
    start_noise = model.noise
    for _ in range(6):
        rows = np.array([_active(model, sample) for sample in samples])
        coefficients = solve(rows, values, mean, spread, model.noise)
        residuals = np.log(values) - np.log(np.maximum(rows @ coefficients, 1e-12))
        noise = pooled_noise(residuals.tolist(), start_noise)
        cov = covariance_of(rows, values, spread, noise)
        updated = TimeModel(
            mean=dict(zip(FEATURES, coefficients.tolist(), strict=True)),
            covariance=tuple(map(tuple, cov.tolist())),
            noise=noise,
            num_runs=len(samples),
            overlaps=model.overlaps,
        )
        settled = all(
            math.isclose(updated.mean[name], model.mean[name], rel_tol=1e-3, abs_tol=1e-15)
            for name in FEATURES
        )
        model = updated
        if settled:
            break
    return model


def _held_out_time(samples: Sequence[Sample], gpu: GpuSpec, phase: str) -> list[float]:
    """Log errors of samples left out of the fit that predicts them."""
    errors: list[float] = []
    for held in folds(samples):
        kept = [sample for i, sample in enumerate(samples) if i not in set(held)]
        model = fit_time(kept, gpu, phase)
        for i in held:
            predicted, _ = timing.seconds(model, samples[i].features)
            errors.append(math.log(samples[i].value / predicted))
    return errors


def time_samples(job: Job, measurement: Measurement) -> dict[str, list[Sample]]:
    """Observations by phase in one measurement: the median of its repetitions."""
    name = job.run.model
    found: dict[str, list[Sample]] = {}
    if measurement.step_s:
        lengths = measurement.batch_seq_len or (job.run.seq_len,) * len(measurement.step_s)
        by_length: dict[int, list[float]] = {}
        for length, step_s in zip(lengths, measurement.step_s, strict=True):
            by_length.setdefault(length, []).append(step_s)
        found["finetune"] = [
            Sample(name, step_features(job, seq_len=length), median(times))
            for length, times in by_length.items()
        ]
    prompt = job.run.prompt_len
    if measurement.prefill_s:
        features = forward_features(job, context=prompt, decoding=False)
        found["prefill"] = [Sample(name, features, median(measurement.prefill_s))]
    if measurement.decode_s_per_token:
        context = prompt + max(1, (job.run.max_new_tokens - 1) // 2)
        features = forward_features(job, context=context, decoding=True)
        found["decode"] = [Sample(name, features, median(measurement.decode_s_per_token))]
    return found


# --- memory -------------------------------------------------------------------------------


def memory_samples(job: Job, measurement: Measurement) -> list[Sample]:
    """Parts of the ledger at its peak against the measured counters, one sample each."""
    found = ledger(job)
    parts = {k: float(v) for k, v in part_bytes(job, found, found.peak_moment).items()}
    none = dict.fromkeys(PARTS, 0.0)
    live = none | {name: parts[name] for name in ALLOCATED_PARTS}
    samples = []
    if measurement.peak_allocated_bytes:
        samples.append(Sample(job.run.model, live, float(measurement.peak_allocated_bytes)))
    if measurement.peak_reserved_bytes:
        reserved = live | {"allocator": parts["allocator"]}
        samples.append(Sample(job.run.model, reserved, float(measurement.peak_reserved_bytes)))
    if measurement.device_used_bytes:
        samples.append(Sample(job.run.model, parts, float(measurement.device_used_bytes)))
    return samples


def fit_memory(samples: Sequence[Sample], start: MemoryModel) -> MemoryModel:
    """Factors on the parts of the ledger, close to one by prior."""
    import numpy as np

    if not samples:
        return start
    spread_of = part_spread()
    mean = np.ones(len(PARTS))
    spread = np.array([spread_of[part] for part in PARTS])
    rows = np.array([[sample.features[part] for part in PARTS] for sample in samples])
    values = np.array([sample.value for sample in samples])
    noise = start.noise
    coefficients = mean
    for _ in range(3):
        coefficients = solve(rows, values, mean, spread, noise)
        residuals = np.log(values) - np.log(np.maximum(rows @ coefficients, 1.0))
        noise = pooled_noise(residuals.tolist(), start.noise)
    cov = covariance_of(rows, values, spread, noise)
    return MemoryModel(
        mean=dict(zip(PARTS, coefficients.tolist(), strict=True)),
        covariance=tuple(map(tuple, cov.tolist())),
        noise=noise,
        num_runs=len(samples),
    )


def _held_out_memory(samples: Sequence[Sample], start: MemoryModel) -> list[float]:
    errors: list[float] = []
    for held in folds(samples):
        kept = [sample for i, sample in enumerate(samples) if i not in set(held)]
        model = fit_memory(kept, start)
        for i in held:
            predicted = sum(samples[i].features[part] * model.mean[part] for part in PARTS)
            errors.append(math.log(samples[i].value / predicted))
    return errors


# --- everything ---------------------------------------------------------------------------


def _summary(errors: Iterable[float]) -> HeldOut:
    sizes = sorted(abs(math.expm1(error)) for error in errors)
    return HeldOut(num_runs=len(sizes), median=median(sizes), worst=sizes[-1])


def digest(measurements: Iterable[Measurement]) -> str:
    """Names the set of records, whatever their order."""
    ids = "\n".join(sorted(measurement.id for measurement in measurements))
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def fit(
    measurements: Sequence[Measurement],
    gpu: GpuSpec,
    find_model: FindModel,
    *,
    held_out: bool = True,
) -> Calibration:
    """Calibrate the predictors of `gpu` to `measurements`; failures teach nothing here yet.

    Args:
        find_model: architecture of a measurement; one that it can't name is left out.
        held_out: also measure the error on left-out runs, and take the noise from it. During a
            search the fit is repeated after every run and the residuals must do.
    """
    start = prior_calibration(gpu)
    by_phase: dict[str, list[Sample]] = {phase: [] for phase in TIME_PHASES}
    for_memory: list[Sample] = []
    for measurement in measurements:
        if measurement.outcome != "ok":
            continue
        try:
            job = resolve(find_model(measurement), measurement.run, gpu)
        except WhichLoraError:
            continue  # a record of a newer release, or of a model whose config is not at hand
        for phase, samples in time_samples(job, measurement).items():
            by_phase[phase].extend(samples)
        for_memory.extend(memory_samples(job, measurement))

    summaries: dict[str, HeldOut] = {}
    time: dict[str, TimeModel] = {}
    for phase, samples in by_phase.items():
        model = fit_time(samples, gpu, phase)
        if held_out and len(samples) >= 3:
            errors = _held_out_time(samples, gpu, phase)
            summaries[phase] = _summary(errors)
            model = replace(model, noise=pooled_noise(errors, start.time[phase].noise))
        time[phase] = model
    memory = fit_memory(for_memory, start.memory)
    if held_out and len(for_memory) >= 3:
        errors = _held_out_memory(for_memory, start.memory)
        summaries["memory"] = _summary(errors)
        memory = replace(memory, noise=pooled_noise(errors, start.memory.noise))
    return Calibration(
        gpu=gpu.key,
        memory=memory,
        time=time,
        num_records=len(measurements),
        held_out=summaries,
        digest=digest(measurements),
    )
