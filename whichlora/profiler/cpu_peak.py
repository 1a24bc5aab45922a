"""Peak of live tensor bytes on a CPU, which has no allocator statistics of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def live_tensor_bytes() -> int:
    """Bytes of all CPU storages that Python tensors hold, each once; fake tensors hold none."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        # `type` rather than isinstance: some objects answer `__class__` with an import.
        kind = type(candidate)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, FakeTensor):
            continue
        if is_traceable_wrapper_subclass(candidate):
            continue  # such as a DTensor: the tensors within it hold the bytes
        if candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class CpuPeak:
    """Peak between `start` and `stop`: what is alive at the start, and what is allocated since.

    Blocks from before the start count as alive to the end, which is right for weights, optimizer
    state and inputs. Gradients must be None at the start.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._alive_bytes = 0

    def start(self) -> None:
        gc.collect()
        self._alive_bytes = live_tensor_bytes()
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profiler.start()

    def stop(self) -> int:
        self._profiler.stop()
        tree = self._profiler.profiler.kineto_results.experimental_event_tree()
        self._profiler = None
        return self._alive_bytes + peak_of(sorted(_allocations(tree)))


def _allocations(roots: Iterable[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Time, order of appearance, address and signed size of each allocation and release."""
    pending = list(roots)
    order = 0
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield event.start_time_ns, order, fields.ptr, fields.alloc_size
                order += 1


def peak_of(events: Iterable[tuple[int, int, int, int]]) -> int:
    """Highest running sum; the release of a block from before the window is not part of it.

    PyTorch records the releases of the profiled thread only: a block whose address is given out
    again was released by another one.
    """
    sizes: dict[int, int] = {}
    live = peak = 0
    for _, _, address, size in events:
        if size > 0:
            live += size - sizes.get(address, 0)
            sizes[address] = size
            peak = max(peak, live)
        else:
            live -= sizes.pop(address, 0)
    return peak
