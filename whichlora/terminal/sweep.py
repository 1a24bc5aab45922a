"""A sweep over a cluster: its GPU types and tasks, their state, the recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.predict.words import describe
from whichlora.terminal.answer import start_command
from whichlora.terminal.live import counts
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import certainty
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.cluster.merge import Recommendation
    from whichlora.cluster.state import Sweep
    from whichlora.cluster.watch import TaskStatus
    from whichlora.workflow.answer import Answer


def print_status(statuses: Sequence[TaskStatus]) -> None:
    """A table of tasks for each GPU type, with the number in each state."""
    console = open_console()
    groups: dict[str, list[TaskStatus]] = {}
    for status in statuses:
        groups.setdefault(status.array.group, []).append(status)
    for name, tasks in groups.items():
        rows = [
            (
                f"{status.array.round}-{status.index}",
                status.what,
                status.node or "-",
                _state(status),
            )
            for status in tasks
        ]
        print_table(
            console,
            ("task", "candidate", "node", "state"),
            rows,
            lift=("node",),
            spare=("node",),
            title=f"{name}: {counts(tasks)}",
        )
    if not statuses:
        say(console, "no task was worth a run")


def _state(status: TaskStatus) -> str:
    """The outcome of a task, or its state, short enough for a table."""
    state = (
        status.words if status.stand == "done" else f"{status.stand}: {status.words}".rstrip(": ")
    )
    if status.stand in ("running", "waiting", "cancelled"):  # its words would repeat the state
        state = status.stand
    return state if len(state) <= 48 else f"{state[:47].rstrip()}…"


def print_sweep(sweep: Sweep) -> None:
    """The GPU types of the cluster, and the task arrays that were written."""
    console = open_console()
    numbers = ("nodes", "GPUs", "tasks")
    rows = []
    tasks = {array.group: array.num_tasks for array in sweep.arrays}
    for group in sweep.groups:
        request = f"--gres={group.gres()}" + (f" -C {group.constraint}" if group.constraint else "")
        sizes = (group.num_nodes, group.num_gpus, tasks.get(group.name, 0))
        how = [request] if sweep.engine == "slurm" else []
        rows.append((group.name, group.gpu, *how, *map(str, sizes)))
    by = ["asked for with"] if sweep.engine == "slurm" else []
    print_table(
        console,
        ("GPU type", "taken for", *by, *numbers),
        rows,
        right=numbers,
        lift=("asked for with", "nodes"),
        spare=("nodes", "GPUs"),
    )
    for group in sweep.groups:
        if group.note:
            say(console, f"{group.name}: {group.note}")
    for line in sweep.unknown:
        say(console, f"left out: {line}")
    for array in sweep.arrays:
        number = "1 task" if array.num_tasks == 1 else f"{array.num_tasks} tasks"
        say(console, f"{number}: {sweep.run_dir / array.script}", whole=True)
    if not sweep.arrays:
        say(console, "no candidate is worth a run: the predictions settle the answer")


def _how_sure(answer: Answer) -> str:
    best = answer.winner
    if best is None or best.measured:
        return certainty(answer.search, has_winner=best is not None)
    return f"predicted, {best.chance_of_both_stages:.0%} chance to meet every limit"


def print_recommendation(recommendation: Recommendation, dry_run: Sequence[str] = ()) -> None:
    """The winner of every GPU type, the best of all, and how to start it.

    Args:
        dry_run: what the cluster says to the training script of each type.
    """
    console = open_console()
    numbers = ("runs", "peak", "total")
    rows = []
    for group in recommendation.groups:
        best = group.answer.winner
        total = best.total_s if best is not None else None
        rows.append(
            (
                group.judged.group.name,
                group.judged.group.gpu,
                "nothing meets every limit" if best is None else describe(best.run),
                str(len(group.answer.compared)),
                "-" if best is None else format_bytes(best.memory_bytes.value),
                "-" if total is None else format_seconds(total.value),
            )
        )
    print_table(
        console,
        ("GPU type", "accelerator", "winner", *numbers),
        rows,
        right=numbers,
        lift=("winner", "runs"),
        spare=("runs", "accelerator"),
    )
    for group in recommendation.groups:
        say(console, f"{group.judged.group.name}: {_how_sure(group.answer)}")
    for line in dry_run:
        say(console, line)
    if recommendation.best is not None and recommendation.best.answer.winner is not None:
        best_group = recommendation.best.judged.group
        say(
            console,
            f"Recommended, queue wait aside: {describe(recommendation.best.answer.winner.run)} "
            f"on {best_group.gpu} ({best_group.name}).",
        )
        job = recommendation.best.answer.files.get("job")
        if recommendation.best.script is not None:
            say(console, f"start it with: sbatch {recommendation.best.script}", whole=True)
        elif job is not None:
            say(
                console,
                f"start it there with: {start_command(recommendation.best.answer)}",
                whole=True,
            )
            if not best_group.num_nodes:  # of a cloud
                task = f"whichlora export {shlex.quote(str(job.parent))} --to skypilot"
                say(console, f"write its task with: {task}", whole=True)
