"""A sweep over a cluster: what was found and written, how it stands, the recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.exports.train_script import train_command
from whichlora.terminal.live import counts
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import certainty, describe
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.cluster.merge import Recommendation
    from whichlora.cluster.state import Sweep
    from whichlora.cluster.watch import TaskStatus


def print_status(statuses: Sequence[TaskStatus]) -> None:
    """A table of tasks for each GPU type, and how many stand how."""
    console = open_console()
    groups: dict[str, list[TaskStatus]] = {}
    for one in statuses:
        groups.setdefault(one.array.group, []).append(one)
    for name, own in groups.items():
        rows = [
            (f"{one.array.round}-{one.index}", one.what, one.node or "-", _state(one))
            for one in own
        ]
        print_table(
            console,
            ("task", "candidate", "node", "state"),
            rows,
            lift=("node",),
            spare=("node",),
            title=f"{name}: {counts(own)}",
        )
    if not statuses:
        say(console, "no task was worth a run")


def _state(one: TaskStatus) -> str:
    """A record's outcome, or how the task stands, short enough for a table."""
    state = one.words if one.stand == "done" else f"{one.stand}: {one.words}".rstrip(": ")
    if one.stand in ("running", "waiting", "cancelled"):  # the cluster's word says the same again
        state = one.stand
    return state if len(state) <= 48 else f"{state[:47].rstrip()}…"


def print_sweep(sweep: Sweep) -> None:
    """What was found and written."""
    console = open_console()
    numbers = ("nodes", "GPUs", "tasks")
    rows = []
    tasks = {array.group: array.num_tasks for array in sweep.arrays}
    for group in sweep.groups:
        asked = f"--gres={group.gres}" + (f" -C {group.constraint}" if group.constraint else "")
        found = (group.num_nodes, group.num_gpus, tasks.get(group.name, 0))
        how = [asked] if sweep.engine == "slurm" else []
        rows.append((group.name, group.gpu, *how, *map(str, found)))
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


def print_recommendation(found: Recommendation, dry_run: Sequence[str] = ()) -> None:
    """The winner of every GPU type, the best of all, and how to start it.

    Args:
        dry_run: what the cluster says to the training script of each type.
    """
    console = open_console()
    numbers = ("runs", "peak", "total")
    rows = []
    for one in found.groups:
        best = one.answer.winner
        total = best.total_s if best is not None else None
        rows.append(
            (
                one.judged.group.name,
                one.judged.group.gpu,
                "nothing meets every limit" if best is None else describe(best.run),
                str(len(one.answer.compared)),
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
    for one in found.groups:
        sure = certainty(one.answer.search, found=one.answer.winner is not None)
        say(console, f"{one.judged.group.name}: {sure}")
    for line in dry_run:
        say(console, line)
    if found.best is not None and found.best.answer.winner is not None:
        group = found.best.judged.group
        say(
            console,
            f"Recommended, queue wait aside: {describe(found.best.answer.winner.run)} "
            f"on {group.gpu} ({group.name}).",
        )
        job = found.best.answer.files.get("job")
        if found.best.script is not None:
            say(console, f"start it with: sbatch {found.best.script}", whole=True)
        elif job is not None:
            command = shlex.join(train_command(job))
            say(console, f"start it there with: {command}", whole=True)
