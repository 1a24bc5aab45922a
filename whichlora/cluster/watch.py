"""Submit what is open, watch it, send back what the cluster took away, and join the results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from whichlora.cluster.engine import Engine
from whichlora.cluster.engines import ENGINES
from whichlora.cluster.merge import Recommendation, merge
from whichlora.cluster.prune import judge_groups
from whichlora.cluster.rounds import next_round
from whichlora.cluster.slurm.states import TaskState
from whichlora.cluster.state import Array, Sweep
from whichlora.cluster.tasks import TaskList, find_records, read_start, record_end, started_file
from whichlora.config import load_plan
from whichlora.errors import DataFileError, MeasurementError
from whichlora.spec.results import Measurement
from whichlora.store.locks import hold_folder
from whichlora.workflow.session import Progress

MAX_ATTEMPTS = 5  # of one task that the cluster keeps taking away
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_FORGOTTEN_S = 60.0  # a job may be unknown for so long after sbatch before it counts as lost

Stand = Literal["new", "waiting", "running", "done", "taken", "cancelled", "not started", "lost"]
_OPEN: frozenset[Stand] = frozenset({"new", "taken", "cancelled", "not started", "lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """How one task stands.

    Args:
        stand: "taken" by the cluster (preempted, node failed); "not started": its job ended before
            the measurement began, as a wrong module or environment does; "lost": nobody knows.
        words: the state or outcome, for people.
        timeout_s: what its measurement may take at most.
    """

    array: Array
    index: int
    what: str
    stand: Stand
    words: str
    node: str = ""
    timeout_s: float = 0.0


class SweepProgress(Progress, Protocol):
    """What a sweep tells while it runs; `terminal.live.SweepProgress` shows it."""

    def tasks(self, statuses: Sequence[TaskStatus]) -> None: ...


def statuses(sweep: Sweep, engine: Engine) -> list[TaskStatus]:
    """Every task of the sweep: its record first, then what the cluster knows.

    A task that the cluster ended after it had begun gets its record here.

    Raises:
        MeasurementError: the cluster does not answer.
    """
    states = engine.states(sweep)
    task_statuses = []
    for array in sweep.arrays:
        tasks = sweep.tasks(array)
        records = find_records(tasks)
        for index in range(array.num_tasks):
            state = states.get((array.group, array.round, index))
            record = records.get(index)
            task_statuses.append(_status(sweep, array, tasks, index, state, record))
    return task_statuses


def _status(
    sweep: Sweep,
    array: Array,
    tasks: TaskList,
    index: int,
    state: TaskState | None,
    record: Measurement | None,
) -> TaskStatus:
    tasks_file = sweep.run_dir / array.tasks_file
    if record is None and state is not None and state.outcome is not None:
        # the record may have come between our look at the files and at the cluster
        record = find_records(tasks).get(index)
        record = record or record_end(tasks_file, tasks, index, state.outcome, state.words)
    stand: Stand
    if record is not None:
        stand, words = "done", f"{record.outcome}: {record.detail}".rstrip(": ")
    elif state is None:
        stand, words = ("lost", "unknown to the cluster") if array.attempts(index) else ("new", "")
    elif state.is_taken:
        stand, words = "taken", state.words
    elif not state.is_final:
        running = state.name not in ("PENDING", "REQUEUED", "REQUEUE_HOLD")
        stand, words = ("running" if running else "waiting"), state.words
    elif state.outcome is None:
        stand, words = "cancelled", state.words
    else:
        stand, words = "not started", f"{state.words}; see the log"
    node = ""
    start = started_file(tasks_file, tasks, index)
    if stand in ("running", "done") and start.exists():
        told = read_start(start)
        node = str(told["node"] or told["host"] or "")
    task = tasks.tasks[index]
    return TaskStatus(
        array=array,
        index=index,
        what=task.what,
        stand=stand,
        words=words,
        node=node,
        timeout_s=task.timeout_s,
    )


def submit(
    sweep: Sweep,
    engine: Engine,
    task_statuses: Sequence[TaskStatus],
    stands: Collection[Stand] = _OPEN,
) -> tuple[Sweep, int]:
    """Submit the tasks that stand so, and the merge job after them; the sweep and how many.

    Raises:
        MeasurementError: the cluster refuses.
    """
    number = 0
    for array in sweep.arrays:
        key = (array.group, array.round)
        indices = [
            status.index
            for status in task_statuses
            if (status.array.group, status.array.round) == key and status.stand in stands
        ]
        if indices:
            sweep = sweep.with_array(engine.submit(sweep, array, indices))
            sweep.save()  # at once: a job that no file names would run twice
            number += len(indices)
    if number:
        engine.submit_merge(sweep)
    return sweep, number


def follow(
    sweep: Sweep,
    engine: Engine,
    progress: SweepProgress,
    *,
    wait: Callable[[float], None] = time.sleep,
) -> Recommendation:
    """Submit what is open, wait for all of it, and ask further rounds until nothing is left.

    Closing this process ends nothing on a cluster; `resume` goes on from the files.

    Raises:
        ConfigError: the config has a fault by now.
        DataFileError: another process follows it.
        MeasurementError: the cluster refuses, or does not answer.
    """
    with hold_folder(sweep.run_dir):
        return _follow(sweep, engine, progress, wait)


def _follow(
    sweep: Sweep, engine: Engine, progress: SweepProgress, wait: Callable[[float], None]
) -> Recommendation:
    plan = load_plan(sweep.config)
    while True:
        sweep, number = submit(sweep, engine, statuses(sweep, engine))
        if number:
            progress.say(f"submitted: {_tasks(number)}; close this at any time, and go on with")
            progress.say(f"  whichlora slurm resume {shlex.quote(str(sweep.run_dir))}")
        sweep = _watch(sweep, engine, progress, wait)
        judged = judge_groups(plan, sweep, progress)
        num_arrays = len(sweep.arrays)
        sweep = next_round(plan, sweep, judged, engine)
        if len(sweep.arrays) == num_arrays:
            return merge(plan, sweep, judged)
        progress.say("some results refuted what was predicted: another round")


def _watch(
    sweep: Sweep, engine: Engine, progress: SweepProgress, wait: Callable[[float], None]
) -> Sweep:
    """Until every task has a record, or will not get one without the user."""
    wait_s, unknown_s = _FIRST_WAIT_S, 0.0
    while True:
        task_statuses = statuses(sweep, engine)
        progress.tasks(task_statuses)
        taken = [status for status in task_statuses if status.stand == "taken"]
        again = [status for status in taken if status.array.attempts(status.index) < MAX_ATTEMPTS]
        if again:
            sweep, number = submit(sweep, engine, again, {"taken"})
            progress.say(f"taken away by the cluster and submitted again: {_tasks(number)}")
            continue
        lost = any(status.stand == "lost" for status in task_statuses)
        active = any(status.stand in ("waiting", "running") for status in task_statuses)
        if not active and not (lost and unknown_s < _FORGOTTEN_S):
            break
        unknown_s = unknown_s + wait_s if lost else 0.0
        wait(wait_s)
        wait_s = min(1.2 * wait_s, _LONGEST_WAIT_S)
    for status in task_statuses:
        if status.stand != "done":
            place = f"{status.array.group} {status.array.round}-{status.index}"
            progress.say(f"{place}: {status.what}: {status.stand}: {status.words}")
    return sweep


def _engine_of(sweep: Sweep) -> Engine:
    if sweep.engine not in ENGINES:
        raise DataFileError(
            f"{sweep.run_dir}/sweep.json: engine is {sweep.engine!r}, this release has "
            f"{', '.join(ENGINES)}; upgrade whichlora, or start over with --fresh"
        )
    return ENGINES[sweep.engine]()


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number} tasks"


def resume(run_dir: Path, progress: SweepProgress) -> Recommendation:
    """Go on with the sweep of `run_dir`, wherever it was left.

    Raises:
        DataFileError: there is none, or another process follows it.
        MeasurementError: the cluster refuses, or does not answer.
    """
    Sweep.load(run_dir.absolute())  # before the lock, which makes the folder
    with hold_folder(run_dir.absolute()):
        sweep = Sweep.load(run_dir.absolute())
        return _follow(sweep, _engine_of(sweep), progress, time.sleep)


def status(run_dir: Path) -> list[TaskStatus]:
    """How the sweep of `run_dir` stands; nothing is submitted.

    Raises:
        DataFileError: there is none.
        MeasurementError: the cluster does not answer.
    """
    sweep = Sweep.load(run_dir.absolute())
    return statuses(sweep, _engine_of(sweep))


def join(run_dir: Path, progress: SweepProgress) -> Recommendation:
    """The recommendation from whatever is recorded by now; what the merge job runs.

    Raises:
        DataFileError: no sweep, or a disk that refuses.
    """
    sweep = Sweep.load(run_dir.absolute())
    engine = _engine_of(sweep)
    try:
        statuses(sweep, engine)  # tasks that were killed get their records
    except MeasurementError as error:  # some clusters answer no questions on compute nodes
        progress.say(f"without the states of the jobs: {error}")
    plan = load_plan(sweep.config)
    return merge(plan, sweep, judge_groups(plan, sweep, progress))


def dry_run(recommendation: Recommendation) -> list[str]:
    """What `sbatch --test-only` says about the training script of every group that has one."""
    from whichlora.cluster.slurm import commands

    lines = []
    for group in recommendation.groups:
        if group.script is None:
            continue
        try:
            answer = commands.dry_run(group.script, cluster=group.judged.group.cluster)
        except MeasurementError as error:
            answer = f"refused: {error}"
        lines.append(f"sbatch --test-only of {group.judged.group.name}: {answer}")
    return lines
