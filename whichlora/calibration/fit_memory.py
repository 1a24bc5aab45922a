"""Factors on the parts of the ledger, from samples of measured peaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.model_selection import cross_val_predict

from whichlora.calibration.regression import Array, MemoryRegressor, grouped_folds
from whichlora.calibration.samples import Sample, groups_of, matrix
from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import MemoryModel


def memory_errors(model: MemoryModel, samples: Sequence[Sample]) -> Array:
    """Log of measured over predicted bytes."""
    parts, measured = matrix(samples, PARTS)
    predicted = parts @ [model.mean[part] for part in PARTS]
    return np.asarray(np.log(measured / np.maximum(predicted, 1.0)))


def _regressor(start: MemoryModel) -> MemoryRegressor:
    spread = np.sqrt(np.diag(start.covariance))
    return MemoryRegressor(spread=spread.tolist(), noise=start.noise)


def fit_memory(samples: Sequence[Sample], start: MemoryModel) -> MemoryModel:
    """Factors on the parts of the ledger, close to one by prior."""
    if not samples:
        return start
    regressor = _regressor(start).fit(*matrix(samples, PARTS))
    return MemoryModel(
        mean=dict(zip(PARTS, regressor.coef_.tolist(), strict=True)),
        covariance=tuple(map(tuple, regressor.covariance_.tolist())),
        noise=regressor.noise_,
        num_runs=len(samples),
    )


def held_out_errors(samples: Sequence[Sample], start: MemoryModel) -> Array:
    """Log errors of samples left out of the fit that predicts them."""
    parts, measured = matrix(samples, PARTS)
    groups = groups_of(samples)
    predicted = cross_val_predict(
        _regressor(start), parts, measured, groups=groups, cv=grouped_folds(groups)
    )
    return np.asarray(np.log(measured / np.maximum(predicted, 1.0)))
