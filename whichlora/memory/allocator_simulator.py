"""What the CUDA caching allocator makes of a list of births and deaths of tensors.

The rules are those of torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`; streams are left out, since
training and generation of one model use one. Addresses are simulated: a segment is what
`cudaMalloc` returned, a block is a piece of it, and a freed block joins its free neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from whichlora.spec.numeric import round_up
from whichlora.units import MiB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MiB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MiB
LARGE_SEGMENT_BYTES = 20 * MiB  # serves requests below 10 MiB
MIN_OWN_SEGMENT_BYTES = 10 * MiB  # from here on a request gets a segment of its own size
SEGMENT_ROUNDING_BYTES = 2 * MiB


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


class OutOfMemoryError(Exception):
    """A request does not fit into the capacity."""


class Block:
    """A contiguous piece of a segment; `start` is a global address, so no two blocks share one."""

    __slots__ = ("free", "mapped", "next", "pool", "prev", "size", "start")

    def __init__(self, start: int, size: int, pool: Pool, *, mapped: bool = True) -> None:
        self.start, self.size, self.pool = start, size, pool
        self.free, self.mapped = True, mapped
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks of one kind, smallest first, then by address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}  # by start

    def add(self, block: Block) -> None:
        insort(self.keys, (block.size, block.start))
        self.blocks[block.start] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.start))]
        del self.blocks[block.start]

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block of at least `size` bytes, taken out of the pool."""
        index = bisect_left(self.keys, (size, 0))
        if index == len(self.keys):
            return None
        return self.blocks.pop(self.keys.pop(index)[1])


def rounded(num_bytes: int) -> int:
    """Bytes of the block that serves a request.

    Kind: exact. Source: torch 2.13 `CUDACachingAllocator.cpp`, `round_size`.
    """
    blocks = -(-num_bytes // MIN_BLOCK_BYTES)  # a replay asks ten thousands of times
    return max(blocks, 1) * MIN_BLOCK_BYTES


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
    """The caching allocator with segments of fixed size, the default."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.num_retries = 0
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """A block in use.

        Raises:
            OutOfMemoryError: not even with every idle segment given back.
        """
        size = rounded(num_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.best_fit(size) or self._new_segment(size, pool)
        if block is None:
            self.num_retries += 1
            self._release_idle()
            block = self._new_segment(size, pool)
        if block is None:
            raise OutOfMemoryError
        if self._is_split(block.size - size, pool):
            pool.add(_cut(block, size))
        block.free = False
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool, joined with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                neighbour.pool.remove(neighbour)
                block = _joined(block, neighbour)
        block.pool.add(block)

    def _is_split(self, remainder: int, pool: Pool) -> bool:
        return remainder >= MIN_BLOCK_BYTES if pool.is_small else remainder > SMALL_BYTES

    def _has_room(self, num_bytes: int) -> bool:
        limit = self.capacity_bytes
        return limit is None or self.reserved_bytes + num_bytes <= limit

    def _new_segment(self, size: int, pool: Pool) -> Block | None:
        """A new segment as one block, in no pool; None where the device has no room."""
        num_bytes = segment_bytes(size)
        if not self._has_room(num_bytes):
            return None
        block = Block(self._next_address, num_bytes, pool)
        self._next_address += num_bytes
        self.reserved_bytes += num_bytes
        return block

    def _release_idle(self) -> None:
        """Give every segment back that is one free block."""
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size


class ExpandableAllocator(Allocator):
    """The caching allocator with `expandable_segments:True`.

    Each pool is one segment of endless address space; physical pages are mapped where needed and
    unmapped again only when the device is full.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        # Address space without pages, inside a segment or at its endless end.
        self._holes = [
            Block(number * _SPAN_BYTES, _SPAN_BYTES, pool, mapped=False)
            for number, pool in enumerate((self._small, self._large))
        ]

    def _is_split(self, remainder: int, pool: Pool) -> bool:
        return remainder >= MIN_BLOCK_BYTES

    def _new_segment(self, size: int, pool: Pool) -> Block | None:
        """Map pages behind a free block until it holds `size`; None where there is no room."""
        for hole in sorted(self._holes, key=lambda hole: hole.start):
            if hole.pool is not pool:
                continue
            before = hole.prev if hole.prev is not None and hole.prev.free else None
            needed = size - (before.size if before is not None else 0)
            if hole.size < needed:
                continue
            num_bytes = min(hole.size, round_up(needed, _page_bytes(pool)))
            if not self._has_room(num_bytes):
                return None
            block = self._map(hole, num_bytes)
            if before is not None:
                pool.remove(before)
                block = _joined(before, block)
            if block.next is not None and block.next.free and block.next.mapped:
                pool.remove(block.next)
                block = _joined(block, block.next)
            return block
        return None

    def _map(self, hole: Block, num_bytes: int) -> Block:
        """The first `num_bytes` of `hole` with pages, in no pool."""
        if num_bytes < hole.size:
            self._holes.append(_cut(hole, num_bytes))
        self._holes.remove(hole)
        hole.mapped = True
        self.reserved_bytes += num_bytes
        return hole

    def _release_idle(self) -> None:
        """Unmap every page that lies in a free block as a whole."""
        for pool in (self._small, self._large):
            page = _page_bytes(pool)
            for block in list(pool.blocks.values()):
                first = round_up(block.start, page)
                last = (block.start + block.size) // page * page
                if first >= last:
                    continue
                pool.remove(block)
                hole = block
                if first > block.start:
                    hole = _cut(block, first - block.start)
                    pool.add(block)
                if last < hole.start + hole.size:
                    pool.add(_cut(hole, last - hole.start))
                self.reserved_bytes -= hole.size
                self._unmap(hole)

    def _unmap(self, hole: Block) -> None:
        hole.mapped = False
        for neighbour in (hole.prev, hole.next):
            if neighbour is not None and not neighbour.mapped:
                self._holes.remove(neighbour)
                hole = _joined(hole, neighbour)
        self._holes.append(hole)


_SPAN_BYTES = LARGE_SEGMENT_BYTES << 32  # address space of one pool, a multiple of its pages


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES


def _cut(block: Block, size: int) -> Block:
    """Shorten `block` to `size`; the new block behind it, in no pool."""
    remainder = Block(block.start + size, block.size - size, block.pool, mapped=block.mapped)
    remainder.prev, remainder.next = block, block.next
    if remainder.next is not None:
        remainder.next.prev = remainder
    block.next = remainder
    block.size = size
    return remainder


def _joined(block: Block, neighbour: Block) -> Block:
    """Two neighbours as one block; neither may be in a pool."""
    first, second = (block, neighbour) if block.start < neighbour.start else (neighbour, block)
    first.size += second.size
    first.next = second.next
    if first.next is not None:
        first.next.prev = first
    return first


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
    kind = ExpandableAllocator if expandable_segments else Allocator
    allocator = kind(capacity_bytes)
    live: dict[int, Block] = {}
    peak = at_peak = reserved = peak_event = num_done = 0
    ran_out = False
    for index, (storage, num_bytes) in enumerate(events):
        if num_bytes is None:
            allocator.free(live.pop(storage))
        elif num_bytes > 0:  # an empty tensor takes nothing
            try:
                live[storage] = allocator.allocate(num_bytes)
            except OutOfMemoryError:
                ran_out = True
                break
            if allocator.allocated_bytes > peak:
                peak, peak_event = allocator.allocated_bytes, index
                at_peak = allocator.reserved_bytes
            reserved = max(reserved, allocator.reserved_bytes)
        num_done = index + 1
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
