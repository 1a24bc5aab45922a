"""The list of candidates that an array profiles, and the one command that profiles one of them."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.results import SCHEMA_VERSION, Measurement, Outcome
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.jsonfiles import check_schema_version, read_object, write_bytes, write_object
from whichlora.store.measurements import MeasurementLog, read_records
from whichlora.store.models import is_known_model
from whichlora.store.record import encode_record
from whichlora.store.reuse import Circumstances, model_digest
from whichlora.workflow.profiling import busy

_ENDED = "-ended"  # file of a task that the cluster ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One candidate to profile, with all that the profiler asks for.

    Args:
        what: the candidate in words, for whoever reads the list.
        upper_s: what its measured batches take at most, as predicted.
    """

    what: str
    run: RunConfig
    target_modules: str | tuple[str, ...]
    seq_lens: tuple[int, ...]
    num_batches: int
    timeout_s: float
    upper_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """What one array works on: a JSON file that a person can read and shorten.

    Args:
        gpu: the key that was predicted for; the driver on the node has the last word.
        round: first, second, … time that this group is asked.
        models: the config of every model, so that a node needs no database and no network.
        pretend_memory_bytes: see `SlurmConfig`; None in earnest.
    """

    run_id: str
    group: str
    round: int
    gpu: str
    config: str
    calibration_dir: Path
    models: Mapping[str, Mapping[str, Any]]
    tasks: tuple[Task, ...]
    pretend_memory_bytes: int | None = None

    def name(self, index: int) -> str:
        """Of the record file of task `index`, and of no other."""
        return f"{self.run_id}-{self.round}-{index}"

    def write(self, path: Path) -> None:
        """Write the list.

        Raises:
            DataFileError: the disk refuses.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        tasks = [asdict(task) | {"run": task.run.to_dict()} for task in self.tasks]
        values |= {
            "schema_version": SCHEMA_VERSION,
            "calibration_dir": str(self.calibration_dir),
            "tasks": tasks,
        }
        write_object(path, values)

    @staticmethod
    def read(path: Path) -> TaskList:
        """The list in `path`.

        Raises:
            DataFileError: not such a list.
        """
        values = read_object(path)
        check_schema_version(values, SCHEMA_VERSION, str(path))
        del values["schema_version"]
        try:
            tasks = [
                Task(
                    **task
                    | {
                        "run": RunConfig.from_dict(task["run"]),
                        "target_modules": _one_or_many(task["target_modules"]),
                        "seq_lens": tuple(task["seq_lens"]),
                    }
                )
                for task in values["tasks"]
            ]
            calibration_dir = Path(values["calibration_dir"])
            return TaskList(**values | {"tasks": tuple(tasks), "calibration_dir": calibration_dir})
        except (KeyError, TypeError, ConfigError) as error:
            raise DataFileError(
                f"{path}: is not a list of tasks ({error}); write it again with 'whichlora slurm'"
            ) from None


def _one_or_many(names: str | Sequence[str]) -> str | tuple[str, ...]:
    return names if isinstance(names, str) else tuple(names)


def started_file(tasks_file: Path, tasks: TaskList, index: int) -> Path:
    """Where task `index` says on which GPU of which machine it runs."""
    return tasks_file.parent / "started" / f"{tasks.round}-{index}.json"


def read_start(path: Path) -> dict[str, Any]:
    """What a task told in its `started_file`.

    Raises:
        DataFileError: it is broken.
    """
    told = read_object(path)
    check_schema_version(told, SCHEMA_VERSION, str(path))
    for key in ("gpu", "date", "host", "node", "job"):
        if key not in told:
            raise DataFileError(f"{path}: has no {key!r}; remove it, and the task runs again")
    return told


def find_records(tasks: TaskList) -> dict[int, Measurement]:
    """What the tasks of a list measured so far, whatever GPU they met."""
    stem = f"{tasks.run_id}-{tasks.round}-"
    records: dict[int, Measurement] = {}
    for path in sorted(tasks.calibration_dir.glob(f"*/measurements/{stem}*.jsonl"), reverse=True):
        index = path.stem.removeprefix(stem).removesuffix(_ENDED)
        if index.isdigit():  # reversed, so what a task wrote itself goes before what ended it
            records |= {int(index): record for record, _ in read_records(path)}
    return records


def profile_task(
    tasks_file: Path, indices: Sequence[int], *, calibration_dir: Path | None = None
) -> list[Measurement]:
    """Profile candidates of a list on the GPU of this machine, one record file each.

    A task that has a record is left alone, so a requeued or repeated job does no harm.

    Raises:
        ConfigError: an index that the list does not have, or a GPU that the catalogue does not.
        DataFileError: no list, or a disk that refuses.
        MeasurementError: the profiler cannot start.
    """
    tasks = TaskList.read(tasks_file)
    if calibration_dir is not None:
        tasks = replace(tasks, calibration_dir=calibration_dir)
    for index in indices:
        if not 0 <= index < len(tasks.tasks):
            raise ConfigError(
                f"{tasks_file}: has no task {index}; accepted are 0 to {len(tasks.tasks) - 1}"
            )
    return [_profile(tasks_file, tasks, index) for index in indices]


def _profile(tasks_file: Path, tasks: TaskList, index: int) -> Measurement:
    from whichlora.profiler.profile import Profiler

    recorded = find_records(tasks).get(index)
    if recorded is not None:
        return recorded
    pretended = tasks.pretend_memory_bytes
    gpu = find_gpu(tasks.gpu if pretended else "auto")
    if gpu.is_cpu and gpu.key != tasks.gpu:
        raise ConfigError(
            f"{tasks_file}: its tasks are for {tasks.gpu}, and {platform.node()} has no GPU; run "
            "them where one is, or plan with gpu: cpu"
        )
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    start = {
        "schema_version": SCHEMA_VERSION,
        "gpu": gpu.key,
        "pretended": pretended is not None,
        "host": platform.node(),
        "node": os.environ.get("SLURMD_NODENAME"),
        "job": f"{job}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if job else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_object(started_file(tasks_file, tasks, index), start)
    task = tasks.tasks[index]
    load_now = "" if pretended else busy(gpu)
    profiler = Profiler(
        gpu=gpu.key,
        device="cpu" if pretended or gpu.is_cpu else "cuda:0",
        provenance=_provenance(tasks, start),
        memory_limit_bytes=pretended or (gpu.memory_bytes if gpu.is_cpu else None),
    )
    try:
        measurement = profiler.measure(
            task.run,
            model_config=tasks.models[task.run.model],
            target_modules=task.target_modules,
            seq_lens=task.seq_lens,
            num_batches=task.num_batches,
            timeout_s=task.timeout_s,
        )
    finally:
        profiler.close()
    noted = Circumstances(
        model_config=tasks.models[task.run.model],
        num_batches=task.num_batches,
        timeout_s=task.timeout_s,
        memory_bytes=pretended or gpu.memory_bytes,
    ).noted()
    measurement = replace(
        measurement,
        model_config=_unknown_config(tasks, task),
        provenance={
            **measurement.provenance,
            **noted,
            **({"busy": load_now} if load_now else {}),
        },
    )
    MeasurementLog(tasks.calibration_dir, gpu.key, tasks.name(index)).append(measurement)
    return measurement


def record_end(
    tasks_file: Path, tasks: TaskList, index: int, outcome: Outcome, words: str
) -> Measurement | None:
    """Record that the cluster ended task `index`: a result, if the task had begun.

    Whoever notices writes the same bytes to the same file, so nobody has to be the first.

    Raises:
        DataFileError: the disk refuses.
    """
    path = started_file(tasks_file, tasks, index)
    if not path.exists():
        return None
    start = read_start(path)
    task = tasks.tasks[index]
    measurement = Measurement(
        id=uuid.uuid5(uuid.NAMESPACE_URL, tasks.name(index)).hex,
        gpu=start["gpu"],
        date=start["date"],
        config=task.run.to_dict(),
        model_config=_unknown_config(tasks, task),
        outcome=outcome,
        detail=f"ended without a record: {words}",
        provenance=_provenance(tasks, start)
        | {"model_digest": model_digest(tasks.models[task.run.model])},
    )
    log = MeasurementLog(tasks.calibration_dir, measurement.gpu, f"{tasks.name(index)}{_ENDED}")
    write_bytes(log.path, encode_record(measurement, str(log.path)))
    return measurement


def _unknown_config(tasks: TaskList, task: Task) -> dict[str, Any] | None:
    model = task.run.model
    return None if is_known_model(model) else dict(tasks.models[model])


def _provenance(tasks: TaskList, start: Mapping[str, Any]) -> dict[str, Any]:
    told = {"run_id": tasks.run_id, "command": "whichlora profile-task", "config": tasks.config}
    told |= {name: start[name] for name in ("host", "node", "job") if start[name]}
    if tasks.pretend_memory_bytes is not None:
        told["pretended"] = f"measured on the CPU in place of {tasks.gpu}, as a test asked"
    return told
