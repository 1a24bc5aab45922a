"""What torch's Metal allocator takes from the driver for a list of births and deaths of tensors.

The rules are those of torch 2.13, `aten/src/ATen/mps/MPSAllocator.h` and `MPSAllocator.mm`, below
the low watermark, 1.4 times the recommended working set. Buffers are cut from heaps and are never
split or joined: a free one is used again as a whole, or its place in the heap is given back.
Two things are the driver's and not public: the place of a buffer in its heap is taken as the
smallest gap that holds it, and a freed buffer as no longer read by the GPU.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from whichlora.memory.allocator_simulator import Pool, Requests
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count, round_up
from whichlora.units import MiB

SMALL_HEAP_BYTES = 8 * MiB  # requests up to 1 MiB
LARGE_HEAP_BYTES = 32 * MiB  # below 10 MiB; by so much a buffer may exceed a request, too
EXTRA_LARGE_HEAP_BYTES = 1024 * MiB  # below 512 MiB
OWN_HEAP_ROUNDING_BYTES = 2 * MiB
PAGE_BYTES = 16 * 1024  # a buffer is a whole number of them on Apple's processors
_MIN_EXTRA_LARGE_BYTES = 10 * MiB


def heap_bytes(size: int) -> int:
    """Bytes asked of the driver for a buffer of `size` that no heap has room for.

    Kind: exact. Source: torch 2.13 `MPSAllocator.h`, `createHeapBlock`.
    """
    if size <= MiB:
        return SMALL_HEAP_BYTES
    if size < _MIN_EXTRA_LARGE_BYTES:
        return LARGE_HEAP_BYTES
    if size < EXTRA_LARGE_HEAP_BYTES // 2:
        return EXTRA_LARGE_HEAP_BYTES
    num_bytes: int = round_up(size, OWN_HEAP_ROUNDING_BYTES)
    return num_bytes


def idle_in_heaps(gpu: GpuSpec, *, peak_bytes: Count, idle_bytes: Count) -> Count:
    """`idle_bytes`, in whole heaps where `gpu` has them: most buffers are of 10 to 512 MiB.

    Kind: estimate, of runs whose requests are not replayed. Source: `heap_bytes`.
    """
    if gpu.backend.allocator != "heaps":
        return idle_bytes
    return round_up(peak_bytes + idle_bytes, EXTRA_LARGE_HEAP_BYTES) - peak_bytes


class HeapReplay:
    """Large requests through Metal's large pool; small ones have heaps of their own.

    Attributes:
        peak_allocated_bytes: what was asked for; what a buffer has more is as if idle.
        reserved_bytes: heaps. None is given back below the low watermark.
    """

    def __init__(self) -> None:
        self.peak_allocated_bytes = self.reserved_bytes = 0
        self._allocated_bytes = 0
        self._heaps: list[Pool] = []  # free ranges of each
        self._free: list[tuple[int, int, int]] = []  # buffers: size, heap, start; sorted
        self._live: dict[int, tuple[int, tuple[int, int, int]]] = {}

    def play(self, chunks: Iterable[tuple[Requests, int]]) -> None:
        """Do the requests of `chunks`, each with the number of its first tensor."""
        for requests, first in chunks:
            for tensor, num_bytes in requests:
                if num_bytes is None:
                    asked_bytes, buffer = self._live.pop(first + tensor)
                    self._allocated_bytes -= asked_bytes
                    insort(self._free, buffer)
                    continue
                self._live[first + tensor] = (
                    num_bytes,
                    self._buffer(round_up(num_bytes, PAGE_BYTES)),
                )
                self._allocated_bytes += num_bytes
                self.peak_allocated_bytes = max(self.peak_allocated_bytes, self._allocated_bytes)

    def _buffer(self, size: int) -> tuple[int, int, int]:
        """`get_free_buffer`, then `alloc_buffer`."""
        index = bisect_left(self._free, (size,))
        if index < len(self._free):
            found_size, heap, start = self._free[index]
            if found_size <= size + LARGE_HEAP_BYTES:
                return self._free.pop(index)
            if self._tightest(size) is None:  # make room where the large buffer lies
                del self._free[index]
                self._heaps[heap].add(start, found_size)
        heap_number = self._tightest(size)
        if heap_number is None:
            heap_number = self._new_heap(size)
        block = self._heaps[heap_number].serve(size)
        assert block is not None
        return size, heap_number, block[0]

    def _tightest(self, size: int) -> int | None:
        """The heap with the least room that holds `size`: its largest gap is its room."""
        rooms = ((heap.largest, number) for number, heap in enumerate(self._heaps))
        fitting = [(room, number) for room, number in rooms if room >= size]
        return min(fitting)[1] if fitting else None

    def _new_heap(self, size: int) -> int:
        heap, num_bytes = Pool(), heap_bytes(size)
        heap.add(0, num_bytes)
        self._heaps.append(heap)
        self.reserved_bytes += num_bytes
        return len(self._heaps) - 1
