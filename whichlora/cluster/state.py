"""What a sweep has written and submitted: `sweep.json`, enough to pick up where it was left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.tasks import TaskList
from whichlora.errors import DataFileError
from whichlora.spec.results import SCHEMA_VERSION
from whichlora.spec.run import RunConfig
from whichlora.store.jsonfiles import check_schema_version, read_object, write_object
from whichlora.text import require_printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One submitted array.

    Args:
        indices: numbers of its tasks in the list.
        offset: what a task's number is above its array index, for lists beyond MaxArraySize.
    """

    id: str
    indices: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One list of tasks for one group of GPUs, and every job that worked on it.

    Args:
        tasks_file, script: from the run directory.
        max_array_size: tasks that one job may have.
    """

    group: str
    round: int
    tasks_file: str
    script: str
    num_tasks: int
    max_array_size: int
    jobs: tuple[Job, ...] = ()

    def attempts(self, index: int) -> int:
        """How often task `index` was submitted."""
        return sum(index in job.indices for job in self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The whole sweep; one process writes it, any number may read it.

    Args:
        config: the config file.
        engine: who runs the tasks: slurm or local.
        unknown: kinds of GPUs that nothing could be predicted for, a line each.
    """

    run_dir: Path
    config: Path
    engine: str
    groups: tuple[GpuGroup, ...]
    arrays: tuple[Array, ...] = ()
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_printable("run directory", str(self.run_dir))  # stands in comments of scripts

    def group(self, name: str) -> GpuGroup:
        return next(group for group in self.groups if group.name == name)

    def tasks(self, array: Array) -> TaskList:
        return TaskList.read(self.run_dir / array.tasks_file)

    def listed_runs(self, group: str) -> set[RunConfig]:
        """Every run that stands in a list of `group`."""
        arrays = (array for array in self.arrays if array.group == group)
        return {task.run for array in arrays for task in self.tasks(array).tasks}

    def with_array(self, array: Array) -> Sweep:
        """`array` added, or put in place of what it was."""
        key = (array.group, array.round)
        others = [listed for listed in self.arrays if (listed.group, listed.round) != key]
        ordered = sorted([*others, array], key=lambda listed: (listed.round, listed.group))
        return replace(self, arrays=tuple(ordered))

    def save(self) -> None:
        """Replace `sweep.json` in one step.

        Raises:
            DataFileError: the disk refuses.
        """
        values = asdict(self) | {"schema_version": SCHEMA_VERSION, "config": str(self.config)}
        del values["run_dir"]
        write_object(self.run_dir / "sweep.json", values)

    @staticmethod
    def load(run_dir: Path) -> Sweep:
        """The sweep that `run_dir` holds.

        Raises:
            DataFileError: it holds none, or a broken one.
        """
        path = run_dir / "sweep.json"
        if not os.path.exists(path):
            raise DataFileError(
                f"{run_dir}: holds no sweep (no sweep.json); give the output_dir of a config that "
                "'whichlora slurm CONFIG.yaml' has read"
            )
        values = read_object(path)
        check_schema_version(values, SCHEMA_VERSION, str(path))
        try:
            return Sweep(
                run_dir=run_dir,
                config=Path(values["config"]),
                engine=values["engine"],
                groups=tuple(
                    GpuGroup(**_tuples(group, "others", "partitions")) for group in values["groups"]
                ),
                arrays=tuple(_array(array) for array in values["arrays"]),
                unknown=tuple(values["unknown"]),
            )
        except (KeyError, TypeError) as error:
            raise DataFileError(
                f"{path}: is not the state of a sweep ({error}); remove it and start over"
            ) from None


def _array(values: dict[str, Any]) -> Array:
    jobs = [Job(**_tuples(job, "indices")) for job in values["jobs"]]
    return Array(**values | {"jobs": tuple(jobs)})


def _tuples(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return values | {name: tuple(values[name]) for name in names}


def chunks(indices: Sequence[int], size: int) -> list[tuple[int, list[int]]]:
    """`indices` in parts whose members lie within `size` of the part's offset."""
    parts: dict[int, list[int]] = {}
    for index in indices:
        parts.setdefault(index // size * size, []).append(index)
    return sorted(parts.items())
