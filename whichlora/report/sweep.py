"""A sweep over a cluster: the live table, the status, and the recommendation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whichlora.report.progress import Progress
from whichlora.report.terminal import new_table, open_console
from whichlora.report.words import certainty, describe
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.results import Measurement, Prediction
    from whichlora.sweep.following import TaskStatus
    from whichlora.sweep.merging import Recommendation
    from whichlora.sweep.state import Sweep


class SweepProgress(Progress):
    """A table that stays in place on a terminal; elsewhere a line whenever something changed."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._last = ""

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        """Nothing: the table has shown it."""

    def tasks(self, statuses: Sequence[TaskStatus]) -> None:
        line = _counts(statuses)
        if self._console.is_terminal:
            if self._status is None:
                from rich.live import Live

                self._status = Live(console=self._console, auto_refresh=False)
                self._status.start()
            self._status.update(status_table(statuses), refresh=True)
        elif line != self._last:
            self._console.print(line, markup=False)
        self._last = line


def _counts(statuses: Sequence[TaskStatus]) -> str:
    """`a100: 2 done, 1 running; h100: 3 waiting`."""
    groups: dict[str, Counter[str]] = {}
    for one in statuses:
        groups.setdefault(one.array.group, Counter())[one.stand] += 1
    return "; ".join(
        f"{name}: {', '.join(f'{number} {stand}' for stand, number in sorted(counts.items()))}"
        for name, counts in sorted(groups.items())
    )


def status_table(statuses: Sequence[TaskStatus]) -> Any:
    """Every task in a row."""
    table = new_table("GPUs", "task", "candidate", "node", "stands", "result")
    for one in statuses:
        place = f"{one.array.round}-{one.index}"
        words = one.words if len(one.words) <= 60 else f"{one.words[:57]}..."
        table.add_row(one.array.group, place, one.what, one.node or "-", one.stand, words or "-")
    return table


def print_status(statuses: Sequence[TaskStatus]) -> None:
    """The table of all tasks, and their number by stand."""
    console = open_console()
    if statuses:
        console.print(status_table(statuses))
    console.print(_counts(statuses) or "no task was worth a run", markup=False)


def print_sweep(sweep: Sweep) -> None:
    """What was found and written."""
    console = open_console()
    numbers = ("nodes", "GPUs", "tasks")
    table = new_table("GPUs", "taken for", "asked for with", *numbers, right=numbers)
    tasks = {array.group: array.num_tasks for array in sweep.arrays}
    for group in sweep.groups:
        asked = f"--gres={group.gres}" if sweep.engine == "slurm" else "-"
        asked += f" -C {group.constraint}" if group.constraint else ""
        counts = (group.num_nodes, group.num_gpus, tasks.get(group.name, 0))
        table.add_row(group.name, group.gpu, asked, *map(str, counts))
    console.print(table)
    for group in sweep.groups:
        if group.note:
            console.print(f"{group.name}: {group.note}", markup=False)
    for line in sweep.unknown:
        console.print(f"left out: {line}", markup=False)
    for array in sweep.arrays:
        console.print(f"{array.num_tasks} tasks: {sweep.run_dir / array.script}", markup=False)


def print_recommendation(found: Recommendation, dry_run: Sequence[str] = ()) -> None:
    """The winner of every GPU type, the best of all, and how to start it."""
    console = open_console()
    numbers = ("measured", "peak", "total")
    table = new_table("GPUs", "accelerator", "winner", *numbers, right=numbers)
    for one in found.groups:
        best = one.answer.winner
        total = best.total_s if best is not None else None
        table.add_row(
            one.judged.group.name,
            one.judged.group.gpu,
            "nothing meets every limit" if best is None else describe(best.run),
            str(len(one.answer.compared)),
            "-" if best is None else format_bytes(best.memory_bytes.value),
            "-" if total is None else format_seconds(total.value),
        )
    console.print(table)
    for one in found.groups:
        sure = certainty(one.answer.search, found=one.answer.winner is not None)
        console.print(f"{one.judged.group.name}: {sure}", markup=False)
    if found.best is not None and found.best.answer.winner is not None:
        group = found.best.judged.group
        console.print(
            f"Recommended, queue wait aside: {describe(found.best.answer.winner.run)} "
            f"on {group.gpu} ({group.name}).",
            markup=False,
        )
        if found.best.script is not None:
            console.print(f"start it with: sbatch {found.best.script}", markup=False)
    for line in dry_run:
        console.print(line, markup=False, soft_wrap=True)
