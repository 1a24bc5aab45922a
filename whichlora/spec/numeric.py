"""Arithmetic that works alike on plain numbers and on NumPy arrays of candidates.

A formula explains one run with integers and judges a million candidates with arrays. NumPy is
imported only once an array shows up, so that explaining one run starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

Count: TypeAlias = Any
"""An `int`, or a NumPy integer array that broadcasts against the other arguments."""

Real: TypeAlias = Any
"""A `float`, or a NumPy float array."""


WIDEST = 30.0  # log of the factor of an interval: nothing is known beyond, and no float is left
TWO_SIDED_Z = {0.90: 1.644854, 0.95: 1.959964}
"""Normal quantile that bounds a two-sided interval, by its confidence."""


_PLAIN = (int, float)  # `int | float` would be made anew in each of many calls


def is_plain(*values: Any) -> bool:
    for value in values:  # noqa: SIM110 (a generator takes three times as long)
        if not isinstance(value, _PLAIN):
            return False
    return True


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether somebody gave a number, which True is none of."""
    return isinstance(value, _PLAIN) and not isinstance(value, bool)


def num_combinations(*values: Any) -> int:
    """How many elements an array has that `values` broadcast to; 1 of plain numbers."""
    if is_plain(*values):
        return 1
    import numpy as np

    return np.broadcast(*values).size


def largest(*values: Any) -> Any:
    """Elementwise maximum."""
    if is_plain(*values):
        return max(values)
    import numpy as np

    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result


def smallest(*values: Any) -> Any:
    """Elementwise minimum."""
    if is_plain(*values):
        return min(values)
    import numpy as np

    result = values[0]
    for value in values[1:]:
        result = np.minimum(result, value)
    return result


def added(values: Iterable[Any]) -> Any:
    """The sum of numbers, one after the other; arrays of one shape first, so that few are large.

    `sum` of floats makes up for what is rounded since Python 3.12, and not before: a page in the
    browser would differ from the command line in the last digit.
    """
    sums: dict[tuple[int, ...], Any] = {}
    for value in values:
        shape = getattr(value, "shape", ())
        sums[shape] = sums[shape] + value if shape in sums else value
    return sum(sums.values())


def where(condition: Any, chosen: Any, otherwise: Any) -> Any:
    """Elementwise `chosen` where `condition` holds, else `otherwise`."""
    if is_plain(condition):
        return chosen if condition else otherwise
    import numpy as np

    return np.where(condition, chosen, otherwise)


def any_of(condition: Any) -> bool:
    """Whether `condition` holds for any candidate."""
    return bool(condition if is_plain(condition) else condition.any())


def rounded(value: Any) -> Any:
    """The nearest whole number, of two the even one; an array keeps its dtype."""
    if is_plain(value):
        return round(value)
    import numpy as np

    return np.rint(value)


def sqrt(value: Any) -> Any:
    """Elementwise square root."""
    if is_plain(value):
        return math.sqrt(value)
    import numpy as np

    return np.sqrt(value)


def exp(value: Any) -> Any:
    """Elementwise exponential."""
    if is_plain(value):
        return math.exp(value)
    import numpy as np

    return np.exp(value)


def quadratic_form(values: Sequence[Any], matrix: Sequence[Sequence[float]]) -> Any:
    """x·M·x of `values` that broadcast, for a covariance M; never negative.

    Row by row, so that a value that is zero, or equal in all candidates, costs next to nothing.
    """
    nonzero = [i for i, value in enumerate(values) if not (is_plain(value) and value == 0)]
    total: Any = 0.0
    for position, i in enumerate(nonzero):
        row: Any = matrix[i][i] * values[i]
        for j in nonzero[position + 1 :]:
            weight = matrix[i][j] + matrix[j][i]
            if weight:
                row = row + weight * values[j]
        total = total + row * values[i]
    return largest(total, 0.0)


def _is_whole(value: Any) -> bool:
    """Whether `value` is a plain number or an array of integers, whose quotients are integers."""
    return isinstance(value, _PLAIN) or value.dtype.kind in "iu"


def floor_div(numerator: Any, denominator: Any) -> Any:
    """`numerator // denominator` of whole numbers.

    Rounding a quotient of floats is exact below 2^53, and ten times as fast as NumPy's `//`.
    """
    if _is_whole(numerator) and _is_whole(denominator):
        return numerator // denominator
    import numpy as np

    return np.floor(numerator / denominator)


def ceil_div(numerator: Any, denominator: Any) -> Any:
    """`numerator / denominator` of whole numbers, rounded up."""
    if _is_whole(numerator) and _is_whole(denominator):
        return -(-numerator // denominator)
    import numpy as np

    return np.ceil(numerator / denominator)


def divides(divisor: Any, value: Any) -> Any:
    """Whether `value` is a multiple of `divisor`; both are whole."""
    if is_plain(value, divisor):
        return value % divisor == 0
    import numpy as np

    quotient = value / divisor
    return quotient == np.floor(quotient)


def round_up(value: Any, multiple: int) -> Any:
    """`value` rounded up to a multiple of `multiple`."""
    return ceil_div(value, multiple) * multiple


def last_between(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number up to `high` that `holds`, as `low` does and those below it do."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def next_power_of_2(value: Any) -> Any:
    """The least power of two that is no less than a whole number from 1 on, below 2^40."""
    if is_plain(value):
        return 1 << (int(value) - 1).bit_length()
    import numpy as np

    return np.exp2(np.ceil(np.log2(value))).astype(value.dtype)
