"""What the CUDA caching allocator makes of a list of births and deaths of tensors.

The rules are those of torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`; streams are left out, since
training and generation of one model use one. Addresses are simulated: a segment is what
`cudaMalloc` returned, a block is a piece of it, and a freed block joins its free neighbours.
A replay has ten thousands of events: blocks are addresses and sizes in dictionaries, not objects.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from whichlora.spec.numeric import round_up
from whichlora.units import MiB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MiB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MiB
LARGE_SEGMENT_BYTES = 20 * MiB  # serves requests below 10 MiB
MIN_OWN_SEGMENT_BYTES = 10 * MiB  # from here on a request gets a segment of its own size
SEGMENT_ROUNDING_BYTES = 2 * MiB
_SPAN_BYTES = LARGE_SEGMENT_BYTES << 32  # address space of an expandable pool: whole pages
_ADDRESS_BITS = 64
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Event(NamedTuple):
    """A storage is born with `num_bytes`, or dies (`num_bytes` is None)."""

    storage: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The allocator's counters after a list of events, on a device that never fills up.

    Args:
        peak_allocated_bytes: blocks in use, each rounded up to 512 bytes.
        peak_reserved_bytes: segments, in use or idle.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int


Block: TypeAlias = tuple[int, int]
"""A piece of memory in use: where it starts, and its bytes."""


Requests: TypeAlias = list[tuple[int, int | None]]
"""Tensors by number, with the bytes of the block at a birth and None at a death."""


class Pool:
    """Free blocks of one kind: ranges of addresses, neighbours joined.

    Args:
        most_kept: a request keeps the rest of its block where that has no more bytes.
    """

    def __init__(self, *, most_kept: int = 0) -> None:
        self.most_kept = most_kept
        self.size_at: dict[int, int] = {}  # by start
        self._start_before: dict[int, int] = {}  # by end
        self._keys: list[int] = []  # sorted; size and start in one number

    def add(self, start: int, size: int) -> None:
        """Add a range, joined with its neighbours."""
        size_at, keys, end = self.size_at, self._keys, start + size
        if end in size_at:
            behind = size_at.pop(end)
            del keys[bisect_left(keys, behind << _ADDRESS_BITS | end)]
            end += behind
        if start in self._start_before:
            start = self._start_before.pop(start)
            del keys[bisect_left(keys, size_at[start] << _ADDRESS_BITS | start)]
        size = end - start
        insort(keys, size << _ADDRESS_BITS | start)
        size_at[start] = size
        self._start_before[end] = start

    @property
    def largest(self) -> int:
        """Bytes of the largest range; 0 where there is none."""
        return self._keys[-1] >> _ADDRESS_BITS if self._keys else 0

    def size_before(self, end: int) -> int:
        """Bytes of the range that ends at `end`; 0 where there is none."""
        start = self._start_before.get(end)
        return 0 if start is None else self.size_at[start]

    def serve(self, size: int) -> Block | None:
        """Take a block out of the smallest range, then the first, that has `size` bytes."""
        keys, size_at = self._keys, self.size_at
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        start = keys.pop(index) & _ADDRESS
        block = size_at.pop(start)
        remainder = block - size
        if remainder <= self.most_kept:
            del self._start_before[start + block]
            return start, block
        end = start + size
        insort(keys, remainder << _ADDRESS_BITS | end)
        size_at[end] = remainder
        self._start_before[start + block] = end
        return start, size


def rounded(num_bytes: int) -> int:
    """Bytes of the block that serves a request.

    Kind: exact. Source: torch 2.13 `CUDACachingAllocator.cpp`, `round_size`.
    """
    if num_bytes <= MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(size: int) -> int:
    """Bytes asked of `cudaMalloc` for a block of `size` that no idle block can serve.

    Kind: exact. Source: torch 2.13 `CUDACachingAllocator.cpp`, `get_allocation_size`.
    """
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    num_bytes: int = round_up(size, SEGMENT_ROUNDING_BYTES)
    return num_bytes


class Allocator:
    """The caching allocator with segments of fixed size, the default, on unlimited memory.

    So no segment is ever given back: torch does that when `cudaMalloc` fails.
    """

    _most_kept = SMALL_BYTES  # of a large block; a small one is always split

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._small, self.large = Pool(), Pool(most_kept=self._most_kept)
        self._next_start = 0

    def allocate(self, num_bytes: int) -> Block:
        """A block in use."""
        size = rounded(num_bytes)
        pool = self._small if size <= SMALL_BYTES else self.large
        block = pool.serve(size)
        if block is None:
            self.grow(pool, size)
            block = pool.serve(size)
            assert block is not None
        self.allocated_bytes += block[1]
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool."""
        start, size = block
        self.allocated_bytes -= size
        pool = self._small if size <= SMALL_BYTES else self.large
        pool.add(start, size)

    def grow(self, pool: Pool, size: int) -> None:
        """Give `pool` a new segment for a block of `size`."""
        num_bytes = segment_bytes(size)
        pool.add(self._next_start, num_bytes)
        self._next_start += num_bytes + MIN_BLOCK_BYTES  # a gap, so that segments are never joined
        self.reserved_bytes += num_bytes


class ExpandableAllocator(Allocator):
    """The caching allocator with `expandable_segments:True`.

    Each pool is one segment of endless address space; physical pages are mapped at its end.
    """

    _most_kept = 0

    def __init__(self) -> None:
        super().__init__()
        self._end = {self._small: 0, self.large: _SPAN_BYTES}

    def grow(self, pool: Pool, size: int) -> None:
        """Map pages behind the last block, if it is free, until `size` bytes are."""
        end = self._end[pool]
        page = SMALL_SEGMENT_BYTES if pool is self._small else LARGE_SEGMENT_BYTES
        num_bytes = round_up(size - pool.size_before(end), page)
        pool.add(end, num_bytes)
        self._end[pool] = end + num_bytes
        self.reserved_bytes += num_bytes


class LargeReplay:
    """Large requests, rounded up to blocks, through the large pool without a limit of memory.

    They are most of a run, so this leaves out what `replay` does for every other list of events.

    Attributes:
        peak_allocated_bytes: as of `Replay`, of large requests alone.
    """

    def __init__(self, *, expandable_segments: bool) -> None:
        self._allocator = (ExpandableAllocator if expandable_segments else Allocator)()
        self._live: dict[int, Block] = {}
        self._allocated_bytes = self.peak_allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Segments, in use or idle."""
        return self._allocator.reserved_bytes

    def play(self, chunks: Iterable[tuple[Requests, int]]) -> None:
        """Do the requests of `chunks`, each with the number of its first tensor."""
        allocator, live = self._allocator, self._live
        pool = allocator.large
        serve, add = pool.serve, pool.add
        allocated, peak = self._allocated_bytes, self.peak_allocated_bytes
        for requests, first in chunks:
            for tensor, num_bytes in requests:
                if num_bytes is None:
                    start, size = live.pop(first + tensor)
                    allocated -= size
                    add(start, size)
                    continue
                block = serve(num_bytes)
                if block is None:
                    allocator.grow(pool, num_bytes)
                    block = serve(num_bytes)
                    assert block is not None
                live[first + tensor] = block
                allocated += block[1]
                if allocated > peak:
                    peak = allocated
        self._allocated_bytes, self.peak_allocated_bytes = allocated, peak


def replay(
    events: Iterable[Event | tuple[int, int | None]], *, expandable_segments: bool = False
) -> Replay:
    """Do `events` in order."""
    allocator = (ExpandableAllocator if expandable_segments else Allocator)()
    live: dict[int, Block] = {}
    peak = 0
    for storage, num_bytes in events:
        if num_bytes is None:
            allocator.free(live.pop(storage))
        elif num_bytes > 0:  # an empty tensor takes nothing
            live[storage] = allocator.allocate(num_bytes)
            peak = max(peak, allocator.allocated_bytes)
    return Replay(peak_allocated_bytes=peak, peak_reserved_bytes=allocator.reserved_bytes)
