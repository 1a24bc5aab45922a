"""One interface to the clock and the memory counters of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from whichlora.profiler.cpu_peak import CpuPeak, live_tensor_bytes

_NUM_LARGEST = 16
_COUNTERS = ("allocated", "reserved")


class Meter:
    """Clock and memory counters of `device`.

    On CUDA the allocator counts all the time. A CPU has no such counters, so one extra step or
    generation runs under the profiler (`needs_extra_run`) and is not among the timed ones.

    Args:
        keeps_history: record every block that a CUDA allocator hands out, which slows it.
        warms_lengths: a step of each length comes before those that are timed. On an H200 the
            first one at a new length took 0.2 to 2.5 s longer: libraries load their kernels then.
    """

    def __init__(
        self, device: str, *, keeps_history: bool = False, warms_lengths: bool = False
    ) -> None:
        self.is_cuda = device.startswith("cuda")
        self.warms_lengths = warms_lengths and self.is_cuda
        self.needs_extra_run = not self.is_cuda
        self._keeps_history = keeps_history and self.is_cuda
        self._cpu_peak = CpuPeak()
        self._peak_bytes: int | None = None
        self._moment = ""
        self._moment_peaks: dict[str, int] = {}  # of allocated bytes; "" is between moments
        self._reserved_peak = 0

    def now(self) -> float:
        """Seconds, once all work handed to the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else live_tensor_bytes()

    def forget_peak(self) -> None:
        """Reset the counters after loading."""
        self._peak_bytes = None
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._moment, self._moment_peaks, self._reserved_peak = "", {}, 0
        if self._keeps_history:
            torch.cuda.memory._record_memory_history(context=None)

    def enter(self, moment: str) -> None:
        """From now on peaks belong to `moment`, a name of the ledger, or "" between two.

        The allocator counts when the host asks, so nothing waits for the device here.
        """
        if self.is_cuda:
            self._close_moment()
            self._moment = moment

    def _close_moment(self) -> None:
        # `max_memory_allocated` sorts all counters by name, which takes the host 0.2 to 0.5 ms
        stats = torch.cuda.memory_stats_as_nested_dict()
        allocated, reserved = (stats[f"{kind}_bytes"]["all"]["peak"] for kind in _COUNTERS)
        peak = max(allocated, self._moment_peaks.get(self._moment, 0))
        self._moment_peaks[self._moment] = peak
        self._reserved_peak = max(self._reserved_peak, reserved)
        torch.cuda.reset_peak_memory_stats()

    def start_extra_run(self) -> None:
        self._cpu_peak.start()

    def stop_extra_run(self) -> None:
        self._peak_bytes = self._cpu_peak.stop()

    def extra_run(self, call: Callable[[], Any]) -> None:
        self.start_extra_run()
        call()
        self.stop_extra_run()

    def peaks(self) -> dict[str, Any]:
        """The memory fields of a `Measurement`."""
        if not self.is_cuda:
            return {"peak_allocated_bytes": self._peak_bytes}
        torch.cuda.synchronize()
        self._close_moment()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": max(self._moment_peaks.values()),
            "peak_reserved_bytes": self._reserved_peak,
            "device_used_bytes": total_bytes - free_bytes,
            "moment_peak_bytes": {name: peak for name, peak in self._moment_peaks.items() if name},
            "largest_blocks_bytes": self._largest_blocks(),
        }

    def _largest_blocks(self) -> list[int]:
        """Sizes of the largest blocks handed out since `forget_peak`, largest first."""
        if not self._keeps_history:
            return []
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        sizes = [event["size"] for event in events if event["action"] == "alloc"]
        return sorted(sizes, reverse=True)[:_NUM_LARGEST]
