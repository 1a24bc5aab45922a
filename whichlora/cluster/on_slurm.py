"""A sweep as array jobs; Slurm does all the waiting, placing and limiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from whichlora.cluster.engine import Place, program
from whichlora.cluster.slurm import commands, scripts
from whichlora.cluster.slurm.discovery import GpuGroup, gpu_groups
from whichlora.cluster.slurm.states import TaskState
from whichlora.cluster.state import Array, Job, Sweep, chunks
from whichlora.spec.plan import Plan
from whichlora.store.gpus import find_gpu, list_gpus
from whichlora.store.jsonfiles import write_text


class SlurmEngine:
    """One array per GPU type and round; longer ones than the cluster takes in parts."""

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        nodes = commands.find_nodes(plan.slurm.clusters)
        named = {text: find_gpu(key).key for text, key in plan.slurm.gpus.items()}
        return gpu_groups(nodes, list_gpus(), named, partitions=plan.slurm.partitions)

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        group = sweep.group(array.group)
        array = replace(array, max_array_size=commands.max_array_size(group.cluster))
        logs = sweep.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        text = scripts.array_script(
            group,
            plan.slurm,
            tasks=sweep.run_dir / array.tasks_file,
            num_tasks=array.num_tasks,
            max_array_size=array.max_array_size,
            limit_s=limit_s,
            logs=logs,
            command=program(plan),
        )
        write_text(sweep.run_dir / array.script, text)
        file = _merge_file(sweep, group.cluster)
        if array.round == 1 or not file.exists():  # later rounds keep what somebody edited
            text = scripts.merge_script(
                plan.slurm,
                run_dir=sweep.run_dir,
                cluster=group.cluster,
                limit_s=2 * plan.slurm.startup_s,
                logs=logs,
                command=program(plan),
            )
            write_text(file, text)
        return array

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        cluster = sweep.group(array.group).cluster
        for offset, part in chunks(indices, array.max_array_size):
            job = commands.submit_array(
                sweep.run_dir / array.script, part, offset=offset, cluster=cluster
            )
            array = replace(
                array, jobs=(*array.jobs, Job(id=job, indices=tuple(part), offset=offset))
            )
        return array

    def submit_merge(self, sweep: Sweep) -> list[str]:
        merges = []
        for cluster in _clusters(sweep):
            jobs = _jobs(sweep, cluster)
            if jobs:
                script = _merge_file(sweep, cluster)
                merges.append(commands.submit_after(script, jobs, cluster=cluster))
        return merges

    def states(self, sweep: Sweep) -> dict[Place, TaskState]:
        told: dict[tuple[str, str, int], TaskState] = {}
        for cluster in _clusters(sweep):
            answered = commands.task_states(_jobs(sweep, cluster), cluster=cluster)
            told |= {(cluster, job, index): state for (job, index), state in answered.items()}
        states: dict[Place, TaskState] = {}
        for array in sweep.arrays:
            cluster = sweep.group(array.group).cluster
            for job in array.jobs:  # the last job that took a task goes before earlier ones
                for index in job.indices:
                    states.pop((array.group, array.round, index), None)
                    state = told.get((cluster, job.id, index - job.offset))
                    if state is not None:
                        states[array.group, array.round, index] = state
        return states


def _clusters(sweep: Sweep) -> list[str]:
    return sorted({group.cluster for group in sweep.groups})


def _jobs(sweep: Sweep, cluster: str) -> list[str]:
    arrays = [array for array in sweep.arrays if sweep.group(array.group).cluster == cluster]
    return [job.id for array in arrays for job in array.jobs]


def _merge_file(sweep: Sweep, cluster: str) -> Path:
    return sweep.run_dir / (f"merge-{cluster}.sbatch" if cluster else "merge.sbatch")
