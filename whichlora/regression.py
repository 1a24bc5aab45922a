"""Robust regression in relative error, around priors.

Two forms. `solve` is linear and keeps close to a prior known to be right (parts of the ledger):

    minimise  sum_i w_i ((y_i - x_i·c) / (sigma y_i))^2 + sum_j ((c_j - m_j) / s_j)^2   with c >= 0

`fit_effects` is for factors that may be anything, if unlikely (speeds of a device). In both the
prior makes two runs help and none enough. The weights w are one for a run that agrees with the
others, and less the farther it lies off, so that a few wrong records bend nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
MAX_STEPS = 40  # of a descent, which settles in five to ten
MOST_DESCENTS = 3  # from the starts that promise most
LONGEST_STEP = 1.0  # of the log of a factor in one step
SETTLED = 1e-4  # a step that moves no prediction
# Degrees of freedom of what a prior's deviation was estimated from: the coefficients of three GPUs
# (`timing.py`), which leave two. A normal distribution whose deviation is known no better than that
# is a Student's t with as many (Gosset 1908).
SPREAD_FREEDOM = 2
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


@dataclass(frozen=True, slots=True)
class Effects:
    """Logs of the factors that explain runs best.

    Args:
        logs: shape [num_effects]; zero is what the prior expects.
        covariance: of `logs`, shape [num_effects, num_effects].
        noise: standard deviation of the log of a run around them, by group.
    """

    logs: Array
    covariance: Array
    noise: Sequence[float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Runs that independent factors are to explain.

    Args:
        explain: of logs of the factors, the log errors of all runs, shape [num_runs], and what a
            unit of each takes off them, shape [num_runs, num_effects].
        groups: positions of the runs that scatter alike; every run is in one.
        spread: standard deviation of each log before any run.
        noise: of the log of a run before any run.
    """

    explain: Callable[[Array], tuple[Array, Array]]
    groups: Sequence[NDArray[np.intp]]
    spread: Array
    noise: float

    def criterion(self, errors: Array, logs: Array) -> float:
        """What `fit_effects` minimises: runs as `robust_weights` sees them, and the prior."""
        import numpy as np

        freedom = SPREAD_FREEDOM + 1
        total = float(np.log1p((logs / self.spread) ** 2 / freedom).sum()) * freedom / 2
        for group in self.groups:
            sizes = _sizes(errors[group])
            deviation = _deviation(sizes, self.noise)
            most = HUBER * deviation
            beyond = most**2 * np.log(np.maximum(sizes / most, 1.0))
            rho = float((np.minimum(sizes, most) ** 2 / 2 + beyond).sum())
            total += (len(group) + PRIOR_WEIGHT) * math.log(deviation)
            total += (rho + PRIOR_WEIGHT * self.noise**2 / 2) / deviation**2
        return total

    def weighed(self, errors: Array) -> tuple[Array, list[float]]:
        """Weight of every run over its variance, and the noise of each group."""
        import numpy as np

        precision, noise = np.ones(len(errors)), []
        for group in self.groups:
            weights = robust_weights(errors[group], self.noise)
            noise.append(pooled_noise(errors[group], self.noise, weights))
            precision[group] = weights / noise[-1] ** 2
        return precision, noise

    def pull(self, logs: Array) -> Array:
        """Precision of the normal distribution that pulls as the Student's t does at `logs`."""
        import numpy as np

        return np.asarray(1.0 / (self.spread**2 + logs**2 / (SPREAD_FREEDOM + 1)))


def fit_effects(evidence: Evidence, starts: Iterable[Array]) -> Effects:
    """The likeliest logs of independent factors.

        minimise  sum_i rho(e_i(u)) / deviation^2
                  + sum_j (F + 1) / 2 * log(1 + u_j^2 / ((F + 1) s_j^2))

    The second term is a Student's t with F = `SPREAD_FREEDOM` degrees of freedom and, at zero, the
    curvature of a normal distribution of deviation s_j. Its pull fades with the distance: runs that
    agree move a factor as far as they need, however unlikely that was. Such a sum has several
    minima; the least one that is reached from `starts` is the answer.
    """
    import numpy as np

    promising = sorted(
        starts, key=lambda start: evidence.criterion(evidence.explain(start)[0], start)
    )
    descents = (_descended(evidence, start) for start in promising[:MOST_DESCENTS])
    _, logs = min(descents, key=lambda pair: pair[0])
    errors, slopes = evidence.explain(logs)
    precision, noise = evidence.weighed(errors)
    inverse = (slopes * precision[:, None]).T @ slopes + np.diag(evidence.pull(logs))
    return Effects(logs, np.asarray(np.linalg.inv(inverse)), noise)


def _descended(evidence: Evidence, start: Array) -> tuple[float, Array]:
    """The least criterion on the way down from `start` by reweighted least squares, and where."""
    import numpy as np

    logs = best = start
    least = math.inf
    for _ in range(MAX_STEPS):
        errors, slopes = evidence.explain(logs)
        criterion = evidence.criterion(errors, logs)
        if criterion < least:
            least, best = criterion, logs
        weighted = slopes * evidence.weighed(errors)[0][:, None]
        pull = evidence.pull(logs)
        step = np.linalg.solve(
            weighted.T @ slopes + np.diag(pull), weighted.T @ errors - pull * logs
        )
        logs = logs + np.clip(step, -LONGEST_STEP, LONGEST_STEP)
        if np.abs(step).max() < SETTLED:
            break
    return least, best


def _sizes(errors: Array) -> Array:
    """Relative errors, ten times too slow being as far off as ten times too fast."""
    import numpy as np

    return np.asarray(np.expm1(np.minimum(np.abs(errors), 50.0)))


def _deviation(sizes: Array, prior_noise: float) -> float:
    """The ordinary relative error, the prior's noise counting as `PRIOR_WEIGHT` runs."""
    import numpy as np

    mad = _MAD_TO_DEVIATION * float(np.median(sizes))
    pooled = PRIOR_WEIGHT * prior_noise**2 + len(sizes) * mad**2
    return max(_MIN_NOISE, math.sqrt(pooled / (PRIOR_WEIGHT + len(sizes))))


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

    sizes = _sizes(errors)
    deviation = _deviation(sizes, prior_noise)
    return np.asarray(np.minimum(1.0, HUBER * deviation / np.maximum(sizes, 1e-12)) ** 2)


def pooled_noise(residuals: Array, prior_noise: float, weights: Array) -> float:
    """Standard deviation of log errors, the prior counting as `PRIOR_WEIGHT` runs."""
    total = PRIOR_WEIGHT * prior_noise**2 + float(weights @ residuals**2)
    return max(_MIN_NOISE, math.sqrt(total / (PRIOR_WEIGHT + len(residuals))))


def held_out_noise(errors: Array, prior_noise: float) -> float:
    return pooled_noise(errors, prior_noise, robust_weights(errors, prior_noise))


def student_scale(num_runs: int, confidence: float) -> float:
    """What a normal interval is to be multiplied with where few runs told the noise.

    A deviation that is known from few runs, the prior counting as `PRIOR_WEIGHT`, makes what is
    normal around it a Student's t of as many degrees of freedom (Gosset 1908).
    """
    from scipy.special import stdtrit

    quantile = float(stdtrit(PRIOR_WEIGHT + num_runs, (1 + confidence) / 2))
    return quantile / TWO_SIDED_Z[confidence]


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
