"""The two estimators: scikit-learn's conventions, and what no check of its own asks for."""

import math

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from whichlora.calibration.regression import MemoryRegressor, TimeRegressor, weighted_median

TIME = TimeRegressor(num_phases=2, resources=((0, 1), (2,)))


@parametrize_with_checks([MemoryRegressor(), TimeRegressor()])
def test_the_conventions_of_scikit_learn_hold(estimator, check) -> None:  # type: ignore[no-untyped-def]
    """None is expected to fail."""
    check(estimator)


def two_phases(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two phases in turn, whose coefficients are 2, 3 and 4 times one in both."""
    features = np.random.default_rng(seed).uniform(0.5, 2.0, (count, 3))
    rows = np.zeros((count, 6))
    rows[::2, :3], rows[1::2, 3:] = features[::2], features[1::2]
    return rows, features @ [2.0, 3.0, 4.0]


def test_coefficients_of_both_phases_are_recovered() -> None:
    rows, seconds = two_phases(40)
    fitted = clone(TIME).fit(rows, seconds)
    assert fitted.coef_ == pytest.approx([2.0, 3.0, 4.0] * 2, rel=0.1)
    assert fitted.predict(rows) == pytest.approx(seconds, rel=0.03)
    assert fitted.covariance_.shape == (6, 6)
    assert (fitted.log_deviations(rows) > 0).all()


def test_a_phase_without_runs_learns_from_the_other_and_keeps_its_noise() -> None:
    rows, seconds = two_phases(40)
    fitted = clone(TIME).fit(rows[::2], seconds[::2])
    assert fitted.coef_[3:] == pytest.approx([2.0, 3.0, 4.0], rel=0.35)
    assert fitted.noise_[0] < fitted.noise_[1] == TIME.noise
    assert (fitted.log_deviations(rows)[1::2] > fitted.log_deviations(rows)[::2].max()).all()


def test_few_runs_correct_any_number_of_older_ones() -> None:
    rows, seconds = two_phases(200)
    older = np.arange(200) < 190
    seconds = np.where(older, seconds, 1.5 * seconds)
    fitted = clone(TIME).fit(rows, seconds, older=older)
    assert fitted.predict(rows[~older]) == pytest.approx(seconds[~older], rel=0.08)
    assert clone(TIME).fit(rows, seconds).predict(rows[older]) == pytest.approx(
        seconds[older], rel=0.08
    )


def test_what_one_software_costs_is_not_what_the_next_is_taken_to_cost() -> None:
    """Three stacks agree on one column, and take 2.5, 1 and 0.5 times as long for the other."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(0.1, 1.0, (90, 2))
    stack = np.repeat(["a", "b", "c"], 30)
    dear = np.repeat([2.5, 1.0, 0.5], 30)
    seconds = 2.0 * rows[:, 0] + dear * rows[:, 1]
    older = np.ones(90, bool)
    regressor = TimeRegressor(of_stack=[1])
    apart = clone(regressor).fit(rows, seconds, older=older, stack=stack)
    together = clone(regressor).set_params(of_stack=[]).fit(rows, seconds, older=older)
    assert apart.coef_[0] == pytest.approx(2.0, rel=0.05)
    assert apart.noise_[0] < 0.05 < together.noise_[0]
    assert 0.7 < apart.coef_[1] < 1.5
    # the next stack may differ as much as the prior says
    assert math.sqrt(apart.covariance_[1, 1]) / apart.coef_[1] == pytest.approx(0.5, rel=0.1)


def test_columns_must_make_equal_blocks() -> None:
    rows, seconds = two_phases(6)
    with pytest.raises(ValueError, match="X has 5 columns, which is not 2 equal blocks"):
        clone(TIME).fit(rows[:, :5], seconds)


@pytest.mark.parametrize("estimator", [MemoryRegressor(), TimeRegressor()])
def test_what_is_measured_is_positive(estimator: MemoryRegressor | TimeRegressor) -> None:
    with pytest.raises(ValueError, match="y must be positive, got 0"):
        estimator.fit([[1.0], [2.0]], [0.0, 2.0])


def test_factors_of_memory_are_never_negative_and_near_one() -> None:
    dice = np.random.default_rng(1)
    rows = dice.uniform(0.5, 2.0, (60, 3)) * 1e9
    wanted = [1.0, 0.0, 1.2]
    fitted = MemoryRegressor(spread=[0.01, 0.75, 0.75]).fit(rows, rows @ wanted)
    assert fitted.coef_ == pytest.approx(wanted, abs=0.02)
    assert MemoryRegressor(spread=0.1).fit(rows, 1e-3 * rows.sum(axis=1)).coef_.min() >= 0.0
    assert MemoryRegressor(spread=1e-6).fit(rows, rows @ wanted).coef_ == pytest.approx(
        1.0, abs=1e-3
    )


def test_a_tenth_of_wrong_rows_moves_no_factor() -> None:
    dice = np.random.default_rng(2)
    rows = dice.uniform(0.5, 2.0, (60, 3))
    values = rows @ [0.9, 1.1, 1.3]
    values[::10] *= 5.0
    for estimator in (MemoryRegressor(), TimeRegressor()):
        assert estimator.fit(rows, values).coef_ == pytest.approx([0.9, 1.1, 1.3], rel=0.03)


def test_settings_can_be_searched_by_scikit_learn() -> None:
    rows, seconds = two_phases(40)
    search = GridSearchCV(TIME, {"spread": [1e-3, 0.5]}, cv=4).fit(rows, seconds)
    assert search.best_params_ == {"spread": 0.5}


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0]])
def test_a_weight_is_a_repetition(values: list[float]) -> None:
    counts = np.array([1 + i % 3 for i in range(len(values))])
    repeated = np.repeat(values, counts)
    assert weighted_median(np.array(values), counts) == np.median(repeated)
    assert weighted_median(np.array(values), np.ones(len(values))) == np.median(values)
