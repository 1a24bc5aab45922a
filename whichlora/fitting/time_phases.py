"""Coefficients of one time phase, from its samples and the device's prior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self, TypeAlias

from whichlora import timing
from whichlora.calibration import TIME_PHASES
from whichlora.prediction import TIME_CONFIDENCE
from whichlora.regression import (
    Evidence,
    conformal_scale,
    fit_effects,
    held_out_noise,
    student_scale,
)
from whichlora.samples import Sample, Table, held_out_rows
from whichlora.specs import GpuSpec
from whichlora.timing import FEATURES, TimeModel, prior, prior_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Relative standard deviation of a coefficient between library versions. Kind: fitted, to the
# published rows of A100: sources of 2023 and 2024 predicting each other (`docs/time.md`).
STACK_SPREAD = 0.15
ENOUGH_HELD_OUT = 20  # errors whose quantile stands for that of the device

# What of a device is faster or slower at once: its arithmetic units with their clock (a limit of
# power, a slice of them), its memory, and the host that launches and prepares.
RESOURCES = {
    "compute": ("products", "attention"),
    "memory": ("weights", "cache", "elementwise", "dequant", "optimizer"),
    "host": ("launch", "constant", "engine"),
}
MOST_LOG = 30.0  # of a factor while its fit is on the way; e^30 is beyond any device
_GRID = (-2.0, -1.0, 1.0, 2.0, 3.0, 4.0)  # logs of a factor tried as starts

Spread: TypeAlias = Mapping[str, float]  # relative standard deviation by feature


def fit_time(
    samples: Sequence[Sample], gpu: GpuSpec, phase: str, *, held_out: bool = False
) -> TimeModel:
    """Coefficients of one phase from its runs alone, the prior's where there is no sample.

    Args:
        held_out: take noise and interval scale from left-out runs, where there are enough.
    """
    tables = {phase: Table.of(samples, FEATURES)}
    model = fit_phases(tables, gpu)[phase]
    return sharpened(model, tables, gpu, phase)[0] if held_out else model


def fit_phases(tables: Mapping[str, Table], gpu: GpuSpec) -> dict[str, TimeModel]:
    """Coefficients of all phases, from the runs of all phases.

    Runs on other library versions teach only what this device's prior is: kernels and launch code
    change between versions, a device does not. However many they are, few runs on the current
    versions correct them.
    """
    import numpy as np

    models = {phase: prior_model(gpu, phase) for phase in TIME_PHASES}
    spreads = {phase: relative_spread(gpu, phase) for phase in models}
    older = {phase: table.older() for phase, table in tables.items()}
    if any(flags.any() for flags in older.values()):
        chosen = {phase: np.flatnonzero(flags) for phase, flags in older.items()}
        taught = regress(_taken(tables, chosen), models, spreads)
        carried = {phase: _carried(taught[phase], spreads[phase]) for phase in models}
        models = {phase: model for phase, (model, _) in carried.items()}
        spreads = {phase: spread for phase, (_, spread) in carried.items()}
    current = _taken(tables, {phase: np.flatnonzero(~flags) for phase, flags in older.items()})
    return regress(current, models, spreads)


def _taken(tables: Mapping[str, Table], chosen: Mapping[str, NDArray[np.intp]]) -> dict[str, Table]:
    return {phase: table.take(chosen[phase]) for phase, table in tables.items()}


def relative_spread(gpu: GpuSpec, phase: str) -> Spread:
    """Relative standard deviation of each coefficient before any run on `gpu`."""
    mean, spread = prior(gpu, phase)
    return {name: spread[name] / mean[name] for name in FEATURES}


def _carried(taught: TimeModel, widest: Spread) -> tuple[TimeModel, Spread]:
    """What runs on other versions say about the current ones, and the spread of that."""
    spread = {
        name: min(
            widest[name],
            math.hypot(math.sqrt(taught.covariance[i][i]) / taught.mean[name], STACK_SPREAD),
        )
        for i, name in enumerate(FEATURES)
    }
    covariance = tuple(
        tuple((spread[a] * taught.mean[a]) ** 2 if a == b else 0.0 for b in FEATURES)
        for a in FEATURES
    )
    return replace(taught, covariance=covariance), spread


def regress(
    tables: Mapping[str, Table], starts: Mapping[str, TimeModel], spreads: Mapping[str, Spread]
) -> dict[str, TimeModel]:
    """`starts`, priors of relative deviations `spreads`, updated by the runs of `tables`.

    Which of host and device decides a run, and which runs are outliers, depends on the
    coefficients: both are found by iteration.
    """
    import numpy as np

    seen = [phase for phase in starts if phase in tables and tables[phase].samples]
    if not seen:
        return dict(starts)
    factors = _Factors.of(spreads)
    ends = np.cumsum([0, *(len(tables[phase].values) for phase in seen)])
    groups = [np.arange(*pair) for pair in pairwise(ends.tolist())]

    def explain(logs: Array) -> tuple[Array, Array]:
        pieces = [
            _explained(starts[phase], tables[phase], factors.of_phase(phase), logs)
            for phase in seen
        ]
        return np.concatenate([one for one, _ in pieces]), np.vstack([one for _, one in pieces])

    noise = starts[seen[0]].noise
    evidence = Evidence(explain, groups, factors.spread, noise)
    effects = fit_effects(evidence, factors.starts())
    noises = dict(zip(seen, effects.noise, strict=True))
    updated = {}
    for phase, start in starts.items():
        share = factors.of_phase(phase)
        scale = np.exp(share @ effects.logs)
        mean = scale * np.array([start.mean[name] for name in FEATURES])
        covariance = share @ effects.covariance @ share.T * np.outer(mean, mean)
        updated[phase] = replace(
            start,
            mean=dict(zip(FEATURES, mean.tolist(), strict=True)),
            covariance=tuple(map(tuple, covariance.tolist())),
        )
        if phase in seen:
            number = len(tables[phase].values)
            updated[phase] = replace(
                updated[phase],
                noise=noises[phase],
                num_runs=start.num_runs + number,
                interval_scale=student_scale(number, TIME_CONFIDENCE),
            )
    return updated


def _explained(start: TimeModel, table: Table, share: Array, logs: Array) -> tuple[Array, Array]:
    """Log errors of the runs of one phase, and what a unit of each factor's log takes off them."""
    import numpy as np

    scale = np.exp(np.clip(share @ logs, -MOST_LOG, MOST_LOG))
    mean = {name: start.mean[name] * scale[i] for i, name in enumerate(FEATURES)}
    seconds, parts = timing.seconds(replace(start, mean=mean), table.columns)
    seconds = np.maximum(seconds, 1e-12)
    shares = np.column_stack([parts[name] / seconds for name in FEATURES])
    return np.log(table.values / seconds), shares @ share


@dataclass(frozen=True, slots=True)
class _Factors:
    """The independent factors that a device's coefficients are products of.

    In this order: of the whole device, of each resource, of each phase, of each kind of work, and
    of each kind of work in each phase.

    Args:
        spread: standard deviation of each factor's log.
        phases: in their order.
    """

    spread: Array
    phases: tuple[str, ...]

    @classmethod
    def of(cls, spreads: Mapping[str, Spread]) -> Self:
        """Factors whose products deviate by `spreads`.

        Nothing says which of them is why a coefficient differs from its prior. What has fewer
        causes is likelier: the device has half of the variance, then resource, kind of work and
        phase half of what is left each; one that several coefficients share, of the least among
        them.
        """
        import numpy as np

        variances = np.array(
            [[math.log1p(spread[name] ** 2) for name in FEATURES] for spread in spreads.values()]
        )
        device = variances.min() / 2
        resources = [variances[:, _positions(names)].min() / 4 for names in RESOURCES.values()]
        kinds = variances.min(axis=0) / 8
        phases = variances.min(axis=1) / 16
        rest = variances - device - kinds - phases[:, None]
        for names, variance in zip(RESOURCES.values(), resources, strict=True):
            rest[:, _positions(names)] -= variance
        spread = np.sqrt(np.concatenate([[device], resources, phases, kinds, rest.ravel()]))
        return cls(spread, tuple(spreads))

    @property
    def num_shared(self) -> int:
        """Factors of several coefficients: of device, resources and phases."""
        return 1 + len(RESOURCES) + len(self.phases)

    def of_phase(self, phase: str) -> Array:
        """Which factors every coefficient of `phase` has, shape [num_features, num_factors]."""
        import numpy as np

        count, number = len(FEATURES), self.phases.index(phase)
        share = np.zeros((count, len(self.spread)))
        share[:, 0] = 1.0
        for i, names in enumerate(RESOURCES.values(), start=1):
            share[_positions(names), i] = 1.0
        share[:, 1 + len(RESOURCES) + number] = 1.0
        for start in (self.num_shared, self.num_shared + count * (1 + number)):
            share[:, start : start + count] = np.eye(count)
        return share

    def starts(self) -> Iterator[Array]:
        """The prior, and each factor of several coefficients alone at every value of the grid."""
        import numpy as np

        yield np.zeros(len(self.spread))
        for i in range(self.num_shared):
            for log in _GRID:
                start = np.zeros(len(self.spread))
                start[i] = log
                yield start


def _positions(names: Sequence[str]) -> list[int]:
    return [FEATURES.index(name) for name in names]


def _held_out_time(tables: Mapping[str, Table], gpu: GpuSpec, phase: str) -> tuple[Array, Array]:
    """Log errors of samples left out, and the variance that their fit's coefficients have."""
    import numpy as np

    def judge(kept: Table, held: Table) -> Array:
        records = {sample.record for sample in held.samples}
        others = {
            name: table.take(
                np.array(
                    [i for i, one in enumerate(table.samples) if one.record not in records], np.intp
                )
            )
            for name, table in tables.items()
            if name != phase
        }
        model = fit_phases({**others, phase: kept}, gpu)[phase]
        return np.column_stack([time_errors(model, held), _time_variances(model, held)])

    errors, variances = held_out_rows(tables[phase], judge).T
    return errors, variances


def sharpened(
    model: TimeModel, tables: Mapping[str, Table], gpu: GpuSpec, phase: str
) -> tuple[TimeModel, Array]:
    """`model` with noise and interval scale from left-out runs, and the log errors of these."""
    import numpy as np

    errors, variances = _held_out_time(tables, gpu, phase)
    # where all are of other versions, `STACK_SPREAD` has what a left-out run would add
    if not tables[phase].older().all():
        model = replace(model, noise=held_out_noise(errors, prior_model(gpu, phase).noise))
    if len(errors) >= ENOUGH_HELD_OUT:
        stated = np.sqrt(variances + model.noise**2)
        scale = conformal_scale(errors, stated, TIME_CONFIDENCE)
        assert scale is not None, "enough errors for the rank"
        model = replace(model, interval_scale=scale)
    return model, errors


def _active(model: TimeModel, columns: Mapping[str, Array]) -> Array:
    """The samples' features, those zeroed that do not decide their time."""
    import numpy as np

    counted = timing.deciding(model, columns)
    return np.column_stack([counted[name] for name in FEATURES])


def time_errors(model: TimeModel, table: Table) -> Array:
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
