"""A few profiled batches to a whole training: its value, and how wide its interval is."""

import math

import pytest

from whichlora.predict.repeated_times import BATCH_SPREAD, BATCH_SPREAD_COUNTS, REPEATABILITY
from whichlora.search.feasibility import Quantity
from whichlora.search.total import WARM_UP_REACH, profiled_total

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


def test_an_interval_by_hand() -> None:
    """Two steps of one width, on a device that repeats to 2 %; two batches of 3 % are the prior.

    Errors of +10 % and -10 % in the log scatter by (2 * 0.03² + 2 * 0.1²) / (2 + 2 - 1); their mean
    is known twice as well, and the width that was not measured is off by as much on its own.
    """
    assert (BATCH_SPREAD, BATCH_SPREAD_COUNTS, REPEATABILITY) == (0.03, 2, 0.02)
    profile = [(64, math.exp(0.1)), (64, math.exp(-0.1))]
    scale = math.cosh(0.1)
    scatter = (2 * 0.03**2 + 2 * 0.1**2) / 3
    found = profiled_total({64: 100.0, 128: 50.0}, PREDICTED, profile, deviation=0.2)
    assert found.value == pytest.approx(200 * scale)
    half_of_the_time = 0.5**2
    variance = 0.2**2 + 0.02**2 + scatter * (1 / 2 + half_of_the_time)
    assert math.log(found.high / found.value) == pytest.approx(
        1.6449 * math.sqrt(variance), rel=1e-4
    )
    assert found.low * found.high == pytest.approx(found.value**2)
    assert found.confidence == 0.9


def test_a_device_that_repeats_worse_has_a_wider_interval_about_the_same_total() -> None:
    profile = [(64, 1.0), (128, 2.0), (256, 4.0)]
    good, poor = (profiled_total(STEPS, PREDICTED, profile, repeatability=r) for r in (0.0, 0.05))
    assert good.value == poor.value
    further = math.log(poor.high / poor.value) ** 2 - math.log(good.high / good.value) ** 2
    assert math.sqrt(further) == pytest.approx(1.6449 * 0.05, rel=1e-4)


def test_evaluations_may_take_twice_or_half_of_what_is_predicted() -> None:
    profile = [(256, 4.0), (64, 1.0)]
    without = profiled_total(STEPS, PREDICTED, profile)
    found = profiled_total(STEPS, PREDICTED, profile, evaluation_s=30.0)
    gained = [found.value - without.value, found.low - without.low, found.high - without.high]
    assert gained == pytest.approx([30, 15, 60])
