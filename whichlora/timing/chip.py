"""What the counts of work ask of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """Facts of its datasheet; None where they are not known or say nothing.

    Args:
        num_multiprocessors: that products fill tile by tile, as of `timing.model.chip_of`.
        l2_bytes: of the second-level cache, or of a larger one behind it.
        l2_saves: of the time that a byte of memory takes, the share that it saves where that cache
            has it.
        unpacking: how long the instructions take that unpack a byte of quantised weights, where
            moving it takes 1.
    """

    num_multiprocessors: int | None = None
    l2_bytes: int | None = None
    l2_saves: float = 0.0
    unpacking: float = 1.0


UNKNOWN_CHIP = Chip()
