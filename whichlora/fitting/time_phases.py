"""Coefficients of one time phase, from its samples and the device's prior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from whichlora import timing
from whichlora.prediction import TIME_CONFIDENCE
from whichlora.regression import (
    MAX_ROUNDS,
    conformal_scale,
    covariance_of,
    held_out_noise,
    pooled_noise,
    robust_weights,
    solve,
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


def fit_time(
    samples: Sequence[Sample], gpu: GpuSpec, phase: str, *, held_out: bool = False
) -> TimeModel:
    """Coefficients of one phase, the prior's where there is no sample.

    Args:
        held_out: take noise and interval scale from left-out runs, where there are enough.
    """
    table = Table.of(samples, FEATURES)
    model = fit_phase(table, gpu, phase)
    return sharpened(model, table, gpu, phase)[0] if held_out else model


def fit_phase(table: Table, gpu: GpuSpec, phase: str) -> TimeModel:
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
    errors = time_errors(model, table)
    weights = robust_weights(errors - np.median(errors), start_noise)
    for _ in range(MAX_ROUNDS):
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
        model = fit_phase(kept, gpu, phase)
        return np.column_stack([time_errors(model, held), _time_variances(model, held)])

    errors, variances = held_out_rows(table, judge).T
    return errors, variances


def sharpened(model: TimeModel, table: Table, gpu: GpuSpec, phase: str) -> tuple[TimeModel, Array]:
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
