"""Arithmetic that works alike on plain numbers and on NumPy arrays of candidates.

A formula explains one run with integers and judges a million candidates with arrays. NumPy is
imported only once an array shows up, so that explaining one run starts fast.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Count: TypeAlias = Any
"""An `int`, or a NumPy integer array that broadcasts against the other arguments."""

Real: TypeAlias = Any
"""A `float`, or a NumPy float array."""


WIDEST = 30.0  # log of the factor of an interval: nothing is known beyond, and no float is left
TWO_SIDED_Z = {0.90: 1.644854, 0.95: 1.959964}
"""Normal quantile that bounds a two-sided interval, by its confidence."""


def is_plain(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


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


def ceil_div(numerator: Any, denominator: Any) -> Any:
    """`numerator / denominator` rounded up, in integers."""
    return -(-numerator // denominator)


def round_up(value: Any, multiple: int) -> Any:
    """`value` rounded up to a multiple of `multiple`."""
    return ceil_div(value, multiple) * multiple
