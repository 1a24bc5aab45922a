"""The Pareto front: candidates that no other beats in both time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def pareto(time_s: NDArray[np.float64], memory_bytes: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions that no other beats in both, fastest first; of equals the first stays."""
    import numpy as np

    order = np.lexsort((memory_bytes, time_s))
    least = np.minimum.accumulate(memory_bytes[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = memory_bytes[order][1:] < least[:-1]
    return np.asarray(order[first])
