"""A search on functions in place of a device: what it runs, in which order, and what it counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from candidate_posteriors import A100, candidate_posterior
from candidates import measurement

from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.search.acquisition import Decision, SearchProblem
from whichlora.search.loop import SearchLoop
from whichlora.spec.plan import Budget
from whichlora.spec.results import Measurement, Outcome
from whichlora.units import GiB

# two models: trained with 4 and with 8 sequences, then served
SMALL, LARGE, SERVE = 0, 1, 2
OTHER_SMALL, OTHER_LARGE, OTHER_SERVE = 3, 4, 5


def search(**limits: Any) -> SearchLoop:
    training = np.array([True, True, False] * 2)
    problem = SearchProblem(
        training=training,
        form=np.array([0, 0, 0, 1, 1, 1]),
        tier=np.array([0.0] * 3 + [1.0] * 3),
        price=np.ones(6),
        most_bytes=np.full(6, 70.0 * GiB),
        most_s=np.where(training, math.inf, 1.0),
        prefer="size",
    )
    return SearchLoop(replace(problem, **limits), candidate_posterior(), prior_calibration(A100))


class Device:
    """Measures what it is told; a run ends well within every limit otherwise."""

    def __init__(self, search_loop: SearchLoop, **outcomes: Outcome) -> None:
        self.search_loop = search_loop
        self.outcomes = {int(name[1:]): outcome for name, outcome in outcomes.items()}
        self.slow: set[int] = set()
        self.calls: list[int] = []

    def measure(self, position: int, decision: Decision | None = None) -> Measurement:
        self.calls.append(position)
        run = self.search_loop.runs[position]
        seconds = 1e4 if position in self.slow else 0.1
        outcome = self.outcomes.get(position, "ok")
        found = measurement(run, step_s=seconds, generate_s=seconds, outcome=outcome)
        return replace(found, device_s=7.0)

    def learn(self, found: Measurement) -> Calibration:
        return self.search_loop.calibration


def test_everything_is_measured_and_serving_comes_first() -> None:
    search_loop = search()
    device = Device(search_loop)
    search_loop.measure_all(device.measure, device.learn)
    assert device.calls == [SERVE, OTHER_SERVE, SMALL, LARGE, OTHER_SMALL, OTHER_LARGE]
    assert (search_loop.spent.runs, search_loop.spent.device_s) == (6, 42.0)
    search_loop.measure_all(device.measure, device.learn)
    assert len(device.calls) == 6  # nothing is measured twice


def test_a_model_that_does_not_serve_within_the_limits_is_not_trained() -> None:
    search_loop = search()
    device = Device(search_loop)
    device.slow.add(SERVE)
    search_loop.measure_all(device.measure, device.learn)
    assert device.calls == [SERVE, OTHER_SERVE, OTHER_SMALL, OTHER_LARGE]
    search_loop = search()
    device = Device(search_loop, _5="error")
    search_loop.measure_all(device.measure, device.learn)
    assert device.calls == [SERVE, OTHER_SERVE, SMALL, LARGE]


@pytest.mark.parametrize("limit", ["most_s", "most_bytes"])
def test_a_measured_value_equal_to_its_limit_serves(limit: str) -> None:
    usual = search()
    device = Device(usual)
    usual.take(SERVE, device.measure(SERVE), device.learn)
    reached = usual.quantities(SERVE)[limit == "most_bytes"].value
    for factor, serves in ((1.0, True), (0.99, False)):
        search_loop = search(**{limit: np.full(6, factor * reached)})
        search_loop.take(SERVE, device.measure(SERVE), device.learn)
        assert search_loop._serving() == ({0} if serves else set())


def test_what_asks_more_than_a_run_without_memory_is_not_tried() -> None:
    search_loop = search()
    device = Device(search_loop, _0="oom")
    search_loop.measure_all(device.measure, device.learn)
    assert LARGE not in device.calls
    assert {OTHER_SMALL, OTHER_LARGE} < set(device.calls)
    assert search_loop.out_of_memory() == [search_loop.runs[SMALL]]
    assert search_loop._impossible().tolist() == [True, True, False, False, False, False]


def test_what_was_measured_to_work_stays_possible_whatever_else_failed() -> None:
    search_loop = search()
    device = Device(search_loop, _0="oom", _3="timeout", _4="error")
    for position in (LARGE, SMALL, OTHER_SMALL, OTHER_LARGE):
        search_loop.take(position, device.measure(position), device.learn)
    assert search_loop._impossible().tolist() == [True, False, False, False, True, False]


def test_a_search_ends_with_a_winner_and_says_why() -> None:
    search_loop = search()
    device = Device(search_loop)
    decision, reason = search_loop.measure_until_certain(device.measure, device.learn, Budget())
    assert reason in ("certain", "nothing left")
    assert decision.best in (SMALL, LARGE)
    assert SERVE in device.calls
    assert search_loop.spent.runs == len(device.calls) < 6
