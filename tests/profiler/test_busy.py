"""What other programs take of a device is seen before times are measured on it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whichlora.profiler.busy import _busy_gpu, busy_cpu


def write_stat(proc: Path, busy: int, idle: int, *, steal: int = 0) -> None:
    """Ticks of the two usable cores, and of one that is somebody else's."""
    line = f"{busy} 0 0 {idle} 0 0 0 {steal} 0 0"
    (proc / "stat").write_text(
        f"cpu  9 9 9 9\ncpu0 {line}\ncpu1 {line}\ncpu7 99999 0 0 0 0 0 0 0\n"
    )


@pytest.mark.parametrize(
    ("busy", "idle", "steal", "words"),
    [
        (0, 100, 0, ""),
        (10, 90, 0, ""),
        (80, 20, 0, "other programs use 80% of 2 cores"),
        (0, 50, 50, "other programs use 50% of 2 cores"),
    ],
)
def test_the_share_of_the_usable_cores_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int, idle: int, steal: int, words: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    write_stat(tmp_path, 1000, 1000)

    def pass_time(_: float) -> None:
        write_stat(tmp_path, 1000 + busy, 1000 + idle, steal=steal)

    monkeypatch.setattr(time, "sleep", pass_time)
    assert busy_cpu(proc=tmp_path) == words


def test_where_the_kernel_tells_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert busy_cpu(proc=tmp_path, sample_s=0.0) == ""


def nvml(percent: int, reasons: int) -> Any:
    return SimpleNamespace(
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=percent),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: reasons,
    )


@pytest.mark.parametrize(
    ("percent", "reasons", "words"),
    [
        (0, 0x1, ""),  # idle
        (95, 0x0, "other programs keep the GPU busy 95 % of the time"),
        (0, 0x60, "its clocks are slowed by heat"),
        (
            30,
            0x80,
            "other programs keep the GPU busy 30 % of the time; "
            "its clocks are slowed by its power supply",
        ),
    ],
)
def test_a_gpu_that_others_use_or_that_is_hot_is_told(
    percent: int, reasons: int, words: str
) -> None:
    assert _busy_gpu(nvml(percent, reasons), None) == words
