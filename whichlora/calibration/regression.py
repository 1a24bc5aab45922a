"""Robust regression in relative error, around priors: two estimators in scikit-learn's conventions.

`MemoryRegressor` is linear and keeps close to a prior known to be right (parts of the ledger).
`TimeRegressor` is for factors that may be anything, if unlikely (speeds of a device). In both
the prior lets two runs already improve the fit. A run that agrees with the others has weight one;
a run far off is down-weighted, so that a few wrong records do not move the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GroupKFold
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    check_non_negative,
    validate_data,
)

from whichlora.spec.numeric import TWO_SIDED_Z

Array = NDArray[np.float64]

PRIOR_WEIGHT = 4.0  # runs that the prior's noise counts for when residuals are few
# Huber 1964: 95 % as efficient as least squares where all errors are normal.
HUBER = 1.345
FOLDS = 10
MAX_ROUNDS = 12  # of coefficients and weights, which settle in three or four
MAX_STEPS = 40  # of a descent, which settles in five to ten
MOST_DESCENTS = 3  # from the starts that promise most
LONGEST_STEP = 1.0  # of the log of a factor in one step
SETTLED = 1e-4  # a step that moves no prediction
# Degrees of freedom of what a prior's deviation was estimated from: the coefficients of three GPUs
# (`timing.py`), which leave two. A normal distribution whose deviation is known no better than that
# is a Student's t with as many (Gosset 1908).
SPREAD_FREEDOM = 2
# Shares of a coefficient's variance: of its machine, resource, kind of work and phase.
_OF_MACHINE, _OF_RESOURCE, _OF_KIND, _OF_PHASE = 1 / 2, 1 / 4, 1 / 8, 1 / 16
_OF_BOTH = 1 / 8  # of a device's share, what its host has in common with it
# Of a deviation of a host's coefficient, what the hosts beside all devices of one type have in
# common, as new devices stand beside newer processors, and what one host of them has alone. Kind:
# estimate: twelve hosts beside devices of five types (`timing.model.LAUNCH_S`) deviate by 0.8 and
# 0.6; sources on A100 predict each other best by 0.3 and 1.
_OF_ALL_HOSTS, _OF_ONE_HOST = 0.5, 0.87
_MIN_NOISE = 0.02
MOST_LOG = 30.0  # of a factor while its fit is on the way; e^30 is beyond any device
_LEAST = 1e-12  # of a predicted value, where its logarithm is taken
_STARTS = (-2.0, -1.0, 1.0, 2.0, 3.0, 4.0)  # logs of a factor from which a fit sets out
_MAD_TO_DEVIATION = 1.4826  # median absolute to standard deviation of a normal distribution


class _PositiveRegressor(RegressorMixin, BaseEstimator):
    """Input checks of both estimators: features are not negative, targets are positive."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags

    def _checked(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> tuple[Array, Array, Array]:
        features, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        check_non_negative(features, type(self).__name__)
        target = np.asarray(target, dtype=np.float64)
        if target.min() <= 0:
            raise ValueError(f"y must be positive, got {target.min():g}")
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        return features, target, weights

    def _features(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        return np.asarray(
            validate_data(self, X, reset=False, dtype=np.float64, ensure_non_negative=True)
        )


class MemoryRegressor(_PositiveRegressor):
    """Factors, near one, on columns that add up to the target.

        minimise  sum_i w_i ((y_i - x_i·c) / (noise y_i))^2 + sum_j ((c_j - 1) / spread_j)^2
        with c >= 0

    Each round is one `LinearRegression(positive=True)` with the prior as rows. Weights w and the
    noise between rounds are ours. `HuberRegressor` allows negative factors and takes its scale from
    the residuals alone, which two runs leave at zero. `BayesianRidge` has a prior of the noise, but
    allows negative factors and is not robust.

    Args:
        spread: standard deviation of each factor before any run; one number for all, or one each.
        noise: standard deviation of the log of a run before any run.

    Attributes:
        coef_: the factors.
        covariance_: of `coef_`, given the noise.
        noise_: standard deviation of the log of a run around them.
    """

    def __init__(self, spread: float | Sequence[float] = 0.5, noise: float = 0.015) -> None:
        self.spread = spread
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        X, y, counts = self._checked(X, y, sample_weight)
        spread = np.broadcast_to(np.asarray(self.spread, dtype=np.float64), X.shape[1])
        prior_rows, prior_weights = np.eye(len(spread)), np.ones(len(spread))
        # columns differ by ten orders of magnitude (launches against seconds): scale by the prior
        stacked = np.vstack([X * spread, prior_rows])
        target = np.concatenate([y, 1.0 / spread])
        coefficients, noise = np.ones(len(spread)), self.noise
        errors = _log_errors(y, X @ coefficients)
        errors = errors - weighted_median(errors, counts)
        weights = counts * robust_weights(errors, noise, counts)
        for _ in range(MAX_ROUNDS):
            before = coefficients
            linear = LinearRegression(positive=True, fit_intercept=False)
            precision = np.concatenate([weights / (noise * y) ** 2, prior_weights])
            coefficients = linear.fit(stacked, target, sample_weight=precision).coef_ * spread
            errors = _log_errors(y, X @ coefficients)
            robust = robust_weights(errors, self.noise, counts)
            weights = counts * robust
            noise = pooled_noise(errors, self.noise, robust, counts)
            if np.allclose(coefficients, before, rtol=1e-4, atol=1e-6):
                break
        scaled = X * spread * (np.sqrt(weights) / (noise * y))[:, None]
        inner = np.linalg.inv(scaled.T @ scaled + prior_rows)
        self.coef_ = coefficients
        self.covariance_ = inner * np.outer(spread, spread)
        self.noise_ = noise
        return self

    def predict(self, X: ArrayLike) -> Array:
        return np.asarray(self._features(X) @ self.coef_)


class TimeRegressor(_PositiveRegressor):
    """Coefficients that are products of independent factors around a prior, each above zero.

    A row of X has its features in the columns of its phase and zeros in those of the others; the
    columns of every phase are in the same order. A coefficient is its prior times e to the sum of
    its factors' logs: of the whole device, of the resource, the phase and the kind of work, and of
    this kind of work in this phase. So runs of one phase inform the others.

    No estimator of scikit-learn has this form. Its linear models have normal priors on additive
    coefficients, and its generalised ones with a log link multiply the columns; here columns add
    up, factors multiply their coefficients, each factor has a Student's t as its prior
    (`fit_effects`), and which columns decide a run depends on the coefficients.

    Args:
        prior: each coefficient before any run; None is one each.
        spread: relative standard deviation of each coefficient before any run; one number for
            all, or one each.
        noise: standard deviation of the log of a run before any run.
        num_phases: equal blocks of columns.
        resources: positions, within a block, of columns that are faster or slower at once.
        apart: positions of columns of another machine than the device.
        deciding: of the coefficients of a block and its rows, the rows with those columns zero that
            do not decide their time; None for all columns.
        drift: relative standard deviation of a coefficient between older runs and the others.

    Attributes:
        coef_: coefficients.
        covariance_: of `coef_`.
        noise_: standard deviation of the log of a run around them, by phase.
        freedom_: how many independent runs told it, by phase.
    """

    def __init__(
        self,
        prior: Sequence[float] | None = None,
        spread: float | Sequence[float] = 0.5,
        noise: float = 0.2,
        num_phases: int = 1,
        resources: Sequence[Sequence[int]] = (),
        apart: Sequence[int] = (),
        deciding: Callable[[Array, Array], Array] | None = None,
        drift: float = 0.15,
        of_stack: Sequence[int] = (),
    ) -> None:
        self.prior = prior
        self.spread = spread
        self.noise = noise
        self.num_phases = num_phases
        self.resources = resources
        self.apart = apart
        self.deciding = deciding
        self.drift = drift
        self.of_stack = of_stack

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        older: ArrayLike | None = None,
        stack: ArrayLike | None = None,
    ) -> Self:
        """Learn from runs.

        Args:
            older: runs that teach only what the prior of the others is. However many they are, few
                of the others correct them. Of what is `apart` they teach what their
                machines have in common with others beside such a device.
            stack: name of the software of each run. Of the older runs each has factors of its own
                on the columns `of_stack`; the others are of one stack, which is that of the answer.
        """
        X, y, weights = self._checked(X, y, sample_weight)
        is_older = np.zeros(len(y), bool) if older is None else np.asarray(older, bool)
        count = X.shape[1]
        if count % self.num_phases:
            raise ValueError(f"X has {count} columns, which is not {self.num_phases} equal blocks")
        spread = np.broadcast_to(np.asarray(self.spread, dtype=np.float64), count)
        self.coef_ = np.ones(count) if self.prior is None else np.array(self.prior, np.float64)
        self.covariance_ = np.diag((spread * self.coef_) ** 2)
        self.noise_ = np.full(self.num_phases, self.noise, dtype=np.float64)
        self.freedom_ = np.zeros(self.num_phases)
        if is_older.any():
            names = np.zeros(len(y), int) if stack is None else np.asarray(stack)
            numbers = np.unique(names[is_older], return_inverse=True)[1]
            between = np.full(count, self.drift)
            width = count // self.num_phases
            for position in self.of_stack:
                between[position::width] = spread[position::width]
            shared = spread.copy()
            for position in self.apart:
                shared[position::width] *= _OF_ALL_HOSTS
                between[position::width] *= _OF_ONE_HOST
            self._update(X[is_older], y[is_older], weights[is_older], shared, numbers, between)
            deviations = np.sqrt(np.diag(self.covariance_)) / self.coef_
            spread = np.minimum(spread, np.hypot(deviations, between))
            self.covariance_ = np.diag((spread * self.coef_) ** 2)
        if not is_older.all():
            self._update(X[~is_older], y[~is_older], weights[~is_older], spread)
        return self

    def _update(
        self,
        X: Array,
        y: Array,
        weights: Array,
        spread: Array,
        stacks: NDArray[np.intp] | None = None,
        between: Array | None = None,
    ) -> None:
        """Move the coefficients, whose relative deviations are `spread`, to what the runs say.

        Args:
            stacks: number of each run's stack, which then has factors of its own.
            between: relative deviation of each coefficient between stacks.
        """
        by_phase = spread.reshape(self.num_phases, -1)
        loads, factor_spread, num_shared = _factors(by_phase, self.resources, self.apart)
        num_factors = len(factor_spread)
        of_stack = np.array(self.of_stack if stacks is not None else (), dtype=np.intp)
        numbers = np.zeros(len(y), np.intp) if stacks is None else stacks
        # a stack's factors, in all phases, deviate as the least prior of their columns says
        apart_by_phase = by_phase if between is None else between.reshape(by_phase.shape)
        least = apart_by_phase[:, of_stack].min(axis=0, initial=np.inf)
        of_stacks = np.tile(np.sqrt(np.log1p(least**2)), numbers.max() + 1)
        factor_spread = np.concatenate([factor_spread, of_stacks])
        first = num_factors + numbers * len(of_stack)  # of each run's stack
        blocks = self._blocks(X)
        start = self.coef_

        def explain(logs: Array, with_slopes: bool) -> tuple[Array, Array]:
            of_all = loads @ logs[:num_factors]
            errors, slopes = np.empty(len(y)), np.zeros((len(y), len(logs)))
            for _, columns, rows, features in blocks:
                places = first[rows, None] + np.arange(len(of_stack))
                exponents = np.tile(of_all[columns], (len(rows), 1))
                exponents[:, of_stack] += logs[places]
                coefficients = start[columns] * np.exp(np.clip(exponents, -MOST_LOG, MOST_LOG))
                parts = self._parts(coefficients, features)
                predicted = np.maximum(parts.sum(axis=1), _LEAST)
                errors[rows] = np.log(y[rows] / predicted)
                if with_slopes:
                    shares = parts / predicted[:, None]
                    slopes[rows, :num_factors] = shares @ loads[columns]
                    slopes[rows[:, None], places] = shares[:, of_stack]
            return errors, slopes

        seen = [phase for phase, *_ in blocks]
        groups = [rows for _, _, rows, _ in blocks]
        evidence = Evidence(explain, groups, factor_spread, self.noise_[seen], weights)
        effects = fit_effects(evidence, _starts(len(factor_spread), num_shared))
        of_any = effects.covariance[:num_factors, :num_factors]
        self.coef_ = start * np.exp(loads @ effects.logs[:num_factors])
        self.covariance_ = loads @ of_any @ loads.T * np.outer(self.coef_, self.coef_)
        self.noise_[seen], self.freedom_[seen] = effects.noise, effects.freedom

    def _blocks(self, X: Array) -> list[tuple[int, slice, NDArray[np.intp], Array]]:
        """Every phase that has rows: its number, its columns, its rows, and what is in both."""
        width = X.shape[1] // self.num_phases
        phases = X.reshape(len(X), self.num_phases, width).any(axis=2).argmax(axis=1)
        blocks = []
        for phase in np.unique(phases).tolist():
            columns = slice(phase * width, (phase + 1) * width)
            rows = np.flatnonzero(phases == phase)
            blocks.append((phase, columns, rows, X[rows, columns]))
        return blocks

    def _parts(self, coefficients: Array, features: Array) -> Array:
        """What every column of a block adds to its rows."""
        if self.deciding is not None:
            features = self.deciding(coefficients, features)
        return np.asarray(features * coefficients)

    def predict(self, X: ArrayLike) -> Array:
        checked = self._features(X)
        predicted = np.empty(len(checked))
        for _, columns, rows, features in self._blocks(checked):
            predicted[rows] = self._parts(self.coef_[columns], features).sum(axis=1)
        return predicted

    def log_deviations(self, X: ArrayLike) -> Array:
        """Standard deviation of the log of each prediction due to the coefficients' covariance."""
        checked = self._features(X)
        deviations = np.empty(len(checked))
        for _, columns, rows, features in self._blocks(checked):
            parts = self._parts(self.coef_[columns], features)
            shares = parts / np.maximum(parts.sum(axis=1), _LEAST)[:, None] / self.coef_[columns]
            covariance = self.covariance_[columns, columns]
            variances = np.einsum("ij,jk,ik->i", shares, covariance, shares)
            deviations[rows] = np.sqrt(np.maximum(variances, 0.0))
        return deviations


def _factors(
    spread: Array, resources: Sequence[Sequence[int]], apart: Sequence[int]
) -> tuple[Array, Array, int]:
    """Independent factors whose products deviate as coefficients do.

    Nothing says which of them is why a coefficient differs from its prior. What has fewer causes is
    likelier: the machine has half of the variance, then resource, kind of work and phase half of
    what is left each. What several coefficients share has the variance of the least of them, each
    as in the phase where it deviates most: what makes one phase slower makes all. A phase that
    deviates less has less of its own.

    A device and what is apart from it, its host, are two machines, which have little in common: a
    slow host is no reason to call the device slow.

    Args:
        spread: relative deviation of each coefficient, shape [num_phases, num_features].
        apart: positions of features of another machine than the device.

    Returns:
        Which factors every coefficient has, shape [num_coefficients, num_factors]; the deviation of
        each factor's log; how many, the first ones, are of a machine, a resource or a phase.
    """
    num_phases, num_features = spread.shape
    variances = np.log1p(spread**2)
    most = variances.max(axis=0)
    everything = np.arange(num_features)
    device = np.setdiff1d(everything, apart)
    of_both = _OF_BOTH if len(apart) else _OF_MACHINE
    groups = [(everything, of_both * most.min())]
    if len(apart):
        groups.append((device, (_OF_MACHINE - of_both) * most[device].min()))
    groups += [
        (positions, _OF_RESOURCE * most[positions].min()) for positions in map(np.array, resources)
    ]
    has = np.array([np.isin(everything, positions) for positions, _ in groups])
    shared = np.array([variance for _, variance in groups])
    kinds, phase = _OF_KIND * most, _OF_PHASE * most.min()
    single = np.maximum(variances - shared @ has - kinds - phase, _OF_PHASE * variances)
    loads = np.hstack(
        [
            np.tile(has.T, (num_phases, 1)),
            np.kron(np.eye(num_phases), np.ones((num_features, 1))),
            np.tile(np.eye(num_features), (num_phases, 1)),
            np.eye(variances.size),
        ]
    )
    of_factors = np.concatenate([shared, np.full(num_phases, phase), kinds, single.ravel()])
    return loads, np.sqrt(of_factors), len(shared) + num_phases


def _starts(num_factors: int, num_shared: int) -> Iterator[Array]:
    """The prior, and each factor of several coefficients alone at every value of the grid."""
    yield np.zeros(num_factors)
    for factor in range(num_shared):
        for log in _STARTS:
            start = np.zeros(num_factors)
            start[factor] = log
            yield start


@dataclass(frozen=True, slots=True)
class Effects:
    """Logs of the factors that explain runs best.

    Args:
        logs: shape [num_effects]; zero is what the prior expects.
        covariance: of `logs`, shape [num_effects, num_effects].
        noise: standard deviation of the log of a run around them, by group: of the runs that they
            do not follow, as a sum of squares over degrees of freedom is.
        freedom: these degrees, by group: runs less the traces of their hat matrix.
    """

    logs: Array
    covariance: Array
    noise: Sequence[float]
    freedom: Sequence[float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Runs that independent factors are to explain.

    Args:
        explain: of logs of the factors, the log errors of all runs, shape [num_runs], and, where
            asked for, what a unit of each takes off them, shape [num_runs, num_effects].
        groups: positions of the runs that scatter alike; every run is in one.
        spread: standard deviation of each log before any run.
        noise: of the log of a run before any run, by group.
        sample_weight: how many runs each counts for.
    """

    explain: Callable[[Array, bool], tuple[Array, Array]]
    groups: Sequence[NDArray[np.intp]]
    spread: Array
    noise: Array
    sample_weight: Array

    def criterion(self, errors: Array, logs: Array) -> float:
        """What `fit_effects` minimises: runs as `robust_weights` sees them, and the prior."""
        freedom = SPREAD_FREEDOM + 1
        total = float(np.log1p((logs / self.spread) ** 2 / freedom).sum()) * freedom / 2
        for group, noise in zip(self.groups, self.noise.tolist(), strict=True):
            sizes, counts = _sizes(errors[group]), self.sample_weight[group]
            deviation = _deviation(sizes, noise, counts)
            most = HUBER * deviation
            beyond = most**2 * np.log(np.maximum(sizes / most, 1.0))
            rho = float(counts @ (np.minimum(sizes, most) ** 2 / 2 + beyond))
            total += (float(counts.sum()) + PRIOR_WEIGHT) * math.log(deviation)
            total += (rho + PRIOR_WEIGHT * noise**2 / 2) / deviation**2
        return total

    def weighed(self, errors: Array) -> tuple[Array, list[float]]:
        """Weight of every run over its variance, and the noise of each group."""
        precision, noise = np.ones(len(errors)), []
        for group, before in zip(self.groups, self.noise.tolist(), strict=True):
            counts = self.sample_weight[group]
            weights = robust_weights(errors[group], before, counts)
            noise.append(pooled_noise(errors[group], before, weights, counts))
            precision[group] = counts * weights / noise[-1] ** 2
        return precision, noise

    def pull(self, logs: Array) -> Array:
        """Precision of the normal distribution that pulls as the Student's t does at `logs`."""
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
    promising = sorted(
        starts, key=lambda start: evidence.criterion(evidence.explain(start, False)[0], start)
    )
    descents = (_descended(evidence, start) for start in promising[:MOST_DESCENTS])
    _, logs = min(descents, key=lambda pair: pair[0])
    errors, slopes = evidence.explain(logs, True)
    precision, noise = evidence.weighed(errors)
    inverse = (slopes * precision[:, None]).T @ slopes + np.diag(evidence.pull(logs))
    covariance = np.asarray(np.linalg.inv(inverse))
    followed = precision * np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
    counts = [float(evidence.sample_weight[group].sum()) for group in evidence.groups]
    freedom = [
        max(0.0, count - float(followed[group].sum()))
        for count, group in zip(counts, evidence.groups, strict=True)
    ]
    widened = [
        deviation * math.sqrt((PRIOR_WEIGHT + count) / (PRIOR_WEIGHT + free))
        for deviation, count, free in zip(noise, counts, freedom, strict=True)
    ]
    return Effects(logs, covariance, widened, freedom)


def _descended(evidence: Evidence, start: Array) -> tuple[float, Array]:
    """The least criterion on the way down from `start` by reweighted least squares, and where."""
    logs = best = start
    least = math.inf
    for _ in range(MAX_STEPS):
        errors, slopes = evidence.explain(logs, True)
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
    return np.asarray(np.expm1(np.minimum(np.abs(errors), 50.0)))


def weighted_median(values: Array, weights: Array) -> float:
    """The median of `values`, each as often as its weight says."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    middle = [np.searchsorted(total, total[-1] / 2, side) for side in ("left", "right")]
    return float(values[order][np.minimum(middle, len(values) - 1)].mean())


def _deviation(sizes: Array, prior_noise: float, sample_weight: Array) -> float:
    """The ordinary relative error, the prior's noise counting as `PRIOR_WEIGHT` runs."""
    mad = _MAD_TO_DEVIATION * weighted_median(sizes, sample_weight)
    count = float(sample_weight.sum())
    pooled = PRIOR_WEIGHT * prior_noise**2 + count * mad**2
    return max(_MIN_NOISE, math.sqrt(pooled / (PRIOR_WEIGHT + count)))


def _log_errors(measured: Array, predicted: Array) -> Array:
    """Log of measured over predicted."""
    return np.asarray(np.log(measured / np.maximum(predicted, _LEAST)))


def robust_weights(errors: Array, prior_noise: float, sample_weight: Array | None = None) -> Array:
    """Weight of each squared error: one up to `HUBER` deviations, then falling with its square.

    Huber's own weight falls with the error itself. But the criterion divides by the measured
    value, so a value that is ten times too small pulls ten times harder; the square takes that
    back.

    A deviation is the median error, which no minority of wrong records moves, the prior's noise
    counting as `PRIOR_WEIGHT` runs: of two runs that disagree neither is the outlier.

    Args:
        errors: log of measured over predicted. Ten times too slow is as far off as ten times too
            fast, though the criterion sees 0.9 of one and 9 of the other.
        sample_weight: how many runs each counts for; None is one each.
    """
    sizes = _sizes(errors)
    counts = np.ones(len(errors)) if sample_weight is None else sample_weight
    deviation = _deviation(sizes, prior_noise, counts)
    return np.asarray(np.minimum(1.0, HUBER * deviation / np.maximum(sizes, 1e-12)) ** 2)


def pooled_noise(
    residuals: Array, prior_noise: float, weights: Array, sample_weight: Array | None = None
) -> float:
    """Standard deviation of log errors, the prior counting as `PRIOR_WEIGHT` runs."""
    counts = np.ones(len(residuals)) if sample_weight is None else sample_weight
    total = PRIOR_WEIGHT * prior_noise**2 + float((counts * weights) @ residuals**2)
    return max(_MIN_NOISE, math.sqrt(total / (PRIOR_WEIGHT + float(counts.sum()))))


def held_out_noise(errors: Array, prior_noise: float) -> float:
    return pooled_noise(errors, prior_noise, robust_weights(errors, prior_noise))


def student_scale(num_runs: float, confidence: float) -> float:
    """What a normal interval is to be multiplied with where few runs told the noise.

    A deviation that is known from few runs, the prior counting as `PRIOR_WEIGHT`, makes what is
    normal around it a Student's t of as many degrees of freedom (Gosset 1908).
    """
    quantile = float(stdtrit(PRIOR_WEIGHT + num_runs, (1 + confidence) / 2))
    return quantile / TWO_SIDED_Z[confidence]


def grouped_folds(groups: Sequence[str]) -> GroupKFold:
    """Splits that keep a group together: each alone up to `FOLDS`, else as many folds."""
    return GroupKFold(min(FOLDS, len(set(groups))))


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
    rank = math.ceil((len(errors) + 1) * confidence)
    if rank > len(errors):
        return None
    return float(np.sort(np.abs(errors) / deviations)[rank - 1]) / TWO_SIDED_Z[confidence]
