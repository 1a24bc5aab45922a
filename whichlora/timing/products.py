"""What a device could do while a matrix product leaves part of it without a tile."""

from __future__ import annotations

from whichlora.spec.numeric import Count, Real, ceil_div, smallest

TILE = 128  # rows and columns of the output that one multiprocessor computes at a time
# Of the time that multiprocessors without a tile stand still in the last wave, the share that is
# lost; libraries choose smaller tiles or split the inner dimension for the rest. Kind: fitted, to
# 16-bit products of A100, A40 and H100 (`benchmarks/product_tiles.py`).
LAST_WAVE_LOST = 0.14


def idle_flops(
    rows: Count,
    columns: Count,
    inner: Count,
    num_multiprocessors: int | None,
    *,
    count: Count = 1,
) -> Real:
    """FLOPs that a device could do while it computes `count` products without being full.

    An output of [rows, columns] is cut into tiles, and the multiprocessors compute one wave of them
    after the other. A tile at an edge takes as long as a full one. Fewer rows than a tile has take
    tiles of their height.

    Args:
        num_multiprocessors: each computes a tile at a time; None where not known.

    Kind: fitted (`LAST_WAVE_LOST`); zero where the number of multiprocessors is not known.
    Source: NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization;
    `docs/time.md`.
    """
    if num_multiprocessors is None:
        return 0.0 * rows
    height, width = smallest(TILE, rows), smallest(TILE, columns)
    tiles = count * ceil_div(rows, height) * ceil_div(columns, width)
    missing = -tiles % num_multiprocessors  # in the last wave
    computed = (tiles + LAST_WAVE_LOST * missing) * height * width
    return 2 * inner * (computed - count * rows * columns)
