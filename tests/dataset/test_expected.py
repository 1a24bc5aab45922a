"""Mean numbers of batches by width, beside those that the shuffles of a workload draw."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.dataset import TokenLengths, workload
from whichlora.dataset.expected import WIDTH_BINS, binned, expected_widths


def test_a_row_a_batch_has_its_own_width() -> None:
    assert expected_widths({5: 3, 9: 1}, batch_size=1) == {5: 3.0, 9: 1.0}


def test_of_two_rows_a_batch_the_longer_counts() -> None:
    # of 5, 5, 5, 9 in two batches, 9 is in one of them
    assert expected_widths({5: 3, 9: 1}, batch_size=2) == pytest.approx({5: 1.0, 9: 1.0})
    assert expected_widths({5: 3, 9: 1}, batch_size=1, at_once=2) == pytest.approx({5: 1.0, 9: 1.0})


def test_the_rest_is_a_share_of_a_batch_and_a_lone_batch_is_whole() -> None:
    assert expected_widths({5: 6}, batch_size=4) == pytest.approx({5: 1.5})
    assert expected_widths({5: 3}, batch_size=4) == pytest.approx({5: 1.0})


@pytest.mark.parametrize(("batch_size", "at_once"), [(1, 1), (4, 1), (2, 4), (32, 1)])
def test_the_mean_is_that_of_many_shuffles(batch_size: int, at_once: int) -> None:
    rows = np.random.default_rng(3).lognormal(5, 0.8, size=512).astype(int) + 1
    mean = expected_widths(Counter(rows.tolist()), batch_size=batch_size, at_once=at_once)
    drawn = np.zeros(60)
    for seed in range(len(drawn)):
        order = np.random.default_rng(seed).permutation(rows)
        drawn[seed] = order.reshape(-1, batch_size * at_once).max(axis=1).sum()
    tokens = sum(width * number for width, number in mean.items())
    error = drawn.std() / np.sqrt(len(drawn))
    assert tokens == pytest.approx(drawn.mean(), abs=4 * error + 1e-6)
    lengths = TokenLengths(lengths={"train": tuple(rows.tolist())}, max_length=4096, method="")
    load = workload(lengths, batch_size=batch_size, at_once=at_once, epochs=4)
    assert sum(mean.values()) == pytest.approx(sum(load.widths.values()) / 4)


@given(widths=st.dictionaries(st.integers(1, 5000), st.floats(0.01, 1e4), min_size=1, max_size=200))
def test_bins_keep_the_number_of_batches_and_nearly_their_tokens(widths: dict[int, float]) -> None:
    few = binned(widths)
    assert len(few) <= WIDTH_BINS + 1
    number = sum(widths.values())
    assert sum(few.values()) == pytest.approx(number)
    tokens = sum(width * each for width, each in widths.items())
    assert sum(width * each for width, each in few.items()) == pytest.approx(
        tokens, abs=0.51 * number
    )
