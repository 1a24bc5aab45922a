"""Plain numbers and arrays of candidates get the same answers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from whichlora.spec.numeric import added, ceil_div, divides, floor_div, num_combinations, round_up

BYTES = st.integers(0, 2**52)
DIVISORS = st.integers(1, 2**32)


@given(st.lists(BYTES, min_size=1, max_size=5), DIVISORS)
def test_quotients_of_float_arrays_are_those_of_integers(values: list[int], divisor: int) -> None:
    near = [value // divisor * divisor + step for value in values for step in (-1, 0, 1)]
    sizes = [value for value in (*values, *near) if value >= 0]
    array = np.array(sizes, dtype=np.float64)
    for function in (floor_div, ceil_div):
        assert function(array, divisor).tolist() == [function(size, divisor) for size in sizes]
    assert round_up(array, 512).tolist() == [-(-size // 512) * 512 for size in sizes]
    assert divides(divisor, array).tolist() == [size % divisor == 0 for size in sizes]


@given(st.lists(st.tuples(st.sampled_from([(), (3, 1), (1, 2), (3, 2)]), BYTES), max_size=6))
def test_a_sum_by_shapes_is_the_sum(terms: list[tuple[tuple[int, ...], int]]) -> None:
    values = [np.full(shape, size % 2**40, dtype=float) for shape, size in terms]
    total = sum(values)
    assert np.array_equal(added(values), total)
    assert np.shape(added(values)) == np.shape(total)


def test_sizes_that_broadcast_make_every_combination() -> None:
    assert num_combinations(3, 1) == 1
    assert num_combinations(np.ones((2, 1)), np.ones((1, 5)), 7) == 10
