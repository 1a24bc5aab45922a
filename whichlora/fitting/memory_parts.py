"""Factors on the parts of the ledger, from samples of measured peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.calibration import MemoryModel, part_spread
from whichlora.memory.ledger import PARTS
from whichlora.regression import MAX_ROUNDS, covariance_of, pooled_noise, robust_weights, solve
from whichlora.samples import Table, held_out_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def memory_errors(model: MemoryModel, table: Table) -> Array:
    """Log of measured over predicted bytes."""
    import numpy as np

    predicted = np.zeros(len(table.values))
    for part in PARTS:
        predicted = predicted + table.columns[part] * model.mean[part]
    return np.asarray(np.log(table.values / np.maximum(predicted, 1.0)))


def fit_memory(table: Table, start: MemoryModel) -> MemoryModel:
    """Factors on the parts of the ledger, close to one by prior."""
    import numpy as np

    if not table.samples:
        return start
    spread_of = part_spread()
    mean = np.ones(len(PARTS))
    spread = np.array([spread_of[part] for part in PARTS])
    values = table.values
    rows = np.column_stack([table.columns[part] for part in PARTS])
    noise, coefficients = start.noise, mean
    errors = memory_errors(start, table)
    weights = robust_weights(errors - np.median(errors), noise)
    for _ in range(MAX_ROUNDS):
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


def held_out_errors(table: Table, start: MemoryModel) -> Array:
    """Log errors of samples left out of the fit that predicts them."""

    def errors_of(kept: Table, held: Table) -> Array:
        return memory_errors(fit_memory(kept, start), held)

    return held_out_rows(table, errors_of)
