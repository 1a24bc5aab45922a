"""How well a profile knows its mean, and how alike a device repeats a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from whichlora.predict.repeated_times import (
    KNOWN_TO,
    REPEATABILITY,
    batch_variance,
    batches_wanted,
    known_to,
    repeatability,
    run_deviation,
)
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig

RECORD = Measurement(
    id="",
    gpu="cpu",
    date="2026-01-01",
    config=RunConfig(model="m").to_dict(),
    outcome="ok",
    step_s=(2.0, 1.0),
    batch_seq_len=(128, 64),
    environment={"platform": "Linux", "libraries": {"torch": "2.13.0"}},
)


def test_the_spread_of_batches_starts_from_that_of_all_profiles() -> None:
    assert batch_variance([0.5]) == pytest.approx(0.03**2)
    assert batch_variance([0.1, -0.1]) == pytest.approx((2 * 0.03**2 + 2 * 0.1**2) / 3)


def test_as_many_batches_as_are_wanted_know_the_mean() -> None:
    logs = [0.05, -0.05] * 4
    number = batches_wanted(logs)
    deviation = math.sqrt(batch_variance(logs))
    assert known_to(logs) == pytest.approx(1.6449 * deviation / math.sqrt(8), rel=1e-4)
    assert 1.6449 * deviation / math.sqrt(number) <= KNOWN_TO
    assert 1.6448 * deviation / math.sqrt(number - 1) > KNOWN_TO


def test_a_profile_asks_for_the_batches_that_its_mean_lacks_at_their_own_cost() -> None:
    torn = repeatability([1.1, 0.9, 2.2, 1.8], [1.0, 1.0, 2.0, 2.0], 0.02, 0)
    assert torn.known_to > KNOWN_TO
    wanted = batches_wanted([math.log(1.1), math.log(0.9)] * 2)
    assert torn.num_batches + torn.more_batches == wanted
    assert torn.more_s == pytest.approx(1.5 * torn.more_batches)
    alike = repeatability([1.0] * 6, [0.5] * 6, 0.02, 0)
    assert (alike.more_batches, alike.more_s) == (0, 0.0)
    assert alike.known_to < KNOWN_TO


def test_a_device_without_repeats_has_the_assumed_repeatability() -> None:
    second = replace(RECORD, config=RunConfig(model="second").to_dict())
    assert run_deviation([]) == (REPEATABILITY, 0)
    assert run_deviation([RECORD, second]) == (REPEATABILITY, 0)


def test_repeats_at_the_longest_length_say_how_alike_a_device_repeats() -> None:
    slower = replace(RECORD, step_s=(2.0 * math.exp(0.1), 9.0))
    deviation, number = run_deviation([RECORD, slower])
    assert number == 1
    ordinary = 1.4826 * 0.1 / math.sqrt(2)
    assert deviation == pytest.approx(math.sqrt((2 * 0.02**2 + ordinary**2) / 3))


@pytest.mark.parametrize(
    "changed",
    [
        {"environment": {"platform": "Linux", "libraries": {"torch": "2.10.0"}}},
        {"environment": {}},  # published: the machine is not named
        {"outcome": "oom"},
        {"provenance": {"busy": "others work on it"}},
        {"batch_seq_len": (256, 64)},
    ],
)
def test_another_run_is_no_repeat(changed: dict[str, Any]) -> None:
    second = replace(RECORD, step_s=(9.0, 9.0), **changed)
    assert run_deviation([RECORD, second])[1] == 0
