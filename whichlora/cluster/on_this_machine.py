"""A sweep on the GPUs of this machine, one child process each."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from whichlora.cluster.engine import Place, program
from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.slurm.states import TaskState
from whichlora.cluster.state import Array, Job, Sweep
from whichlora.cluster.tasks import find_records, started_file
from whichlora.config import load_plan
from whichlora.spec.plan import Plan
from whichlora.store.gpus import find_gpu, gpus_here
from whichlora.store.jsonfiles import write_text
from whichlora.store.locks import process_start
from whichlora.workflow.profiling import device_of, gpu_of


class LocalEngine:
    """One child process per GPU of this machine; the tasks are dealt out beforehand.

    A child outlives a follower that is killed: its job's id is its process and when that started,
    so that whoever asks next can tell whether it still works.
    """

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        if not gpus_here():
            device_of(gpu_of(plan))  # the CPU is for whoever asks for it
        keys = [key for _, key in _devices()]
        return [
            GpuGroup(
                name=key.replace(".", "-")[:60],
                gpu=key,
                num_nodes=1,
                num_gpus=keys.count(key),
                most_on_a_node=keys.count(key),
            )
            for key in dict.fromkeys(keys)
        ], []

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        array = replace(
            array, max_array_size=array.num_tasks, script=f"{array.group}/profile-{array.round}.sh"
        )
        dealt = _deal(sweep, array, range(array.num_tasks))
        tasks = shlex.quote(str(sweep.run_dir / array.tasks_file))
        lines = [
            "#!/bin/bash",
            f"# Profile {array.num_tasks} candidates, {len(dealt)} at once, one GPU each.",
            f"# Then: whichlora slurm merge {shlex.quote(str(sweep.run_dir))}",
            "# Written by WhichLoRA; edit it as you like.",
            "set -eo pipefail",
            *(f"export {key}={shlex.quote(text)}" for key, text in plan.slurm.environment.items()),
        ]
        for device, numbers_dealt in dealt:
            variable = f"CUDA_VISIBLE_DEVICES={device} " if device else ""
            numbers = " ".join(map(str, numbers_dealt))
            lines.append(f"{variable}{program(plan)} profile-task {tasks} {numbers} &")
        path = sweep.run_dir / array.script
        write_text(path, "\n".join([*lines, "wait", ""]))
        path.chmod(0o755)
        return array

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        plan = load_plan(sweep.config)
        logs = sweep.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        command = [
            *shlex.split(program(plan)),
            "profile-task",
            str(sweep.run_dir / array.tasks_file),
        ]
        environment = {**os.environ, **plan.slurm.environment}
        for number, (device, numbers_dealt) in enumerate(_deal(sweep, array, indices)):
            visible = {"CUDA_VISIBLE_DEVICES": device} if device else {}
            with (logs / f"{array.group}-{number}.log").open("ab") as log:
                child = subprocess.Popen(
                    [*command, *map(str, numbers_dealt)],
                    stdout=log,
                    stderr=log,
                    env=environment | visible,
                )
            job = Job(id=f"{child.pid}-{process_start(child.pid)}", indices=tuple(numbers_dealt))
            self._children[job.id] = child
            array = replace(array, jobs=(*array.jobs, job))
        return array

    def submit_merge(self, sweep: Sweep) -> list[str]:
        return []  # whoever started the children waits for them, and joins

    def states(self, sweep: Sweep) -> dict[Place, TaskState]:
        states: dict[Place, TaskState] = {}
        for array in sweep.arrays:
            tasks = sweep.tasks(array)
            done = find_records(tasks)
            for job in array.jobs:  # the last job that took a task goes before earlier ones
                unfinished = [index for index in job.indices if index not in done]
                begun = [
                    started_file(sweep.run_dir / array.tasks_file, tasks, index).exists()
                    for index in unfinished[:1]
                ]
                now, later = self._state(job, begun=any(begun))
                for number, index in enumerate(unfinished):
                    states[array.group, array.round, index] = later if number else now
        return states

    def _state(self, job: Job, *, begun: bool) -> tuple[TaskState, TaskState]:
        """Of the task that the child of `job` works on, or died at, and of those after it.

        Args:
            begun: whether that task's measurement began; else no later one's would either.
        """
        child = self._children.get(job.id)
        code = None if child is None else child.poll()
        if code is not None:
            ended = TaskState("ENDED", exit_code=max(code, 0), signal=max(-code, 0))
            return ended, TaskState("REVOKED") if begun else ended
        pid, _, started = job.id.partition("-")
        if child is not None or process_start(pid) == started:
            return TaskState("RUNNING"), TaskState("PENDING")
        return TaskState("CANCELLED"), TaskState("CANCELLED")  # with its follower, or by hand


def _devices() -> list[tuple[str, str]]:
    """Every GPU here: what CUDA_VISIBLE_DEVICES calls it, and its key.

    Without one it is the CPU, which that variable does not name.
    """
    devices = [(device.uuid or "", spec.key) for device, spec in gpus_here()]
    return devices or [("", find_gpu("cpu").key)]


def _deal(sweep: Sweep, array: Array, indices: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """`indices` over the devices of the group, as far as there are any for each."""
    gpu = sweep.group(array.group).gpu
    devices = [device for device, key in _devices() if key == gpu]
    dealt = [(name, indices[number :: len(devices)]) for number, name in enumerate(devices)]
    return [(name, part) for name, part in dealt if part]
