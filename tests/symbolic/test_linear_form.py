from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.symbolic import linear_form
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    maximal,
    most,
    packed,
    per_rank,
    per_sequence,
    per_token,
    plus,
    scaled,
    unpacked,
)


def test_sums_and_multiples_of_packed_forms_are_those_of_the_forms() -> None:
    large = LinearForm(*(10**27 + place for place in range(13)), chunk_size=64)
    terms = (large, per_sequence(-3), constant(-(10**27)), per_token(1))
    form, number = NOTHING, 0
    for term in terms:
        form, number = plus(form, scaled(term, 4)), number + 4 * packed(term)
        assert unpacked(number, 64, 0) == form
    assert form.constant < form.per_sequence


def test_only_points_that_can_be_the_largest_are_kept() -> None:
    low, high, other = per_token(1), per_token(2), constant(5)
    assert set(maximal([low, high, other, high])) == {high, other}
    assert most([low, other], tokens=3, span=1, r=1) == 5


# the four terms in which the forms of a loop differ; chunks of one layer are all of one size
FORMS = st.tuples(*(st.integers(0, largest) for largest in (9, 9, 1, 9))).map(
    lambda terms: LinearForm(
        per_token=terms[0], constant=terms[1], per_rank_token=terms[2], per_rank=terms[3]
    )
)


@given(
    forms=st.lists(FORMS, min_size=1),
    span=st.integers(1, 50),
    batch_size=st.integers(1, 4),
    r=st.integers(1, 9),
)
def test_forms_left_out_are_the_largest_of_no_sizes(
    forms: list[LinearForm], span: int, batch_size: int, r: int
) -> None:
    sizes = {"tokens": batch_size * span, "span": span, "r": r}
    assert most(maximal(forms), **sizes) == most(forms, **sizes)


EVERY_TERM = st.builds(
    LinearForm,
    per_token=st.integers(-9, 9),
    per_pair=st.integers(0, 2),
    constant=st.integers(0, 9999),
    per_rank_token=st.integers(0, 3),
    per_rank=st.integers(-99, 999),
    per_span_squared=st.integers(0, 2),
    where_many_rows=st.integers(0, 9999),
    per_chunk=st.just(0),
    per_sequence=st.just(0),
    per_rank_sequence=st.just(0),
    per_group=st.just(0),
    per_chunk_group=st.just(0),
    per_span=st.just(0),
    chunk_size=st.just(0),
    fused_rows=st.just(32),
    group_size=st.just(0),
)


AXIS = st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True)


@given(forms=st.lists(EVERY_TERM, min_size=3, max_size=9), spans=AXIS, batch_sizes=AXIS, ranks=AXIS)
def test_of_many_sizes_at_once_the_largest_forms_are_those_of_each(
    forms: list[LinearForm], spans: list[int], batch_sizes: list[int], ranks: list[int]
) -> None:
    batch_size, span, r = np.ix_(batch_sizes, spans, ranks)
    with patch.object(linear_form, "COMPARED_FROM", 0):
        together = most(forms, tokens=batch_size * span, span=span, r=r)
    alone = [
        most(forms, tokens=sequences * length, span=length, r=rank)
        for sequences in batch_sizes
        for length in spans
        for rank in ranks
    ]
    shape = len(batch_sizes), len(spans), len(ranks)
    assert np.broadcast_to(together, shape).ravel().tolist() == alone


@pytest.mark.parametrize("gradient", [per_rank, constant])
def test_of_forms_on_a_line_its_ends_are_kept(gradient: Callable[[int], LinearForm]) -> None:
    line = [plus(per_token(3 * step), gradient(7 * (100 - step))) for step in range(101)]
    assert set(maximal(line)) == {line[0], line[-1]}
    bulge = plus(per_token(3 * 50), gradient(7 * 50 + 1))
    assert set(maximal([*line, bulge])) == {line[0], bulge, line[-1]}
