"""Scales of intervals by regime: they hold what they state of new runs, and of new groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whichlora.calibration.intervals import ENOUGH_HELD_OUT, scales_of_groups, scales_of_runs
from whichlora.calibration.regression import PRIOR_WEIGHT, student_scale
from whichlora.spec.numeric import TWO_SIDED_Z

Z = TWO_SIDED_Z[0.9]


def test_each_regime_holds_what_is_stated_where_their_errors_differ() -> None:
    dice = np.random.default_rng(7)
    regimes = ["host"] * 300 + ["device"] * 300
    wide = np.array([0.5] * 300 + [2.0] * 300)
    pooled, found = scales_of_runs(np.abs(wide * dice.standard_normal(600)), regimes, 0.9)
    assert found["host"] == pytest.approx(0.5, rel=0.15)
    assert found["device"] == pytest.approx(2.0, rel=0.15)
    assert found["host"] < pooled < found["device"]
    new = np.abs(wide * dice.standard_normal(600))
    scales = np.array([found[name] for name in regimes])
    for inside in np.split(new <= Z * scales, 2):
        assert 0.85 <= inside.mean() <= 0.95


def test_a_regime_of_few_runs_has_the_scale_of_all() -> None:
    scores = np.linspace(0.1, 2.0, 2 * ENOUGH_HELD_OUT)
    few = ENOUGH_HELD_OUT - 1
    _, found = scales_of_runs(scores, ["host"] * few + ["device"] * (len(scores) - few), 0.9)
    assert found.keys() == {"device"}


def test_many_runs_of_one_group_are_one_draw() -> None:
    few = scales_of_groups(np.zeros(1), ["a"], ["device"], 0.9)
    many = scales_of_groups(np.zeros(500), ["a"] * 500, ["device"] * 500, 0.9)
    assert few == many
    share = PRIOR_WEIGHT / (PRIOR_WEIGHT + 1)
    assert many[0] == pytest.approx(math.sqrt(share) * student_scale(1, 0.9))
    assert many[1]["device"] == pytest.approx(share * student_scale(1, 0.9))


def test_a_regime_of_one_group_stays_near_all_runs() -> None:
    groups = [f"{number}" for number in range(12) for _ in range(10)]
    regimes = (["device"] * 9 + ["host"]) * 12
    scores = np.full(120, 0.5)
    scores[-1] = 3.0  # of the last group's only run that the host decides
    pooled, found = scales_of_groups(scores, groups, regimes, 0.9)
    assert found["device"] < pooled < 1
    alone = scales_of_groups(scores[-1:], groups[-1:], ["host"], 0.9)[0]
    assert pooled < found["host"] < alone


@pytest.mark.parametrize(
    ("num_groups", "size", "most"),
    [(3, 1.0, 0.95), (14, 1.0, 0.95), (3, 0.5, 1.0), (14, 0.5, 0.99)],
)
def test_intervals_hold_of_a_new_group_what_they_state(
    num_groups: int, size: float, most: float
) -> None:
    """Two thirds of the variance are of the group. Few groups narrow little, and hold more."""
    dice = np.random.default_rng(11)
    held = []
    for _ in range(200):
        errors = size * (
            math.sqrt(2 / 3) * dice.standard_normal((num_groups + 1, 1))
            + math.sqrt(1 / 3) * dice.standard_normal((num_groups + 1, 20))
        )
        groups = [f"{number}" for number in range(num_groups) for _ in range(20)]
        scores = np.abs(errors[:-1]).ravel()
        scale, _ = scales_of_groups(scores, groups, ["device"] * len(groups), 0.9)
        held.append(float(np.mean(np.abs(errors[-1]) <= Z * scale)))
    assert 0.87 <= np.mean(held) <= most
