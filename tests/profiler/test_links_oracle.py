"""Two gloo processes measure their links for real."""

from __future__ import annotations

import math

import pytest

from whichlora.errors import MeasurementError
from whichlora.profiler.links import COLLECTIVES, SIZES_ON_CPU, measure_links

pytestmark = [pytest.mark.oracle, pytest.mark.slow]


def test_gloo_ranks_measure_their_collectives_and_their_host() -> None:
    told = measure_links("cpu", 2)
    assert told["sizes_bytes"] == list(SIZES_ON_CPU)
    assert set(told["microseconds"]) == set(COLLECTIVES)
    for by_count in told["microseconds"].values():
        times = by_count["2"]
        assert len(times) == len(SIZES_ON_CPU)
        assert all(0 < time < math.inf for time in times)  # how long depends on who else is busy
    assert 0 < told["host_thread_bytes_per_s"] < math.inf
    assert 0 < told["host_update_bytes_per_s"] < math.inf
    assert told["environment"]["libraries"]["torch"]


def test_ranks_that_fail_are_one_line() -> None:
    with pytest.raises(MeasurementError, match="links: 1 ranks failed: "):
        measure_links("cuda", 1)  # this machine has none
