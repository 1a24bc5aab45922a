"""Measurements become coefficients: `samples` of runs, through `regression`, per phase and device.

Coefficients of the time phases and factors on the parts of the ledger are fitted alike. Every fit
reports the error on runs it was not fitted to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from whichlora import timing
from whichlora.architecture import ModelSpec
from whichlora.calibration import (
    TIME_PHASES,
    Calibration,
    HeldOut,
    MemoryModel,
    Outlier,
    digest_of,
    part_spread,
    prior_calibration,
)
from whichlora.errors import WhichLoraError
from whichlora.formulas import formulas_digest
from whichlora.memory.ledger import PARTS
from whichlora.prediction import TIME_CONFIDENCE
from whichlora.regression import (
    conformal_scale,
    covariance_of,
    held_out_noise,
    pooled_noise,
    robust_weights,
    solve,
)
from whichlora.resolution import resolve
from whichlora.results import Measurement
from whichlora.samples import Sample, Table, folds, memory_samples, time_samples
from whichlora.specs import GpuSpec
from whichlora.timing import FEATURES, TimeModel, prior, prior_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FindModel = Callable[[Measurement], ModelSpec]

_MAX_ROUNDS = 12  # of active features and weights; they settle in three or four
# Relative standard deviation of a coefficient between library versions. Kind: fitted, to the
# published rows of A100: sources of 2023 and 2024 predicting each other (`docs/time.md`).
STACK_SPREAD = 0.15
ENOUGH_HELD_OUT = 20  # errors whose quantile stands for that of the device
REPORTED_WEIGHT = 0.25  # an error 2.7 times the ordinary, which one normal run in 150 has


def _held_out(table: Table, judge: Callable[[Table, Table], Array]) -> Array:
    """What `judge` says of samples left out of the fit that predicts them, a row for each.

    Where some were measured on the current versions, those alone are left out and judged.

    Args:
        judge: of the kept and the held samples, numbers by row of the latter.
    """
    import numpy as np

    judged = table.judged()
    found: list[Array] = []
    order: list[int] = []
    everything = np.arange(len(table.samples))
    for chosen in folds([table.samples[i] for i in judged.tolist()]):
        held = judged[chosen]
        kept = np.delete(everything, held)
        found.append(judge(table.take(kept), table.take(held)))
        order += chosen
    return np.asarray(np.concatenate(found)[np.argsort(order)])


# --- time ---------------------------------------------------------------------------------


def _active(model: TimeModel, columns: Mapping[str, Array]) -> Array:
    """The samples' features, those zeroed that do not decide their time."""
    import numpy as np

    counted = timing.deciding(model, columns)
    return np.column_stack([counted[name] for name in FEATURES])


def _time_errors(model: TimeModel, table: Table) -> Array:
    """Log of measured over predicted seconds."""
    import numpy as np

    predicted, _ = timing.seconds(model, table.columns)
    return np.asarray(np.log(table.values / np.maximum(predicted, 1e-12)))


def _time_variances(model: TimeModel, table: Table) -> Array:
    """What the coefficients' covariance adds to the variance of the log of each run's seconds."""
    import numpy as np

    rows = _active(model, table.columns)
    predicted = rows @ np.array([model.mean[name] for name in FEATURES])
    variances = np.einsum("ij,jk,ik->i", rows, np.array(model.covariance), rows)
    return np.asarray(np.maximum(variances, 0.0) / np.maximum(predicted, 1e-12) ** 2)


def fit_time(
    samples: Sequence[Sample], gpu: GpuSpec, phase: str, *, held_out: bool = False
) -> TimeModel:
    """Coefficients of one phase, the prior's where there is no sample.

    Args:
        held_out: take noise and interval scale from left-out runs, where there are enough.
    """
    table = Table.of(samples, FEATURES)
    model = _fit_time(table, gpu, phase)
    return _sharpened(model, table, gpu, phase)[0] if held_out else model


def _fit_time(table: Table, gpu: GpuSpec, phase: str) -> TimeModel:
    """Coefficients of one phase.

    Runs on other library versions teach only what this device's prior is: kernels and launch code
    change between versions, a device does not. However many they are, few runs on the current
    versions correct them.
    """
    import numpy as np

    model = prior_model(gpu, phase)
    spread_of = prior(gpu, phase)[1]
    older = table.older()
    if older.any():
        taught = regress(table.take(np.flatnonzero(older)), model, spread_of)
        model, spread_of = _carried(taught, spread_of)
    if not older.all():
        num_older = model.num_runs
        model = regress(table.take(np.flatnonzero(~older)), model, spread_of)
        model = replace(model, num_runs=model.num_runs + num_older)
    return model


def _carried(taught: TimeModel, widest: Mapping[str, float]) -> tuple[TimeModel, dict[str, float]]:
    """What runs on other versions say about the current ones, and the spread of that."""
    spread = {
        name: min(
            widest[name],
            math.hypot(math.sqrt(taught.covariance[i][i]), STACK_SPREAD * taught.mean[name]),
        )
        for i, name in enumerate(FEATURES)
    }
    covariance = tuple(tuple(spread[a] ** 2 if a == b else 0.0 for b in FEATURES) for a in FEATURES)
    return replace(taught, covariance=covariance), spread


def regress(table: Table, start: TimeModel, spread_of: Mapping[str, float]) -> TimeModel:
    """`start`, the prior of standard deviations `spread_of`, updated by the runs of `table`.

    Which of host and device decides a run, and which runs are outliers, depends on the
    coefficients: both are found by iteration.
    """
    import numpy as np

    model = start
    mean = np.array([start.mean[name] for name in FEATURES])
    spread = np.array([spread_of[name] for name in FEATURES])
    columns, values = table.columns, table.values
    start_noise = start.noise
    # a device is faster or slower than its prior as a whole: what differs from that is suspect
    errors = _time_errors(model, table)
    weights = robust_weights(errors - np.median(errors), start_noise)
    for _ in range(_MAX_ROUNDS):
        rows = _active(model, columns)
        coefficients = solve(rows, values, mean, spread, model.noise, weights)
        predicted = np.maximum(rows @ coefficients, 1e-12)
        errors = np.log(values / predicted)
        weights = robust_weights(errors, start_noise)
        updated = replace(
            model,
            mean=dict(zip(FEATURES, coefficients.tolist(), strict=True)),
            noise=pooled_noise(errors, start_noise, weights),
            num_runs=len(values),
        )
        settled = all(
            math.isclose(updated.mean[name], model.mean[name], rel_tol=1e-3, abs_tol=1e-15)
            for name in FEATURES
        )
        model = updated
        if settled:
            break
    covariance = covariance_of(rows, values, spread, model.noise, weights)
    return replace(model, covariance=tuple(map(tuple, covariance.tolist())))


def _held_out_time(table: Table, gpu: GpuSpec, phase: str) -> tuple[Array, Array]:
    """Log errors of samples left out, and the variance that their fit's coefficients have."""
    import numpy as np

    def judge(kept: Table, held: Table) -> Array:
        model = _fit_time(kept, gpu, phase)
        return np.column_stack([_time_errors(model, held), _time_variances(model, held)])

    errors, variances = _held_out(table, judge).T
    return errors, variances


# --- memory -------------------------------------------------------------------------------


def _memory_errors(model: MemoryModel, table: Table) -> Array:
    """Log of measured over predicted bytes."""
    import numpy as np

    predicted = np.zeros(len(table.values))
    for part in PARTS:
        predicted = predicted + table.columns[part] * model.mean[part]
    return np.asarray(np.log(table.values / np.maximum(predicted, 1.0)))


def fit_memory(samples: Sequence[Sample], start: MemoryModel) -> MemoryModel:
    """Factors on the parts of the ledger, close to one by prior."""
    return _fit_memory(Table.of(samples, PARTS), start)


def _fit_memory(table: Table, start: MemoryModel) -> MemoryModel:
    import numpy as np

    if not table.samples:
        return start
    spread_of = part_spread()
    mean = np.ones(len(PARTS))
    spread = np.array([spread_of[part] for part in PARTS])
    values = table.values
    rows = np.column_stack([table.columns[part] for part in PARTS])
    noise, coefficients = start.noise, mean
    errors = _memory_errors(start, table)
    weights = robust_weights(errors - np.median(errors), noise)
    for _ in range(_MAX_ROUNDS):
        before = coefficients
        coefficients = solve(rows, values, mean, spread, noise, weights)
        predicted = np.maximum(rows @ coefficients, 1.0)
        errors = np.log(values / predicted)
        weights = robust_weights(errors, start.noise)
        noise = pooled_noise(errors, start.noise, weights)
        if np.allclose(coefficients, before, rtol=1e-4, atol=1e-6):
            break
    covariance = covariance_of(rows, values, spread, noise, weights)
    return MemoryModel(
        mean=dict(zip(PARTS, coefficients.tolist(), strict=True)),
        covariance=tuple(map(tuple, covariance.tolist())),
        noise=noise,
        num_runs=len(values),
    )


def _held_out_memory(table: Table, start: MemoryModel) -> Array:
    def errors_of(kept: Table, held: Table) -> Array:
        return _memory_errors(_fit_memory(kept, start), held)

    return _held_out(table, errors_of)


def _sharpened(model: TimeModel, table: Table, gpu: GpuSpec, phase: str) -> tuple[TimeModel, Array]:
    """`model` with noise and interval scale from left-out runs, and the log errors of these."""
    import numpy as np

    errors, variances = _held_out_time(table, gpu, phase)
    # where all are of other versions, `STACK_SPREAD` has what a left-out run would add
    if not table.older().all():
        model = replace(model, noise=held_out_noise(errors, prior_model(gpu, phase).noise))
    if len(errors) >= ENOUGH_HELD_OUT:
        stated = np.sqrt(variances + model.noise**2)
        scale = conformal_scale(errors, stated, TIME_CONFIDENCE)
        assert scale is not None, "enough errors for the rank"
        model = replace(model, interval_scale=scale)
    return model, errors


# --- everything ---------------------------------------------------------------------------


def _summary(errors: Array) -> HeldOut:
    sizes = sorted(abs(math.expm1(error)) for error in errors.tolist())
    return HeldOut(num_runs=len(sizes), median=median(sizes), worst=sizes[-1])


def _outliers(table: Table, phase: str, errors: Array, prior_noise: float) -> Iterator[Outlier]:
    """The samples that the fit with these log errors listened to less, farthest first."""
    import numpy as np

    weights = robust_weights(errors, prior_noise)
    for i in np.argsort(weights, kind="stable"):
        if weights[i] >= REPORTED_WEIGHT:
            return
        yield Outlier(
            record=table.samples[i].record,
            phase=phase,
            weight=float(weights[i]),
            ratio=math.exp(errors[i]),
        )


def _ranges(
    samples: Sequence[Sample], num_params: Mapping[str, int]
) -> dict[str, tuple[float, float]]:
    groups = {sample.group for sample in samples}
    columns: dict[str, list[float]] = {"num_params": [num_params[group] for group in groups]}
    for sample in samples:
        for name, value in sample.shape.items():
            columns.setdefault(name, []).append(float(value))
    return {name: (min(values), max(values)) for name, values in columns.items()}


def digest(measurements: Iterable[Measurement]) -> str:
    """Names the set of records, whatever their order."""
    return digest_of(measurement.id for measurement in measurements)


def _gather(
    measurements: Iterable[Measurement], gpu: GpuSpec, find_model: FindModel
) -> tuple[dict[str, list[Sample]], dict[str, int], dict[str, str]]:
    """Samples by "memory" and time phase, parameters by model, why a record has no sample."""
    found: dict[str, list[Sample]] = {phase: [] for phase in ("memory", *TIME_PHASES)}
    num_params: dict[str, int] = {}
    left_out: dict[str, str] = {}
    models: dict[tuple[object, str], ModelSpec | WhichLoraError] = {}
    for measurement in measurements:
        if measurement.outcome != "ok":
            continue
        key = (measurement.config.get("model"), json.dumps(measurement.model_config))
        if key not in models:
            try:
                models[key] = find_model(measurement)
            except WhichLoraError as error:
                models[key] = error
        try:
            model = models[key]
            if isinstance(model, WhichLoraError):
                raise model
            job = resolve(model, measurement.run, gpu)
        except WhichLoraError as error:  # of a newer release, or a model whose config is not here
            left_out[measurement.id] = str(error)
            continue
        if job.run.model not in num_params:
            num_params[job.run.model] = model.num_params
        for phase, samples in time_samples(job, measurement).items():
            found[phase].extend(samples)
        if not job.run.libraries:
            found["memory"].extend(memory_samples(job, measurement))
    return found, num_params, left_out


def fit(
    measurements: Sequence[Measurement],
    gpu: GpuSpec,
    find_model: FindModel,
    *,
    held_out: bool = True,
) -> Calibration:
    """Calibrate the predictors of `gpu` to `measurements`; failures teach nothing here yet.

    Nor do runs on other library versions teach memory: its formulas know the versions, and what
    is left over differs between them.

    Args:
        find_model: architecture of a measurement; one that it can't name is left out. It is
            asked once per model.
        held_out: also measure the error on left-out runs, and take the noise from it. During a
            search the fit is repeated after every run and the residuals must do.
    """
    start = prior_calibration(gpu)
    found, num_params, left_out = _gather(measurements, gpu, find_model)
    summaries: dict[str, HeldOut] = {}
    cold: dict[str, HeldOut] = {}
    outliers: list[Outlier] = []
    time: dict[str, TimeModel] = {}
    for phase in TIME_PHASES:
        before, table = start.time[phase], Table.of(found[phase], FEATURES)
        model = _fit_time(table, gpu, phase)
        if found[phase]:
            cold[phase] = _summary(_time_errors(before, table.take(table.judged())))
            outliers += _outliers(table, phase, _time_errors(model, table), before.noise)
        if held_out and len(table.judged()) >= 3:
            model, errors = _sharpened(model, table, gpu, phase)
            summaries[phase] = _summary(errors)
        time[phase] = model
    table = Table.of(found["memory"], PARTS)
    memory = _fit_memory(table, start.memory)
    if found["memory"]:
        cold["memory"] = _summary(_memory_errors(start.memory, table))
        errors = _memory_errors(memory, table)
        outliers += _outliers(table, "memory", errors, start.memory.noise)
    if held_out and len(found["memory"]) >= 3:
        errors = _held_out_memory(table, start.memory)
        summaries["memory"] = _summary(errors)
        memory = replace(memory, noise=held_out_noise(errors, start.memory.noise))
    return Calibration(
        gpu=gpu.key,
        memory=memory,
        time=time,
        num_records=len(measurements),
        held_out=summaries,
        cold=cold,
        ranges={phase: _ranges(samples, num_params) for phase, samples in found.items() if samples},
        outliers=tuple(outliers),
        left_out=left_out,
        digest=digest(measurements),
        formulas=formulas_digest(),
        num_older=sum(bool(one.config.get("libraries")) for one in measurements),
    )
