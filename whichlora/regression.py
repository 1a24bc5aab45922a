"""Regularised, non-negative, robust regression in relative error.

    minimise  sum_i w_i ((y_i - x_i·c) / (sigma y_i))^2 + sum_j ((c_j - m_j) / s_j)^2   with c >= 0

The prior (m, s) makes two runs help and none enough. The weights w are one for a run that agrees
with the others, and less the farther it lies off, so that a few wrong records bend nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from whichlora.numeric import TWO_SIDED_Z

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PRIOR_WEIGHT = 4.0  # runs that the prior's noise counts for when residuals are few
# Huber 1964: 95 % as efficient as least squares where all errors are normal.
HUBER = 1.345
MAX_ROUNDS = 12  # of coefficients and weights, which settle in three or four
_MIN_NOISE = 0.02
_MAD_TO_DEVIATION = 1.4826  # median absolute to standard deviation of a normal distribution


def solve(
    rows: Array, values: Array, mean: Array, spread: Array, noise: float, weights: Array | None
) -> Array:
    """Non-negative coefficients of the criterion above, by stacking the prior as rows.

    Args:
        rows: features, shape [num_runs, num_features].
        values: measured, shape [num_runs].
        mean, spread: prior of each coefficient, shape [num_features].
        weights: of the squared errors, shape [num_runs]; None is one each.
    """
    import numpy as np
    from scipy.optimize import nnls

    scale = _root(weights, values) / (noise * values)
    # columns differ by ten orders of magnitude (launches against seconds): scale by the prior
    stacked = np.vstack([rows * scale[:, None] * spread, np.eye(len(spread))])
    wanted = np.concatenate([values * scale, mean / spread])
    # an orthogonal transform keeps the criterion, and leaves as many rows as there are columns
    small = np.asarray(np.linalg.qr(np.column_stack([stacked, wanted]), mode="r"))
    coefficients, _ = nnls(small[:, :-1], small[:, -1])
    return np.asarray(coefficients * spread)


def covariance_of(
    rows: Array, values: Array, spread: Array, noise: float, weights: Array | None
) -> Array:
    """Posterior covariance of the coefficients, shape [num_features, num_features]."""
    import numpy as np

    scaled = rows * spread * (_root(weights, values) / (noise * values))[:, None]
    inner = np.linalg.inv(scaled.T @ scaled + np.eye(len(spread)))
    return np.asarray(inner * np.outer(spread, spread))


def _root(weights: Array | None, values: Array) -> Array:
    import numpy as np

    return np.ones_like(values) if weights is None else np.sqrt(weights)


def robust_weights(errors: Array, prior_noise: float) -> Array:
    """Weight of each squared error: one up to `HUBER` deviations, then falling with its square.

    Huber's own weight falls with the error itself. But the criterion divides by the measured
    value, so a value that is ten times too small pulls ten times harder; the square takes that
    back.

    A deviation is the median error, which no minority of wrong records moves, the prior's noise
    counting as `PRIOR_WEIGHT` runs: of two runs that disagree neither is the outlier.

    Args:
        errors: log of measured over predicted. Ten times too slow is as far off as ten times too
            fast, though the criterion sees 0.9 of one and 9 of the other.
    """
    import numpy as np

    sizes = np.expm1(np.minimum(np.abs(errors), 50.0))
    mad = _MAD_TO_DEVIATION * float(np.median(sizes))
    pooled = PRIOR_WEIGHT * prior_noise**2 + len(sizes) * mad**2
    deviation = max(_MIN_NOISE, math.sqrt(pooled / (PRIOR_WEIGHT + len(sizes))))
    return np.asarray(np.minimum(1.0, HUBER * deviation / np.maximum(sizes, 1e-12)) ** 2)


def pooled_noise(residuals: Array, prior_noise: float, weights: Array) -> float:
    """Standard deviation of log errors, the prior counting as `PRIOR_WEIGHT` runs."""
    total = PRIOR_WEIGHT * prior_noise**2 + float(weights @ residuals**2)
    return max(_MIN_NOISE, math.sqrt(total / (PRIOR_WEIGHT + len(residuals))))


def held_out_noise(errors: Array, prior_noise: float) -> float:
    return pooled_noise(errors, prior_noise, robust_weights(errors, prior_noise))


def conformal_scale(errors: Array, deviations: Array, confidence: float) -> float | None:
    """What stated deviations are to be multiplied with for intervals to hold `confidence`.

    The quantile of the held-out errors' sizes in stated deviations, one rank up because the next
    run is one more, over the quantile that a normal distribution has. None where there are too few
    errors for that rank.

    Source: Lei et al. 2018, arXiv:1604.04173, section 5.2 (locally weighted split conformal).

    Args:
        errors: log of measured over predicted, of runs that the fit did not see.
        deviations: stated for each, as a log.
    """
    import numpy as np

    rank = math.ceil((len(errors) + 1) * confidence)
    if rank > len(errors):
        return None
    return float(np.sort(np.abs(errors) / deviations)[rank - 1]) / TWO_SIDED_Z[confidence]
