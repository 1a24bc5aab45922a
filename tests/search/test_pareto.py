"""The Pareto front against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whichlora.search.pareto import pareto


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30),
)
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    time_s, memory = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    front = {points[i] for i in pareto(time_s, memory).tolist()}

    def beaten(point: tuple[int, int]) -> bool:
        return any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)

    assert front == {point for point in points if not beaten(point)}
