"""Whether other programs use the device now, which would distort measured times."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_SAMPLE_S = 0.3
_BUSY_SHARE = 0.15  # of the usable cores: an idle desktop takes a few percent
_BUSY_PERCENT = 10  # of a GPU's time


def busy_cpu(*, proc: Path = _PROC, sample_s: float = _SAMPLE_S) -> str:
    """The share that other programs take of this process's cores, in words; empty where small.

    Call it while this process is idle. Time that the hypervisor gives to other machines counts.
    """
    cores = os.sched_getaffinity(0)
    before = _core_times(proc, cores)
    time.sleep(sample_s)
    after = _core_times(proc, cores)
    idle = after[0] - before[0]
    total = after[1] - before[1]
    if total <= 0:
        return ""
    share = 1 - idle / total
    if share < _BUSY_SHARE:
        return ""
    number = "the core" if len(cores) == 1 else f"{len(cores)} cores"
    return f"other programs use {share:.0%} of {number}"


def _core_times(proc: Path, cores: set[int]) -> tuple[int, int]:
    """Idle and all ticks of `cores` since the start of the machine.

    Source: proc_stat(5): user nice system idle iowait irq softirq steal; guest time is in user.
    """
    idle = total = 0
    with suppress(OSError):
        for line in (proc / "stat").read_text(encoding="ascii").splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                counts = [int(tick) for tick in ticks[:8]]
                idle += counts[3] + counts[4]
                total += sum(counts)
    return idle, total


def busy_gpu(index: int) -> str:
    """Load of other programs on the visible GPU `index`, and slowed clocks, in words."""
    from whichlora.store.detect import detect_gpus

    try:
        import pynvml

        uuid = detect_gpus()[index].uuid
        pynvml.nvmlInit()
    except Exception:  # no driver that answers: the profile itself will say so
        return ""
    try:
        return _busy_gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:  # a MIG instance has no utilisation of its own
        return ""
    finally:
        pynvml.nvmlShutdown()


def _busy_gpu(pynvml: Any, handle: Any) -> str:
    disturbances = []
    percent = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    if percent >= _BUSY_PERCENT:
        disturbances.append(f"other programs keep the GPU busy {percent} % of the time")
    reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    # slowed down by heat or by the power supply; an idle clock is no such reason
    slowdowns = (
        ("nvmlClocksThrottleReasonHwThermalSlowdown", "heat"),
        ("nvmlClocksThrottleReasonSwThermalSlowdown", "heat"),
        ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "its power supply"),
    )
    causes = [cause for name, cause in slowdowns if reasons & getattr(pynvml, name)]
    if causes:
        disturbances.append(f"its clocks are slowed by {causes[0]}")
    return "; ".join(disturbances)
