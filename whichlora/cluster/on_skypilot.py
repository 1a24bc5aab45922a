"""A sweep as SkyPilot tasks, written as text: clouds are rented by SkyPilot, not by us."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whichlora.cluster.engine import Place
from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.slurm.states import TaskState
from whichlora.cluster.state import Array, Sweep
from whichlora.errors import ConfigError
from whichlora.exports.installation import installation
from whichlora.exports.skypilot import ACCELERATORS, setup_lines
from whichlora.exports.yaml import yaml_text
from whichlora.spec.plan import Plan
from whichlora.store.gpus import find_gpu
from whichlora.store.jsonfiles import write_text


class SkyPilotEngine:
    """Writes one task file per GPU; launching it, and fetching the records, is the user's."""

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        """The values of `slurm.gpus`, or else `gpu`: a cloud has every GPU, so it must be said."""
        names = [*dict.fromkeys(plan.slurm.gpus.values())] or [*(plan.gpus or (plan.gpu,))]
        if "auto" in names:
            raise ConfigError(
                "gpu: auto names no GPU of a cloud; write gpu: h100-sxm-80gb, or several as "
                "slurm.gpus: {one: h100-sxm-80gb, two: l4-24gb}"
            )
        keys = [find_gpu(name).key for name in names]
        for key in keys:
            if key not in ACCELERATORS:
                raise ConfigError(
                    f"gpu: SkyPilot has no name for {key!r}; known are {', '.join(ACCELERATORS)}"
                )
        return [GpuGroup(name=key.replace(".", "-"), gpu=key) for key in keys], []

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        array = replace(array, script=f"{array.group}/sky-{array.round}.yaml")
        write_text(sweep.run_dir / array.script, task_yaml(plan, sweep, array))
        return array

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        raise ConfigError(
            "--engine skypilot: a cloud costs money, so this only writes; start it yourself with "
            f"'sky launch {sweep.run_dir / array.script}'"
        )

    def submit_merge(self, sweep: Sweep) -> list[str]:
        return []

    def states(self, sweep: Sweep) -> dict[Place, TaskState]:
        return {}


def task_yaml(plan: Plan, sweep: Sweep, array: Array) -> str:
    """One SkyPilot task that profiles a whole list, one candidate after another."""
    group = sweep.group(array.group)
    name = f"whichlora-{group.name}"
    run_dir, script = shlex.quote(str(sweep.run_dir)), sweep.run_dir / array.script
    records = shlex.quote(f"{sweep.tasks(array).calibration_dir}/")
    head = [
        f"Profile {array.num_tasks} candidates on {group.gpu}. Written by WhichLoRA; edit it.",
        f"  sky launch -c {name} {shlex.quote(str(script))}",
        f"  rsync -a {name}:whichlora/records/ {records}",
        f"  whichlora slurm merge {run_dir} && sky down {name}",
    ]
    numbers = " ".join(map(str, range(array.num_tasks)))
    tasks = f"~/whichlora/tasks/{Path(array.tasks_file).name}"
    work = [
        "mkdir -p ~/whichlora/records",
        f"whichlora profile-task {tasks} {numbers} --calibration-dir ~/whichlora/records",
    ]
    install = installation("profile")
    setup = plan.slurm.setup or setup_lines(plan.finetune, group.gpu, install)
    uploads = {} if plan.slurm.setup else install.uploads
    task: dict[str, Any] = {
        "name": name,
        "resources": {"accelerators": f"{ACCELERATORS[group.gpu]}:1"},
        "file_mounts": {"~/whichlora/tasks": str(sweep.run_dir / array.group), **uploads},
        **({"envs": plan.slurm.environment} if plan.slurm.environment else {}),
        "setup": _lines(setup),
        "run": _lines(work),
    }
    return yaml_text(task, head="\n".join(head))


def _lines(commands: Sequence[str]) -> str:
    return "".join(f"{command}\n" for command in commands)
