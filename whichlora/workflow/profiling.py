"""The device that a plan's candidates are profiled on, if this machine has it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from whichlora.errors import ConfigError, MeasurementError
from whichlora.profiler.busy import busy_cpu, busy_gpu
from whichlora.profiler.spread import spreading
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.plan import Plan
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import detected_gpus, each_once, find_target
from whichlora.trainers import requirement

if TYPE_CHECKING:
    from whichlora.profiler.profile import Profiler


def open_profiler(plan: Plan, gpu: GpuSpec, run_id: str) -> Profiler:
    """A profiler of `gpu` whose records say which run of which plan they are of.

    Raises:
        ConfigError: this machine has no such device.
    """
    from whichlora.profiler.profile import Profiler

    return Profiler(
        gpu=gpu.key,
        device=device_of(gpu),
        provenance={
            "run_id": run_id,
            "command": " ".join(["whichlora", *sys.argv[1:]]),
            "config": str(plan.source),
        },
        memory_limit_bytes=gpu.memory_bytes if gpu.is_cpu else None,
        log_path=plan.output_dir / "profile.log",
    )


def require_profiler(run: RunConfig) -> None:
    """Refuse to profile `run` where the libraries for it are not installed, its trainer's too.

    Raises:
        ConfigError: one of them is missing.
    """
    from whichlora.profiler.profile import Profiler

    Profiler.require_libraries()
    needed = requirement(run)
    package, _, _ = needed.partition("==")
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"trainer: {run.trainer} needs {package}, which is not installed: pip install "
            f"{needed}, or set profile: none and train: false for predictions alone"
        )


def gpus_of(plan: Plan) -> list[GpuSpec]:
    """The devices that `plan` is for, each once.

    Raises:
        ConfigError: an unknown name, no GPU here where the plan names none, or an amount of memory
            where times are asked for.
    """
    specs = [gpu_of(replace(plan, gpu=name)) for name in plan.gpus or (plan.gpu,)]
    if len({spec.is_timed for spec in specs}) > 1:
        names = ", ".join(plan.gpus)
        raise ConfigError(
            f"{plan.source}: gpu: {names}: cards and amounts of memory can't be compared, since "
            "only cards have a time; list one or the other"
        )
    return each_once(specs)


def is_here(gpu: GpuSpec) -> bool:
    """Whether this machine has `gpu`."""
    try:
        device_of(gpu)
    except ConfigError:
        return False
    return True


def has_ranks_of(run: RunConfig, gpu: GpuSpec) -> bool:
    """Whether `run` over several GPUs can be profiled here, with all of its ranks.

    All visible GPUs must be of one type, and what spreads the run must be installed. On a CPU,
    whose cores ranks share, accelerate divides no model.
    """
    if run.parallel.gpus == 1:
        return False
    try:
        spread = spreading(run)
    except (ConfigError, MeasurementError):
        return False
    if gpu.is_cpu:
        return not spread.divides
    if not spread.is_installed:
        return False
    here = [spec.key if spec else "" for _, spec in detected_gpus()]
    return set(here) == {gpu.key} and len(here) >= run.parallel.gpus


def gpu_of(plan: Plan) -> GpuSpec:
    """The device that `plan` is for; of a list, the first. Of memory alone, any card of so much.

    "auto" means a GPU: on a laptop without one, the CPU is for whoever asks for it by name, since
    profiling would build models there that it can't hold.

    Raises:
        ConfigError: an unknown name, no GPU here where the plan names none, or an amount of memory
            where times are asked for.
    """
    gpu = find_target(plan.gpu)
    if not gpu.is_timed:
        _check_memory_only(plan)
    if gpu.is_cpu and plan.gpu.strip().lower() == "auto":
        raise ConfigError(
            f"{plan.source}: gpu: is not set, and this machine has no GPU; name the one that the "
            "plan is for ('whichlora gpus' lists them), or set gpu: cpu for the CPU of this machine"
        )
    return gpu


def _check_memory_only(plan: Plan) -> None:
    """Refuse what a plan for any card of so much memory can't be asked.

    Raises:
        ConfigError: to measure, or to judge a time.
    """
    amount = f"{plan.source}: gpu: {plan.gpu} is an amount of memory"
    if plan.profile != "none" or plan.train:
        setting = "train: true" if plan.profile == "none" else f"profile: {plan.profile}"
        raise ConfigError(
            f"{amount}, on which nothing can be run; it has {setting}: name a card, or set "
            "profile: none and train: false for predictions of memory alone"
        )
    limits = plan.limits_on(plan.gpu)
    asked_times = [
        name
        for name, is_set in (
            ("stage1_profile.time_per_token", limits.time_per_token_s is not None),
            ("stage1_profile.ttft", limits.ttft_s is not None),
            ("stage1_profile.tpot", limits.tpot_s is not None),
            ("stage1_profile.requests_per_s", limits.requests_per_s is not None),
            ("stage2_profile.total_time", limits.total_time_s is not None),
            (f"prefer: {plan.objective.prefer}", plan.objective.prefer in ("time", "price")),
        )
        if is_set
    ]
    if asked_times:
        raise ConfigError(
            f"{amount}, which has no time; it has {', '.join(asked_times)}: leave that out, or "
            "name a card"
        )


def busy(gpu: GpuSpec) -> str:
    """What else this device works on now, so that its times are not its own; empty where nothing.

    Asked between profiles, when nothing of ours runs.
    """
    device = device_of(gpu)
    return busy_cpu() if device == "cpu" else busy_gpu(int(device.partition(":")[2]))


def device_of(gpu: GpuSpec) -> str:
    """The framework's device for `gpu`, if this machine has it.

    Raises:
        ConfigError: it has not; profiling is impossible here.
    """
    if gpu.is_cpu:
        return "cpu"
    here = detected_gpus()
    for index, (_, spec) in enumerate(here):
        if spec is not None and spec.key == gpu.key:
            return f"cuda:{index}"
    names = ", ".join(device.name for device, _ in here) or "no GPU"
    raise ConfigError(
        f"gpu: {gpu.key} is not in this machine (it has {names}), so nothing can be profiled; "
        "run this on a machine that has it, or set profile: none for predictions alone"
    )
