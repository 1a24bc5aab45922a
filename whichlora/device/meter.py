"""One interface to the clock and the memory counters of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from whichlora.device.cpu_peak import CpuPeak, live_tensor_bytes


class Meter:
    """Clock and memory counters of `device`.

    On CUDA the allocator counts all the time. A CPU has no such counters, so one extra step or
    generation runs under the profiler (`needs_extra_run`) and is not among the timed ones.
    """

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        self.needs_extra_run = not self.is_cuda
        self._cpu_peak = CpuPeak()
        self._peak_bytes: int | None = None

    def now(self) -> float:
        """Seconds, once all work handed to the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else live_tensor_bytes()

    def forget_peak(self) -> None:
        """Start counting anew: what loading took is over."""
        self._peak_bytes = None
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def start_extra_run(self) -> None:
        self._cpu_peak.start()

    def stop_extra_run(self) -> None:
        self._peak_bytes = self._cpu_peak.stop()

    def extra_run(self, call: Callable[[], Any]) -> None:
        self.start_extra_run()
        call()
        self.stop_extra_run()

    def peaks(self) -> dict[str, int | None]:
        """The memory fields of a `Measurement`."""
        if not self.is_cuda:
            return {"peak_allocated_bytes": self._peak_bytes}
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total_bytes - free_bytes,
        }
