"""A few profiled batches to a whole training: its value, and how wide its interval is."""

import pytest

from whichlora.search import Quantity
from whichlora.totals import WARM_UP_REACH, profiled_total

STEPS = {64: 100.0, 128: 50.0, 256: 10.0}
PREDICTED = {64: 1.0, 128: 2.0, 256: 4.0}
PREDICTED_TOTAL = 100.0 + 100.0 + 40.0


def width(one: Quantity) -> float:
    return one.high / one.low


def test_the_total_follows_the_factor_of_the_profile() -> None:
    found = profiled_total(STEPS, PREDICTED, [(64, 1.5), (128, 3.0), (256, 6.0)])
    assert found.value == pytest.approx(1.5 * PREDICTED_TOTAL)
    assert found.low < found.value < found.high < 1.1 * found.value
    assert found.measured


def test_steps_that_disagree_and_widths_not_measured_widen_the_interval() -> None:
    agreeing = [(64, 1.0), (128, 2.0), (256, 4.0)]
    narrow = profiled_total(STEPS, PREDICTED, agreeing)
    torn = profiled_total(STEPS, PREDICTED, [(64, 1.3), (128, 2.0), (256, 3.4)])
    partial = profiled_total(STEPS, PREDICTED, [(256, 4.0)] * 3)
    assert width(narrow) < width(partial) < width(torn)


def test_a_first_step_that_takes_longer_is_paid_once() -> None:
    profile = [(256, 4.0), (64, 1.0)]
    warm = profiled_total(STEPS, PREDICTED, profile)
    cold = profiled_total(STEPS, PREDICTED, profile, warm_up_s=10.0)
    assert cold.value == pytest.approx(warm.value + 6.0)
    assert cold.high == pytest.approx(warm.high + 6.0 * WARM_UP_REACH)
    quick = profiled_total(STEPS, PREDICTED, profile, warm_up_s=3.0)
    assert quick == warm
