"""The time-memory plane in characters."""

from __future__ import annotations

import pytest
from candidates import measurement, prediction

from whichlora.search.feasibility import Candidate, Quantity, judge
from whichlora.spec.plan import Limits
from whichlora.spec.results import Outcome
from whichlora.spec.run import RunConfig
from whichlora.terminal.plane import HEIGHT, MAX_WIDTH, plane
from whichlora.units import GiB


def candidate(
    model: str, *, size: int, used: float, total_s: float, outcome: Outcome | None = None
) -> Candidate:
    run = RunConfig(model=model, batch_size=4, seq_len=100)
    total = Quantity(value=total_s, low=total_s / 2, high=total_s * 2, measured=False)
    return judge(
        prediction(run, num_params=size, used_bytes=used),
        Limits(),
        total_s=total,
        measurement=measurement(run, used_bytes=used, outcome=outcome) if outcome else None,
    )


LARGE = candidate("org/large", size=9, used=16 * GiB, total_s=4000.0)
SMALL = candidate("org/small", size=1, used=2 * GiB, total_s=100.0, outcome="ok")
LOST = candidate("org/lost", size=5, used=12 * GiB, total_s=900.0, outcome="oom")


def drawn(*candidates: Candidate, winner: Candidate | None = None, width: int = 100) -> list[str]:
    return plane(candidates, winner, time_limit_s=1000.0, byte_limits=[8 * GiB], width=width)


def inside(lines: list[str]) -> list[str]:
    """The frame's content, the largest memory first."""
    return [line.partition("│")[2] for line in lines if "│" in line]


def test_more_memory_is_higher_and_more_time_is_further_right() -> None:
    rows = inside(drawn(LARGE, SMALL))
    high = next(i for i, row in enumerate(rows) if "a" in row)
    low = next(i for i, row in enumerate(rows) if "B" in row)
    assert high < low
    assert rows[high].index("a") > rows[low].index("B")


def test_a_capital_was_measured_and_a_cross_ran_out_of_memory() -> None:
    content = "".join(inside(drawn(LARGE, SMALL, LOST)))
    assert {mark for mark in content if mark not in " ┄┊"} == {"a", "C", "×"}


def test_the_winner_is_shown_even_where_others_share_its_place() -> None:
    twin = candidate("org/twin", size=9, used=2 * GiB, total_s=100.0)
    content = "".join(inside(drawn(twin, SMALL, LARGE, winner=SMALL)))
    assert content.count("★") == 1
    assert "b" in content  # the other large one, elsewhere


def test_the_memory_of_the_device_is_no_limit_that_anybody_set() -> None:
    lines = plane(
        [LARGE], None, time_limit_s=None, byte_limits=[9 * GiB, 8 * GiB], width=100,
        device_bytes=9 * GiB,
    )  # fmt: skip
    assert "┄ device 9.00 GiB, ┄ limit 8.00 GiB" in lines[-1]


def test_limits_are_lines_with_their_values_and_far_ones_are_left_out() -> None:
    lines = drawn(LARGE, SMALL)
    assert any(line.startswith("  8.00 GiB │┄┄┄") for line in lines)
    assert all("┊" in row or "┄" in row for row in inside(lines))
    assert "┄ limit 8.00 GiB, ┊ limit 16 min 40 s" in lines[-1]
    far = plane([LARGE], None, time_limit_s=1e9, byte_limits=[1e15], width=100)
    assert not any("limit" in line or "┊" in line for line in far)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_plot_keeps_to_its_width_and_height(width: int) -> None:
    many = [
        candidate(f"org/model-{i}", size=i, used=i * GiB, total_s=10.0 * i) for i in range(1, 40)
    ]
    lines = drawn(*many, width=width)
    assert len(inside(lines)) == HEIGHT
    assert max(len(line) for line in lines) <= min(width, MAX_WIDTH + 14)


def test_one_candidate_alone_is_a_plot_too() -> None:
    assert "A" in "".join(inside(plane([SMALL], None, time_limit_s=None, byte_limits=[], width=80)))


def test_without_candidates_there_is_no_plot() -> None:
    assert plane([], None, time_limit_s=1.0, byte_limits=[1.0], width=80) == []
