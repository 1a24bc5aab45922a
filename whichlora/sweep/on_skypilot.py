"""A sweep as SkyPilot tasks, written as text: clouds are rented by SkyPilot, not by us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whichlora import api
from whichlora.errors import ConfigError
from whichlora.plan import Plan
from whichlora.slurm.discovery import GpuGroup
from whichlora.slurm.states import TaskState
from whichlora.sweep.engine import Place
from whichlora.sweep.state import Array, Sweep

# Names of SkyPilot's catalogue (`sky show-gpus`) for keys of ours.
ACCELERATORS = {
    "a10-24gb": "A10",
    "a100-sxm-40gb": "A100",
    "a100-pcie-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB",
    "a10g-24gb": "A10G",
    "b200-180gb": "B200",
    "h100-pcie-80gb": "H100",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4-24gb": "L4",
    "l40-48gb": "L40",
    "l40s-48gb": "L40S",
    "rtx-4090-24gb": "RTX4090",
    "rtx-a6000-48gb": "RTXA6000",
    "t4-16gb": "T4",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}


class SkyPilotEngine:
    """Writes one task file per GPU; launching it, and fetching the records, is the user's."""

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        """The values of `slurm.gpus`, or else `gpu`: a cloud has every GPU, so it must be said."""
        names = [*dict.fromkeys(plan.slurm.gpus.values())] or [plan.gpu]
        if names == ["auto"]:
            raise ConfigError(
                "gpu: auto names no GPU of a cloud; write gpu: h100-sxm-80gb, or several as "
                "slurm.gpus: {one: h100-sxm-80gb, two: l4-24gb}"
            )
        keys = [api.find_gpu(name).key for name in names]
        for key in keys:
            if key not in ACCELERATORS:
                raise ConfigError(
                    f"gpu: SkyPilot has no name for {key!r}; known are {', '.join(ACCELERATORS)}"
                )
        return [GpuGroup(name=key.replace(".", "-"), gpu=key) for key in keys], []

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        array = replace(array, script=f"{array.group}/sky-{array.round}.yaml")
        text = task_yaml(plan, sweep, array)
        (sweep.run_dir / array.script).write_text(text, encoding="utf-8")
        return array

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        raise ConfigError(
            f"--submit: a cloud costs money, so this only writes; start it yourself with "
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
    records = sweep.tasks(array).calibration_dir
    lines = [
        f"# Profile {array.num_tasks} candidates on {group.gpu}. Written by WhichLoRA; edit it.",
        f"#   sky launch -c {name} {sweep.run_dir / array.script}",
        f"#   rsync -a {name}:whichlora/records/ {records}/",
        f"#   whichlora slurm merge {sweep.run_dir} && sky down {name}",
        f"name: {name}",
        "resources:",
        f"  accelerators: {ACCELERATORS[group.gpu]}:1",
        "file_mounts:",
        f"  ~/whichlora/tasks: {sweep.run_dir / array.group}",
    ]
    if plan.slurm.environment:
        lines.append("envs:")
        lines += [f"  {key}: {_quoted(text)}" for key, text in plan.slurm.environment.items()]
    lines += ["setup: |", *(f"  {line}" for line in ("pip install 'whichlora[profile]'",))]
    lines += [f"  {line}" for line in plan.slurm.setup]
    numbers = " ".join(map(str, range(array.num_tasks)))
    tasks = f"~/whichlora/tasks/{array.tasks_file.rpartition('/')[2]}"
    lines += [
        "run: |",
        "  mkdir -p ~/whichlora/records",
        f"  whichlora profile-task {tasks} {numbers} --calibration-dir ~/whichlora/records",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
