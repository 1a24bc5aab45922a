"""A sweep on the GPUs of this machine, one child process each."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from whichlora import api
from whichlora.plan import Plan
from whichlora.slurm.discovery import GpuGroup
from whichlora.slurm.states import TaskState
from whichlora.sweep.engine import Place, program
from whichlora.sweep.state import Array, Job, Sweep


class LocalEngine:
    """One child process per GPU of this machine; the tasks are dealt out beforehand."""

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        devices = _visible()
        groups = []
        for key in dict.fromkeys(devices.values()):
            num = sum(other == key for other in devices.values())
            name = key.replace(".", "-")[:60]
            groups.append(GpuGroup(name=name, gpu=key, num_nodes=1, num_gpus=num))
        return groups, []

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        devices = [index for index, key in _visible().items() if key == _key(sweep, array)]
        array = replace(array, max_array_size=array.num_tasks)
        tasks = shlex.quote(str(sweep.run_dir / array.tasks_file))
        lines = [
            "#!/bin/bash",
            f"# Profile {array.num_tasks} candidates, {len(devices)} at once, one GPU each.",
            "# Written by WhichLoRA; edit it as you like.",
            "set -eo pipefail",
        ]
        for number, device in enumerate(devices):
            own = " ".join(map(str, range(number, array.num_tasks, len(devices))))
            if own:
                variable = f"CUDA_VISIBLE_DEVICES={device} " if device else ""
                lines.append(f"{variable}{program(plan)} profile-task {tasks} {own} &")
        path = sweep.run_dir / array.script
        path.write_text("\n".join([*lines, "wait", ""]), encoding="utf-8")
        return array

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        devices = [index for index, key in _visible().items() if key == _key(sweep, array)]
        logs = sweep.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        tasks_file = sweep.run_dir / array.tasks_file
        for number, device in enumerate(devices):
            own = list(indices[number :: len(devices)])
            if not own:
                continue
            command = [sys.executable, "-m", "whichlora", "profile-task", str(tasks_file)]
            environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
            with (logs / f"{array.group}-{device or 'cpu'}.log").open("ab") as log:
                child = subprocess.Popen(
                    [*command, *map(str, own)], stdout=log, stderr=log, env=environment
                )
            self._children[str(child.pid)] = child
            array = replace(array, jobs=(*array.jobs, Job(id=str(child.pid), indices=tuple(own))))
        return array

    def submit_merge(self, sweep: Sweep) -> list[str]:
        return []  # whoever started the children waits for them, and joins

    def states(self, sweep: Sweep) -> dict[Place, TaskState]:
        states: dict[Place, TaskState] = {}
        for array in sweep.arrays:
            for job in array.jobs:
                child = self._children.get(job.id)
                if child is None:
                    continue  # of an earlier process, which took its children with it
                code = child.poll()
                state = TaskState("RUNNING")
                if code is not None:
                    state = TaskState("ENDED", exit_code=max(code, 0), signal=max(-code, 0))
                states |= {(array.group, array.round, index): state for index in job.indices}
        return states


def _key(sweep: Sweep, array: Array) -> str:
    return sweep.group(array.group).gpu


def _visible() -> dict[str, str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU here, and its key; "" is the CPU where none is."""
    from whichlora.device.detect import detect_gpus

    found = detect_gpus()
    if not found:
        return {"": api.find_gpu("cpu").key}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(len(found))]
    return {name: api.find_gpu(gpu.name).key for name, gpu in zip(names, found, strict=True)}
