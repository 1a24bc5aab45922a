"""When a profile may end before its last batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.profiler.early_stop import is_enough

SECONDS = st.floats(0.01, 100.0)


def ends_after(phase: str, times_s: list[float], decisive_s: float) -> int:
    """Batches that are made of those a profile would have."""
    limits = [decisive_s] * len(times_s)
    numbers = range(1, len(times_s) + 1)
    return next((n for n in numbers if is_enough(phase, times_s[:n], limits)), len(times_s))


def test_a_training_that_is_clearly_too_slow_ends_after_two_steps() -> None:
    assert ends_after("finetune", [2.0] * 5, 1.0) == 2
    assert ends_after("finetune", [1.06] * 5, 1.0) == 2


def test_one_step_never_ends_a_training_however_slow_it_was() -> None:
    assert not is_enough("finetune", [100.0], [1.0])


def test_a_training_that_may_be_the_answer_makes_every_step() -> None:
    assert ends_after("finetune", [0.1] * 5, 1.0) == 5
    assert ends_after("finetune", [0.1] * 5, math.inf) == 5


def test_a_close_run_goes_on_until_its_mean_is_known_well_enough() -> None:
    assert ends_after("finetune", [1.04] * 5, 1.0) == 3
    assert ends_after("finetune", [1.01] * 5, 1.0) == 5


def test_steps_that_scatter_need_more_of_them() -> None:
    assert ends_after("finetune", [1.1, 1.1, 1.1, 1.1], 1.0) == 2
    assert ends_after("finetune", [1.3, 1.0, 1.2, 1.1], 1.0) > 2


def test_one_generation_is_enough_where_it_is_clearly_fast_or_slow() -> None:
    assert ends_after("inference", [0.5] * 5, 1.0) == 1
    assert ends_after("inference", [1.5] * 5, 1.0) == 1
    assert ends_after("inference", [1.05] * 5, 1.0) > 1


def test_one_generation_is_enough_where_no_time_is_too_long() -> None:
    assert ends_after("inference", [7.0] * 5, math.inf) == 1


@pytest.mark.parametrize("phase", ["finetune", "inference"])
def test_without_anything_to_decide_every_batch_is_made(phase: str) -> None:
    assert not any(is_enough(phase, [9.0] * n, []) for n in range(6))


def test_a_profile_whose_mean_is_known_ends_without_anything_to_decide() -> None:
    predicted = [1.0, 2.0, 1.0, 2.0, 1.0]
    times = [1.5, 3.0, 1.5, 3.0, 1.5]
    ends = [is_enough("finetune", times[:n], [], predicted) for n in range(1, 6)]
    assert ends == [False, False, False, True, True]


def test_a_profile_whose_steps_scatter_does_not_know_its_mean() -> None:
    times = [1.0, 1.2] * 5
    assert not any(is_enough("finetune", times[:n], [], [1.0] * 10) for n in range(1, 11))


def test_batches_of_several_lengths_are_each_held_against_their_own_limit() -> None:
    assert is_enough("finetune", [4.0, 1.0], [2.0, 0.5, 1.0])
    assert not is_enough("finetune", [4.0, 1.0], [4.0, 1.0, 2.0])


@given(times=st.lists(SECONDS, min_size=1, max_size=6), decisive_s=SECONDS, factor=SECONDS)
def test_the_unit_of_time_does_not_matter(
    times: list[float], decisive_s: float, factor: float
) -> None:
    for phase in ("finetune", "inference"):
        here = ends_after(phase, times, decisive_s)
        there = ends_after(phase, [factor * time_s for time_s in times], factor * decisive_s)
        assert here == pytest.approx(there)
