"""The joint posterior of one quantity, time or memory, over all candidates.

Two candidates that do the same work are wrong in the same way. The same coefficients predict them,
and their residuals are correlated where model, method or batch size agree. So the posterior is one
distribution over all candidates, not an interval for each: to measure one candidate informs about
the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from whichlora.predict.repeated_times import REPEATABILITY
from whichlora.search.feasibility import Quantity
from whichlora.spec.numeric import TWO_SIDED_Z, WIDEST

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

EXPECTED_RUNS = 2.0  # measured runs that the expected size of the residuals counts for
LARGEST_GAIN = 0.95  # a coefficient may turn out to be so much less than its mean


class Coefficients(NamedTuple):
    """Mean of the coefficients, and a square root of their covariance."""

    mean: Array
    root: Array


@dataclass(frozen=True, slots=True)
class Posterior:
    """One quantity of all candidates: log-normal, with errors of coefficients and residuals.

    Args:
        log_value: log of the median, shape [num_candidates].
        work: relative growth of the quantity per unit of each coefficient, shape
            [num_candidates, num_coefficients]. It is zero for a measured candidate, and smaller
            for candidates that are correlated with one.
        residual_covariance: of what the coefficients do not explain, shape
            [num_candidates, num_candidates].
        coefficients: mean of each.
        root: a square root of their covariance.
    """

    log_value: Array
    work: Array
    residual_covariance: Array
    coefficients: Array
    root: Array

    @property
    def loadings(self) -> Array:
        """Effect of each independent error of the coefficients, shape [num_candidates, n]."""
        return self.work @ self.root

    def quantity(self, position: int) -> Quantity:
        """Median and interval of one candidate."""
        shared_variance = (self.loadings[position] ** 2).sum()
        variance = float(shared_variance + self.residual_covariance[position, position])
        value = math.exp(self.log_value[position])
        confidence = 0.95
        reach = math.exp(min(WIDEST, TWO_SIDED_Z[confidence] * math.sqrt(max(0.0, variance))))
        return Quantity(
            value=value,
            low=value / reach,
            high=value * reach,
            measured=reach == 1.0,
            confidence=confidence,
        )

    def sample(self, num_samples: int, rng: np.random.Generator) -> Array:
        """Posterior samples, shape [num_samples, num_candidates]."""
        import numpy as np

        errors = rng.standard_normal((num_samples, self.root.shape[1])) @ self.root.T
        # more work never takes less: no coefficient is negative, however uncertain it is
        errors = np.maximum(errors, -LARGEST_GAIN * self.coefficients)
        residual_root = square_root(self.residual_covariance)
        residuals = rng.standard_normal((num_samples, len(self.log_value))) @ residual_root.T
        factor = np.maximum(1 - LARGEST_GAIN, 1 + errors @ self.work.T)
        return np.asarray(np.exp(self.log_value + residuals) * factor)


def condition(
    log_value: Array,
    work: Array,
    noise: Array,
    correlation: Array,
    coefficients: Coefficients,
    errors: Mapping[int, float],
    *,
    joint: bool,
) -> Posterior:
    """Condition the quantity on the measured errors of some candidates.

    A measurement has no spread: its residual is the one that was seen. It informs about
    coefficients and residuals together. A joint update narrows the coefficients only as far as the
    residuals allow. It also takes out of the residuals what the new coefficients explain already.

    Args:
        noise: standard deviation of each residual before any measurement.
        correlation: of the residuals, shape [num_candidates, num_candidates].
        coefficients: their mean after the measurements. Their spread is the one before the
            measurements if `joint`, else the one after.
        errors: log of measured over predicted, by position of each measured candidate.
    """
    import numpy as np

    covariance = correlation * np.outer(noise, noise)
    if not errors:
        return Posterior(log_value, work, covariance, *coefficients)
    measured = np.fromiter(errors, dtype=np.intp)
    measured_errors = np.array([errors[i] for i in measured.tolist()])
    # run-to-run noise, which also keeps the matrix regular
    repeats = REPEATABILITY**2 * np.eye(len(measured))
    inner = covariance[np.ix_(measured, measured)] + repeats
    # the measured errors may be smaller or larger than the noise that was expected
    size = float(measured_errors @ np.linalg.solve(inner, measured_errors))
    covariance = covariance * (EXPECTED_RUNS + size) / (EXPECTED_RUNS + len(measured))
    inner = covariance[np.ix_(measured, measured)] + repeats
    gain = np.linalg.solve(inner, covariance[measured]).T  # [num_candidates, num_measured]
    log_median = log_value + gain @ measured_errors
    log_median[measured] = log_value[measured] + measured_errors
    residual_covariance = covariance - gain @ covariance[measured]
    residual_covariance[measured] = residual_covariance[:, measured] = 0.0
    if not joint:
        work = work.copy()
        work[measured] = 0.0
        return Posterior(log_median, work, residual_covariance, *coefficients)
    loadings = work[measured] @ coefficients.root
    explained = loadings.T @ np.linalg.solve(loadings @ loadings.T + inner, loadings)
    root = coefficients.root @ square_root(np.eye(len(explained)) - explained)
    work = work - gain @ work[measured]
    work[measured] = 0.0
    return Posterior(log_median, work, residual_covariance, coefficients.mean, root)


def square_root(matrix: Array) -> Array:
    """A square root of a covariance, which may have lost rank: root @ root.T is the matrix."""
    import numpy as np

    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
