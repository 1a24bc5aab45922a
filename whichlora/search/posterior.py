"""What is believed of one quantity of all candidates at once.

Two candidates that do the same work are wrong in the same way: the coefficients that predict them
are the same, and what the formulas leave out is alike where the model, the method or the batch is.
So a belief is not an interval per candidate but one distribution over all of them, from which
whole worlds are drawn, and measuring one candidate tells of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from whichlora.search.feasibility import Quantity
from whichlora.spec.numeric import TWO_SIDED_Z, WIDEST

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

EXPECTED_RUNS = 2.0  # measured runs that the expected size of own errors counts for
LARGEST_GAIN = 0.95  # a coefficient may turn out to be so much less than guessed
REPEATABILITY = 0.02  # deviation of the log of a profile that is repeated


class Coefficients(NamedTuple):
    """Best guesses, and a square root of the covariance of what is believed of them."""

    mean: Array
    root: Array


@dataclass(frozen=True, slots=True)
class Belief:
    """One quantity of all candidates: log-normal, with shared and own errors.

    Args:
        log_value: log of the best guess, shape [num_candidates].
        work: what a unit more of each coefficient adds to it, as a fraction of it, shape
            [num_candidates, num_coefficients]; zero of what was measured, and less of what is
            like it.
        own: covariance of what the coefficients do not explain, shape [n, n].
        coefficients: the best guess of each.
        root: a square root of their covariance.
    """

    log_value: Array
    work: Array
    own: Array
    coefficients: Array
    root: Array

    @property
    def shared(self) -> Array:
        """Effect of each independent error of the coefficients, shape [num_candidates, n]."""
        return self.work @ self.root

    def quantity(self, position: int) -> Quantity:
        """What is believed of one candidate."""
        variance = float((self.shared[position] ** 2).sum() + self.own[position, position])
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

    def draw(self, num_worlds: int, rng: np.random.Generator) -> Array:
        """Values in `num_worlds` worlds, shape [num_worlds, num_candidates]."""
        import numpy as np

        errors = rng.standard_normal((num_worlds, self.root.shape[1])) @ self.root.T
        # more work never takes less: no coefficient is negative, however little is known of it
        errors = np.maximum(errors, -LARGEST_GAIN * self.coefficients)
        own = rng.standard_normal((num_worlds, len(self.log_value))) @ square_root(self.own).T
        factor = np.maximum(1 - LARGEST_GAIN, 1 + errors @ self.work.T)
        return np.asarray(np.exp(self.log_value + own) * factor)


def conditioned(
    log_value: Array,
    work: Array,
    noise: Array,
    alike: Array,
    coefficients: Coefficients,
    errors: Mapping[int, float],
    *,
    joint: bool,
) -> Belief:
    """The belief once the errors of some candidates are known: the others err alike.

    What was measured is known: its own error is the one seen, without spread. A measurement shows
    coefficients and own error together. Conditioned jointly, it narrows the coefficients by as
    much as own errors let them be seen; and where the coefficients are worse than guessed, the own
    errors of it and of its like are better by what is explained twice.

    Args:
        coefficients: best guesses after what was measured, and their spread: before that where
            both are conditioned jointly, after it otherwise.
    """
    import numpy as np

    own = alike * np.outer(noise, noise)
    if not errors:
        return Belief(log_value, work, own, *coefficients)
    seen = np.fromiter(errors, dtype=np.intp)
    wanted = np.array([errors[i] for i in seen.tolist()])
    # a measurement repeats to about this much, which also keeps the matrix regular
    repeats = REPEATABILITY**2 * np.eye(len(seen))
    inner = own[np.ix_(seen, seen)] + repeats
    # the errors seen may be smaller or larger than the noise that was expected
    size = float(wanted @ np.linalg.solve(inner, wanted))
    own = own * (EXPECTED_RUNS + size) / (EXPECTED_RUNS + len(seen))
    inner = own[np.ix_(seen, seen)] + repeats
    gain = np.linalg.solve(inner, own[seen]).T  # [n, num_seen]
    known = log_value + gain @ wanted
    known[seen] = log_value[seen] + wanted
    left = own - gain @ own[seen]
    left[seen] = left[:, seen] = 0.0
    if not joint:
        work = work.copy()
        work[seen] = 0.0
        return Belief(known, work, left, *coefficients)
    shown = work[seen] @ coefficients.root  # by each independent error of the coefficients
    explained = shown.T @ np.linalg.solve(shown @ shown.T + inner, shown)
    root = coefficients.root @ square_root(np.eye(len(explained)) - explained)
    work = work - gain @ work[seen]
    work[seen] = 0.0
    return Belief(known, work, left, coefficients.mean, root)


def square_root(matrix: Array) -> Array:
    """A square root of a covariance, which may have lost rank: root @ root.T is the matrix."""
    import numpy as np

    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
