"""The device that a plan's candidates are profiled on, if this machine has it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from whichlora.errors import ConfigError
from whichlora.plan import Plan
from whichlora.specs import GpuSpec
from whichlora.store.gpus import gpus_here

if TYPE_CHECKING:
    from whichlora.device.profile import Profiler


def open_profiler(plan: Plan, gpu: GpuSpec, run_id: str) -> Profiler:
    """A profiler of `gpu` whose records say which run of which plan they are of.

    Raises:
        ConfigError: this machine has no such device.
    """
    from whichlora.device.profile import Profiler

    return Profiler(
        gpu=gpu.key,
        device=device_of(gpu),
        provenance={
            "run_id": run_id,
            "command": " ".join(["whichlora", *sys.argv[1:]]),
            "config": str(plan.source),
        },
        memory_limit_bytes=gpu.memory_bytes if gpu.kind == "cpu" else None,
        log_path=plan.output_dir / "profile.log",
    )


def require_profiler() -> None:
    """Refuse to profile where the libraries for it are not installed.

    Raises:
        ConfigError: one of them is missing.
    """
    from whichlora.device.profile import Profiler

    Profiler.require_libraries()


def device_of(gpu: GpuSpec) -> str:
    """The framework's device for `gpu`, if this machine has it.

    Raises:
        ConfigError: it has not; profiling is impossible here.
    """
    if gpu.kind == "cpu":
        return "cpu"
    here = gpus_here()
    for index, (_, spec) in enumerate(here):
        if spec.key == gpu.key:
            return f"cuda:{index}"
    found = ", ".join(device.name for device, _ in here) or "no GPU"
    raise ConfigError(
        f"gpu: {gpu.key} is not in this machine (it has {found}), so nothing can be profiled; "
        "run this on a machine that has it, or set profile: none for predictions alone"
    )
