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
    """What the allocator's counters say after a list of events.

    Args:
        peak_allocated_bytes: blocks in use, each rounded up to 512 bytes.
        peak_reserved_bytes: segments, in use or idle.
        reserved_at_peak_bytes: segments at the moment of the allocated peak.
        ran_out: a request failed within the capacity although every idle segment was given back.
        num_retries: how often idle segments had to be given back first.
        num_done: events done; all of them unless it ran out.
        peak_event: index of the event at which `peak_allocated_bytes` was first reached.
        allocated_bytes, reserved_bytes: at the end.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_at_peak_bytes: int
    ran_out: bool
    num_retries: int
    num_done: int
    peak_event: int
    allocated_bytes: int
    reserved_bytes: int


Block: TypeAlias = tuple[int, int]
"""A piece of memory in use: where it starts, and its bytes."""


Requests: TypeAlias = list[tuple[int, int | None]]
"""Tensors by number, with the bytes of the block at a birth and None at a death."""


class OutOfMemoryError(Exception):
    """A request does not fit into the capacity."""


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

    def take(self, start: int) -> int:
        """Take out the range at `start`; its size."""
        size = self.size_at.pop(start)
        del self._start_before[start + size]
        keys = self._keys
        del keys[bisect_left(keys, size << _ADDRESS_BITS | start)]
        return size

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
    """The caching allocator with segments of fixed size, the default.

    Args:
        capacity_bytes: what it may reserve; None for no limit.
    """

    _most_kept = SMALL_BYTES  # of a large block; a small one is always split

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.num_retries = 0
        self._small, self.large = Pool(), Pool(most_kept=self._most_kept)
        self._segments: dict[int, int] = {}  # sizes, by start
        self._next_start = 0

    def allocate(self, num_bytes: int) -> Block:
        """A block in use.

        Raises:
            OutOfMemoryError: not even with every idle segment given back.
        """
        size = rounded(num_bytes)
        pool = self._small if size <= SMALL_BYTES else self.large
        block = pool.serve(size)
        if block is None:
            if not self.grow(pool, size):
                self.num_retries += 1
                self._release_idle()
                if not self.grow(pool, size):
                    raise OutOfMemoryError
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

    def _has_room(self, num_bytes: int) -> bool:
        limit = self.capacity_bytes
        return limit is None or self.reserved_bytes + num_bytes <= limit

    def grow(self, pool: Pool, size: int) -> bool:
        """Whether `pool` could be given a new segment for a block of `size`."""
        num_bytes = segment_bytes(size)
        if not self._has_room(num_bytes):
            return False
        pool.add(self._next_start, num_bytes)
        self._segments[self._next_start] = num_bytes
        self._next_start += num_bytes + MIN_BLOCK_BYTES  # a gap, so that segments are never joined
        self.reserved_bytes += num_bytes
        return True

    def _release_idle(self) -> None:
        """Give every segment back that is one free block."""
        for pool in (self._small, self.large):
            for start, size in list(pool.size_at.items()):
                if self._segments.get(start) == size:
                    pool.take(start)
                    del self._segments[start]
                    self.reserved_bytes -= size


class ExpandableAllocator(Allocator):
    """The caching allocator with `expandable_segments:True`.

    Each pool is one segment of endless address space; physical pages are mapped where needed and
    unmapped again only when the device is full.
    """

    _most_kept = 0

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        # Address space without pages, inside a segment or at its endless end.
        self._holes = {self._small: Pool(), self.large: Pool()}
        for number, holes in enumerate(self._holes.values()):
            holes.add(number * _SPAN_BYTES, _SPAN_BYTES)

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool is self._small else LARGE_SEGMENT_BYTES

    def grow(self, pool: Pool, size: int) -> bool:
        """Whether pages could be mapped behind a free block until it holds `size`."""
        holes = self._holes[pool]
        for start, hole_bytes in sorted(holes.size_at.items()):
            missing = size - pool.size_before(start)
            if hole_bytes < missing:
                continue
            num_bytes = min(hole_bytes, round_up(missing, self._page_bytes(pool)))
            if not self._has_room(num_bytes):
                return False
            holes.take(start)
            if num_bytes < hole_bytes:
                holes.add(start + num_bytes, hole_bytes - num_bytes)
            pool.add(start, num_bytes)
            self.reserved_bytes += num_bytes
            return True
        return False

    def _release_idle(self) -> None:
        """Unmap every page that lies in a free block as a whole."""
        for pool, holes in self._holes.items():
            page = self._page_bytes(pool)
            for start, size in list(pool.size_at.items()):
                first, last = round_up(start, page), (start + size) // page * page
                if first >= last:
                    continue
                pool.take(start)
                if start < first:
                    pool.add(start, first - start)
                if last < start + size:
                    pool.add(last, start + size - last)
                holes.add(first, last - first)
                self.reserved_bytes -= last - first


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
        """Segments, in use or idle: without a limit none is ever given back."""
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
    events: Iterable[Event | tuple[int, int | None]],
    *,
    expandable_segments: bool = False,
    capacity_bytes: int | None = None,
) -> Replay:
    """Do `events` in order, until they end or the device is full.

    Args:
        capacity_bytes: what the allocator may reserve; None for no limit.
    """
    allocator = (ExpandableAllocator if expandable_segments else Allocator)(capacity_bytes)
    live: dict[int, Block] = {}
    peak = at_peak = reserved = peak_event = num_done = 0
    ran_out = False
    for num_done, (storage, num_bytes) in enumerate(events, start=1):
        if num_bytes is None:
            allocator.free(live.pop(storage))
        elif num_bytes > 0:  # an empty tensor takes nothing
            try:
                live[storage] = allocator.allocate(num_bytes)
            except OutOfMemoryError:
                ran_out, num_done = True, num_done - 1
                break
            if allocator.allocated_bytes > peak:
                peak, peak_event = allocator.allocated_bytes, num_done - 1
                at_peak = allocator.reserved_bytes
            if allocator.reserved_bytes > reserved:
                reserved = allocator.reserved_bytes
    return Replay(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        reserved_at_peak_bytes=at_peak,
        ran_out=ran_out,
        num_retries=allocator.num_retries,
        num_done=num_done,
        peak_event=peak_event,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
    )
