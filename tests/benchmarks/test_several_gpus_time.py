"""Published times on several GPUs, every sixth of them, are held to what issue 16 asks for."""

from __future__ import annotations

import math
from statistics import median

import several_gpus_time


def test_steps_and_scaling_are_as_published() -> None:
    found = several_gpus_time.compared(several_gpus_time.published()[::6])
    assert len(found) > 30
    on_nvlink = [abs(run.error) for run in found if run.interconnect == "NVLink"]
    assert median(on_nvlink) < 0.12
    points = [abs(run.efficiency_points) for run in found if not math.isnan(run.efficiency_points)]
    assert len(points) > 5
    assert median(points) < 5
    assert sum(run.is_inside for run in found) / len(found) > 0.8


def test_steps_over_stated_pcie_lanes_are_as_published_offloaded_or_not() -> None:
    runs = [run for run in several_gpus_time.published() if run.gpu == "rtx-4090-24gb"]
    found = several_gpus_time.compared(runs)
    assert len(found) == 11
    assert sum("offload" in dict(run.published.options) for run in found) == 6
    assert median(abs(run.error) for run in found) < 0.11
    assert all(run.is_inside for run in found)
