"""Metal's heaps against a second, naive writing of torch's rules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from whichlora.memory.metal_heaps import HeapReplay, heap_bytes, idle_in_heaps
from whichlora.predict.quantities import ledger_and_idle
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, MiB

PAGE = 16 * 1024


@dataclass
class Heap:
    total: int
    cut: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of each buffer

    def gaps(self) -> list[tuple[int, int]]:
        ends = [0, *(end for _, end in sorted(self.cut))]
        starts = [*(start for start, _ in sorted(self.cut)), self.total]
        return [(b - a, a) for a, b in zip(ends, starts, strict=True) if b > a]

    def available(self) -> int:
        return max((size for size, _ in self.gaps()), default=0)


class Naive:
    """`alloc_buffer_block` and `free_buffer` of MPSAllocator.mm, on lists that are searched."""

    def __init__(self) -> None:
        self.heaps: list[Heap] = []
        self.free: list[tuple[int, Heap, int]] = []
        self.live: dict[int, tuple[int, Heap, int]] = {}

    def fitting(self, size: int) -> Heap | None:
        heaps = [heap for heap in self.heaps if heap.available() >= size]
        return min(heaps, key=Heap.available, default=None)

    def malloc(self, tensor: int, asked: int) -> None:
        size = -(-asked // PAGE) * PAGE
        # get_free_buffer
        large_enough = sorted(
            (buffer for buffer in self.free if buffer[0] >= size),
            key=lambda buffer: (buffer[0], self.heaps.index(buffer[1]), buffer[2]),
        )
        if large_enough:
            smallest = large_enough[0]
            if smallest[0] <= size + 32 * MiB:
                self.free.remove(smallest)
                self.live[tensor] = smallest
                return
            if self.fitting(size) is None:  # release_buffer
                self.free.remove(smallest)
                smallest[1].cut.remove((smallest[2], smallest[2] + smallest[0]))
        # alloc_buffer
        heap = self.fitting(size)
        if heap is None:
            if size < 10 * MiB:
                total = 32 * MiB
            elif size < 512 * MiB:
                total = 1024 * MiB
            else:
                total = -(-size // (2 * MiB)) * 2 * MiB
            heap = Heap(total)
            self.heaps.append(heap)
        _, start = min(gap for gap in heap.gaps() if gap[0] >= size)
        heap.cut.append((start, start + size))
        self.live[tensor] = size, heap, start

    def reserved(self) -> int:
        return sum(heap.total for heap in self.heaps)


@pytest.mark.parametrize("seed", range(8))
def test_heaps_are_those_of_a_naive_simulation(seed: int) -> None:
    draw = random.Random(seed)
    replay, naive, alive = HeapReplay(), Naive(), []
    sizes = [draw.randrange(MiB + 1, draw.choice((8, 80, 700)) * MiB) for _ in range(12)]
    for tensor in range(300):
        if alive and draw.random() < 0.48:
            dying = alive.pop(draw.randrange(len(alive)))
            replay.play([([(dying, None)], 0)])
            naive.free.append(naive.live.pop(dying))
        else:
            size = draw.choice(sizes)
            alive.append(tensor)
            replay.play([([(tensor, size)], 0)])
            naive.malloc(tensor, size)
        assert replay.reserved_bytes == naive.reserved()


def test_a_buffer_is_used_again_as_a_whole_up_to_32_mib_more() -> None:
    replay = HeapReplay()
    replay.play([([(0, 100 * MiB), (0, None), (1, 68 * MiB), (2, 930 * MiB)], 0)])
    assert replay.reserved_bytes == 1954 * MiB  # 68 MiB keep the 100, and 930 find no gap
    replay = HeapReplay()
    replay.play([([(0, 600 * MiB), (0, None), (1, 20 * MiB), (2, 560 * MiB)], 0)])
    assert replay.reserved_bytes == 600 * MiB  # the large one was released to make room


@pytest.mark.parametrize(
    ("size", "heap"),
    [(MiB, 8), (MiB + 1, 32), (10 * MiB - 1, 32), (10 * MiB, 1024), (512 * MiB, 512)],
)
def test_heaps_have_the_sizes_of_torch_2_13(size: int, heap: int) -> None:
    assert heap_bytes(size) == heap * MiB


def test_a_mac_reserves_whole_heaps_and_a_card_of_cuda_does_not() -> None:
    mac, card = find_gpu("m4-max-64gb"), find_gpu("a100-sxm-80gb")
    assert idle_in_heaps(mac, peak_bytes=5 * GiB + 1, idle_bytes=0) == GiB - 1
    assert idle_in_heaps(card, peak_bytes=5 * GiB + 1, idle_bytes=7) == 7


def test_a_run_on_a_mac_is_replayed_through_heaps() -> None:
    name = "HuggingFaceTB/SmolLM2-135M"
    run = RunConfig(model=name, method="lora", seq_len=512, batch_size=2)
    job = resolve(load_model(name), run, find_gpu("m4-max-64gb"))
    ledger, idle_bytes = ledger_and_idle(job)
    assert idle_bytes is not None
    # weights, activations and logits of a small model lie in heaps of 32 MiB and of 1 GiB
    assert GiB <= ledger.peak_allocated_bytes + idle_bytes < 8 * GiB
    on_cuda = resolve(load_model(name), run, find_gpu("a100-sxm-80gb"))
    assert ledger_and_idle(on_cuda)[1] != idle_bytes
