"""All coefficients of one device, from all of its records.

Importing this module raises `ConfigError` where scikit-learn is not installed.
"""

from __future__ import annotations

from whichlora.extras import require

require("a fit to recorded runs", "sklearn", extra="profile")  # before the imports below need it

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

import numpy as np

from whichlora.calibration.fit_memory import fit_memory, held_out_errors, memory_errors
from whichlora.calibration.fit_time import fit_phases, sharpened, time_errors
from whichlora.calibration.formula_version import formulas_digest
from whichlora.calibration.regression import Array, held_out_noise, robust_weights
from whichlora.calibration.samples import (
    Sample,
    as_elsewhere,
    judged,
    memory_samples,
    time_samples,
)
from whichlora.errors import WhichLoraError
from whichlora.predict.coefficients import (
    TIME_PHASES,
    Calibration,
    HeldOut,
    Outlier,
    digest_of,
    prior_calibration,
)
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.measurements import is_of_log
from whichlora.timing.model import REGIMES, TimeModel, regime_of, seconds

FindModel = Callable[[Measurement], ModelSpec]

# Measured over expected, least and greatest: beyond them it is no measurement of this device.
PLAUSIBLE_TIME = (1e-3, 1e4)
PLAUSIBLE_MEMORY = (0.05, 20.0)
WORTH_SAYING = 0.1  # of the noise of a run; less is lost in it
ENOUGH_QUIET = 3  # samples of a quiet device that make those of a busy one dispensable
REPORTED_WEIGHT = 0.25  # an error 2.7 times the ordinary, which one normal run in 150 has


def _summary(errors: Array) -> HeldOut:
    sizes = sorted(abs(math.expm1(error)) for error in errors.tolist())
    typical = math.expm1(sum(map(abs, errors.tolist())) / len(sizes))
    return HeldOut(num_runs=len(sizes), median=median(sizes), worst=sizes[-1], typical=typical)


def _by_regime(model: TimeModel, samples: Sequence[Sample], errors: Array) -> dict[str, HeldOut]:
    """Log errors of the judged of `samples`, by what decides their times."""
    regimes = np.array([regime_of(model, samples[i].features) for i in judged(samples)])
    return {name: _summary(errors[regimes == name]) for name in REGIMES if name in regimes}


def _is_worse(errors: Array, alone: Array, noise: float) -> bool:
    """Whether a fit errs more on runs it did not see than datasheet and priors alone.

    By more than chance: the mean difference of the logs' sizes, run by run, is above its standard
    error, and above what matters beside the noise of a run.

    Args:
        errors, alone: log errors of the same runs by the fit and without one.
        noise: standard deviation of the log of a run, before any.
    """
    differences = np.abs(errors) - np.abs(alone)
    chance = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) > max(chance, WORTH_SAYING * noise)


def _outliers(
    samples: Sequence[Sample], phase: str, errors: Array, prior_noise: float
) -> Iterator[Outlier]:
    """The samples that the fit with these log errors down-weighted, farthest first."""
    weights = robust_weights(errors, prior_noise)
    for i in np.argsort(weights, kind="stable"):
        if weights[i] >= REPORTED_WEIGHT:
            return
        yield Outlier(
            record=samples[i].record,
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


def _implausible(samples: Mapping[str, Sequence[Sample]], start: Calibration) -> str:
    """Why no device can have measured `samples`; empty where one can.

    A slipped unit or a forged record is off by orders of magnitude, and one is enough to make the
    whole fit singular. The slowest devices are 20 times slower than their priors.
    """
    for phase, of_phase in samples.items():
        for sample in of_phase:
            if phase == "memory":
                expected, accepted = sum(sample.features.values()), PLAUSIBLE_MEMORY
            else:
                expected, accepted = seconds(start.time[phase], sample.features)[0], PLAUSIBLE_TIME
            ratio = sample.value / expected if expected > 0 else math.inf
            if not accepted[0] <= ratio <= accepted[1]:
                return (
                    f"{phase}: {sample.value:.3g} {'bytes' if phase == 'memory' else 's'} is "
                    f"{ratio:.2g} times what the datasheet says; accepted are {accepted[0]:g} to "
                    f"{accepted[1]:g} times; remove the record"
                )
    return ""


class _Record:
    """A measurement on a GPU, equal to itself alone: a search fits the same ones after each run."""

    def __init__(self, measurement: Measurement, gpu: GpuSpec) -> None:
        self.measurement, self.gpu = measurement, gpu

    def __hash__(self) -> int:
        return hash((id(self.measurement), id(self.gpu)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Record)
            and self.measurement is other.measurement
            and self.gpu is other.gpu
        )


@lru_cache(maxsize=4096)
def _observed(record: _Record, model: ModelSpec) -> tuple[RunConfig, dict[str, list[Sample]]]:
    """The run of `record` with its defaults, and its samples by "memory" and time phase."""
    measurement = record.measurement
    job = resolve(model, measurement.run, record.gpu)
    samples = time_samples(job, measurement)
    # of ranks on a CPU, buckets are not counted: C++ alone holds them
    counts_all = job.layout is None or not record.gpu.is_cpu
    if not job.run.libraries and counts_all:
        samples["memory"] = memory_samples(job, measurement)
    return job.run, samples


def _gather(
    measurements: Iterable[Measurement],
    gpu: GpuSpec,
    find_model: FindModel,
    start: Calibration,
    elsewhere: Collection[str],
) -> tuple[dict[str, list[Sample]], dict[str, int], dict[str, str]]:
    """Samples by "memory" and time phase, parameters by model, why a record has no sample."""
    by_phase: dict[str, list[Sample]] = {phase: [] for phase in ("memory", *TIME_PHASES)}
    disturbed: dict[str, list[Sample]] = {phase: [] for phase in TIME_PHASES}
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
            run, samples = _observed(_Record(measurement, gpu), model)
        except WhichLoraError as error:  # of a newer release, or a model whose config is not here
            left_out[measurement.id] = str(error)
            continue
        if run.model not in num_params:
            num_params[run.model] = model.num_params
        if fault := _implausible(samples, start):
            left_out[measurement.id] = fault
            continue
        if is_of_log(measurement.id):
            left_out[measurement.id] = (
                f"a log of {measurement.run.serving}, which is compared with its prediction and "
                "not fitted"
            )
            continue
        if run.engine != start.engine:
            left_out[measurement.id] = (
                f"runs on {run.engine}, and this calibration is of {start.engine}"
            )
            continue
        if measurement.id in elsewhere:
            times = {
                phase: [as_elsewhere(sample, measurement) for sample in samples[phase]]
                for phase in samples.keys() & TIME_PHASES
            }
            samples = {**samples, **times}
        is_disturbed = bool(measurement.provenance.get("busy"))
        for phase, of_phase in samples.items():
            target = disturbed if is_disturbed and phase in disturbed else by_phase
            target[phase].extend(of_phase)
    for phase, of_phase in disturbed.items():
        if len(by_phase[phase]) < ENOUGH_QUIET:
            by_phase[phase].extend(of_phase)
        else:
            reason = f"{phase}: measured on a busy device, and quiet runs teach its times instead"
            left_out |= {sample.record: reason for sample in of_phase}
    return by_phase, num_params, left_out


def fit(
    measurements: Sequence[Measurement],
    gpu: GpuSpec,
    find_model: FindModel,
    *,
    held_out: bool = True,
    elsewhere: Collection[str] = (),
) -> Calibration:
    """Calibrate the predictors of `gpu` to `measurements`; failures teach nothing here yet.

    Runs on other library versions are left out of the memory fit. Its formulas depend on the
    versions, and the residuals differ between them.

    Args:
        find_model: architecture of a measurement; one that it can't name is left out. It is
            asked once per model.
        held_out: also measure the error on left-out runs, and take the noise from it. During a
            search the fit is repeated after every run and the residuals must do.
        elsewhere: ids of measurements that are of other machines with this device. They teach
            times as those on other library versions do.
    """
    start = prior_calibration(gpu)
    by_phase, num_params, left_out = _gather(measurements, gpu, find_model, start, elsewhere)
    summaries: dict[str, HeldOut] = {}
    by_regime: dict[str, dict[str, HeldOut]] = {}
    cold: dict[str, HeldOut] = {}
    outliers: list[Outlier] = []
    time: dict[str, TimeModel] = {}
    by_datasheet: list[str] = []
    for phase, model in fit_phases(by_phase, gpu).items():
        before, samples = start.time[phase], by_phase[phase]
        alone = time_errors(before, [samples[i] for i in judged(samples)])
        if samples:
            cold[phase] = _summary(alone)
            outliers += _outliers(samples, phase, time_errors(model, samples), before.noise)
        if held_out and len(alone) >= 3:
            model, errors = sharpened(model, by_phase, gpu, phase)
            summaries[phase] = _summary(errors)
            by_regime[phase] = _by_regime(model, samples, errors)
            if _is_worse(errors, alone, before.noise):
                by_datasheet.append(phase)
                model = replace(before, noise=held_out_noise(alone, before.noise))
        time[phase] = model
    samples = by_phase["memory"]
    memory = fit_memory(samples, start.memory)
    alone = memory_errors(start.memory, samples)
    if samples:
        cold["memory"] = _summary(alone)
        errors = memory_errors(memory, samples)
        outliers += _outliers(samples, "memory", errors, start.memory.noise)
    if held_out and len(samples) >= 3:
        errors = held_out_errors(samples, start.memory)
        summaries["memory"] = _summary(errors)
        memory = replace(memory, noise=held_out_noise(errors, start.memory.noise))
        if _is_worse(errors, alone, start.memory.noise):
            by_datasheet.append("memory")
            memory = replace(start.memory, noise=held_out_noise(alone, start.memory.noise))
    return Calibration(
        gpu=gpu.key,
        memory=memory,
        time=time,
        num_records=sum(not is_of_log(measurement.id) for measurement in measurements),
        held_out=summaries,
        held_out_by_regime=by_regime,
        cold=cold,
        ranges={
            phase: _ranges(samples, num_params) for phase, samples in by_phase.items() if samples
        },
        outliers=tuple(outliers),
        left_out=left_out,
        digest=digest(measurements),
        formulas=formulas_digest(),
        num_older=sum(bool(record.config.get("libraries")) for record in measurements),
        by_datasheet=tuple(by_datasheet),
        stacks=tuple(
            sorted({s.stack for of_phase in by_phase.values() for s in of_phase if s.stack})
        ),
    )
