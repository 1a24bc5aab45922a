"""Coefficients of the time phases, from their samples and the device's priors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from whichlora.calibration.intervals import ENOUGH_HELD_OUT, scales_of_groups, scales_of_runs
from whichlora.calibration.regression import (
    Array,
    TimeRegressor,
    grouped_folds,
    held_out_noise,
    student_scale,
)
from whichlora.calibration.samples import Sample, groups_of, judged, matrix
from whichlora.predict.coefficients import TIME_PHASES
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.spec.gpu import GpuSpec
from whichlora.timing import model as timing
from whichlora.timing.model import (
    FEATURES,
    HOST_FEATURES,
    STACK_FEATURES,
    TimeModel,
    prior,
    prior_model,
)

# Relative standard deviation of a coefficient between library versions, but of `STACK_FEATURES`,
# which differ as far as their prior says. Kind: fitted, to the published rows of A100: sources of
# 2023 and 2024 predicting each other (`docs/time.md`).
STACK_SPREAD = 0.15

# Of an independent run, what one under other software counts for. Runs of one stack err alike, and
# the phase with most of them would decide for the others. Kind: fitted, to training on A100 and T4
# under software left out: 5.9 and 12.8 % in the mean, 7.9 and 13.3 % where each counts whole.
OLDER_WEIGHT = 0.25

# What of a device is faster or slower at once: its arithmetic units with their clock (a limit of
# power, a slice of them), its memory, and the host that launches and prepares.
RESOURCES = {
    "compute": ("products", "attention"),
    "memory": ("weights", "cache", "elementwise", "dequant", "optimizer"),
    "host": HOST_FEATURES,
}

Spread: TypeAlias = Mapping[str, float]  # relative standard deviation by feature
Samples: TypeAlias = Mapping[str, Sequence[Sample]]  # by phase


def fit_phases(samples: Samples, gpu: GpuSpec) -> dict[str, TimeModel]:
    """Coefficients of all phases, from the runs of all phases.

    Runs on other library versions teach only what this device's prior is: kernels and launch code
    change between versions, a device does not.
    """
    return regress(samples, *_priors(gpu))


def _priors(gpu: GpuSpec) -> tuple[dict[str, TimeModel], dict[str, Spread]]:
    models = {phase: prior_model(gpu, phase) for phase in TIME_PHASES}
    return models, {phase: relative_spread(gpu, phase) for phase in models}


def relative_spread(gpu: GpuSpec, phase: str) -> Spread:
    """Relative standard deviation of each coefficient before any run on `gpu`."""
    mean, spread = prior(gpu, phase)
    return {name: spread[name] / mean[name] for name in FEATURES}


def regress(
    samples: Samples, starts: Mapping[str, TimeModel], spreads: Mapping[str, Spread]
) -> dict[str, TimeModel]:
    """`starts`, priors of relative deviations `spreads`, updated by the runs of `samples`."""
    rows = _Rows.of(samples, tuple(starts))
    if not len(rows.seconds):
        return dict(starts)
    regressor = _regressor(starts, spreads)
    regressor.fit(rows.features, rows.seconds, rows.weights, older=rows.older, stack=rows.stack)
    size = len(FEATURES)
    updated = {}
    for number, (phase, start) in enumerate(starts.items()):
        block = slice(number * size, (number + 1) * size)
        updated[phase] = replace(
            start,
            mean=dict(zip(FEATURES, regressor.coef_[block].tolist(), strict=True)),
            covariance=tuple(map(tuple, regressor.covariance_[block, block].tolist())),
        )
        if of_phase := samples.get(phase):
            scale = student_scale(regressor.freedom_[number], TIME_CONFIDENCE)
            updated[phase] = replace(
                updated[phase],
                noise=float(regressor.noise_[number]),
                num_runs=start.num_runs + len(of_phase),
                interval_scale=scale,
                regime_scales={name: each * scale for name, each in start.regime_scales.items()},
            )
    return updated


def _regressor(starts: Mapping[str, TimeModel], spreads: Mapping[str, Spread]) -> TimeRegressor:
    """The estimator for features in the columns of their phase, as `_Rows` has them."""
    first, *_ = starts.values()
    return TimeRegressor(
        prior=[start.mean[name] for start in starts.values() for name in FEATURES],
        spread=[spreads[phase][name] for phase in starts for name in FEATURES],
        noise=first.noise,
        num_phases=len(starts),
        resources=[_positions(names) for names in RESOURCES.values()],
        apart=_positions(RESOURCES["host"]) if first.overlaps else (),
        deciding=_Deciding(first),
        drift=STACK_SPREAD,
        of_stack=_positions(STACK_FEATURES),
    )


def _positions(names: Iterable[str]) -> list[int]:
    return [FEATURES.index(name) for name in names]


@dataclass(frozen=True, slots=True)
class _Deciding:
    """`timing.deciding` on the columns of one phase."""

    model: TimeModel

    def __call__(self, coefficients: Array, rows: Array) -> Array:
        mean = dict(zip(FEATURES, coefficients.T, strict=True))
        columns = dict(zip(FEATURES, rows.T, strict=True))
        counted = timing.deciding(replace(self.model, mean=mean), columns)
        return np.column_stack([counted[name] for name in FEATURES])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Samples of all phases as one regression has them.

    Args:
        features: shape [num_samples, num_phases * num_features], zero in other phases' columns.
        phase: position of each sample's phase.
        record: id of the measurement that each sample is from; `stack`: its software.
    """

    features: Array
    seconds: Array
    older: NDArray[np.bool_]
    phase: NDArray[np.intp]
    record: NDArray[np.str_]
    stack: NDArray[np.str_]

    @property
    def weights(self) -> Array:
        """How many independent runs each counts for."""
        return np.where(self.older, OLDER_WEIGHT, 1.0)

    @classmethod
    def of(cls, samples: Samples, phases: Sequence[str]) -> Self:
        by_phase = [samples.get(phase, ()) for phase in phases]
        flat = [sample for of_phase in by_phase for sample in of_phase]
        features, seconds = matrix(flat, FEATURES)
        phase = np.repeat(np.arange(len(phases)), [len(of_phase) for of_phase in by_phase])
        blocks = np.zeros((len(flat), len(phases), len(FEATURES)))
        blocks[np.arange(len(flat)), phase] = features
        return cls(
            blocks.reshape(len(flat), len(phases) * len(FEATURES)),
            seconds,
            np.array([sample.older for sample in flat], dtype=bool),
            phase,
            np.array([sample.record for sample in flat], dtype=str),
            np.array([sample.stack for sample in flat], dtype=str),
        )


def _held_out_time(samples: Samples, gpu: GpuSpec, phase: str) -> tuple[Array, Array]:
    """Log errors of samples left out, and the deviation that their fit's coefficients have.

    Whatever else a left-out run measured is left out with it.
    """
    starts, spreads = _priors(gpu)
    rows = _Rows.of(samples, tuple(starts))
    in_phase = rows.phase == tuple(starts).index(phase)
    chosen = judged(samples[phase])
    candidates = np.flatnonzero(in_phase)[chosen]
    groups = groups_of([samples[phase][i] for i in chosen])
    errors, deviations = np.empty(len(candidates)), np.empty(len(candidates))
    regressor = _regressor(starts, spreads)
    for _, test in grouped_folds(groups).split(candidates, groups=groups):
        held = candidates[test]
        learned = in_phase | ~np.isin(rows.record, rows.record[held])
        learned[held] = False
        fitted = clone(regressor).fit(
            rows.features[learned],
            rows.seconds[learned],
            rows.weights[learned],
            older=rows.older[learned],
            stack=rows.stack[learned],
        )
        errors[test] = np.log(rows.seconds[held] / fitted.predict(rows.features[held]))
        deviations[test] = fitted.log_deviations(rows.features[held])
    return errors, deviations


def sharpened(
    model: TimeModel, samples: Samples, gpu: GpuSpec, phase: str
) -> tuple[TimeModel, Array]:
    """`model` with noise and interval scales from left-out runs, and the log errors of these.

    Runs of other software err alike within their stack, and a new run is of a new stack.
    """
    errors, deviations = _held_out_time(samples, gpu, phase)
    are_older = all(sample.older for sample in samples[phase])
    if not are_older:
        model = replace(model, noise=held_out_noise(errors, prior_model(gpu, phase).noise))
    if len(errors) >= ENOUGH_HELD_OUT:
        scores = np.abs(errors) / np.hypot(deviations, model.noise)
        held_out = [samples[phase][i] for i in judged(samples[phase])]
        regimes = [timing.regime_of(model, sample.features) for sample in held_out]
        if are_older:
            stacks = [sample.stack for sample in held_out]
            scale, by_regime = scales_of_groups(scores, stacks, regimes, TIME_CONFIDENCE)
        else:
            scale, by_regime = scales_of_runs(scores, regimes, TIME_CONFIDENCE)
        model = replace(model, interval_scale=scale, regime_scales=by_regime)
    return model, errors


def time_errors(model: TimeModel, samples: Sequence[Sample]) -> Array:
    """Log of measured over predicted seconds."""
    rows, measured = matrix(samples, FEATURES)
    predicted, _ = timing.seconds(model, dict(zip(FEATURES, rows.T, strict=True)))
    return np.asarray(np.log(measured / np.maximum(predicted, 1e-12)))
