"""Progress of a sweep: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whichlora.terminal.progress import Progress
from whichlora.terminal.tables import new_table, say
from whichlora.units import format_seconds

if TYPE_CHECKING:
    from whichlora.cluster.watch import TaskStatus
    from whichlora.spec.results import Measurement, Prediction

_BAR = 12  # columns of a progress bar
_BAR_WIDTH = 100  # of a terminal that has room for bars and nodes
_FRAME = 6  # lines around the rows: heads, rules, blanks, the last line


def counts(statuses: Sequence[TaskStatus]) -> str:
    """`2 done, 1 running`: the most frequent state first."""
    number = Counter(status.stand for status in statuses)
    return ", ".join(f"{count} {stand}" for stand, count in number.most_common())


class SweepProgress(Progress):
    """Tasks of each GPU type by state, the running tasks, and the time left.

    A failure is printed above the table at once. The time left excludes waiting in the queue: it
    is the mean duration of finished tasks, times open tasks over the tasks that run at once.
    Before the first task has finished, it is an upper bound from the timeout.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._began = time.monotonic()
        self._last_line = ""
        self._tasks: Sequence[TaskStatus] = ()
        self._open: set[tuple[str, int, int]] = set()
        self._started: dict[tuple[str, int, int], float] = {}
        self._took_s: dict[str, list[float]] = {}
        self._at_once: dict[str, int] = {}  # the most that were seen to run

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        """Nothing: the table has shown it."""

    def say(self, text: str) -> None:
        say(self._console, text)  # above the table, which stays

    def tasks(self, statuses: Sequence[TaskStatus]) -> None:
        self._take(statuses)
        if self._console.is_interactive:
            if self._status is None:
                from rich.live import Live

                self._status = Live(
                    console=self._console, get_renderable=self._render, refresh_per_second=1
                )
                self._status.start()
            self._status.refresh()
        else:
            line = "; ".join(f"{name}: {counts(group)}" for name, group in self._groups().items())
            if line != self._last_line:
                say(self._console, line)
            self._last_line = line

    def _take(self, statuses: Sequence[TaskStatus]) -> None:
        """Note which tasks have started and ended since the last call."""
        now = time.monotonic()
        for status in statuses:
            place = (status.array.group, status.array.round, status.index)
            if status.stand == "running":
                self._started.setdefault(place, now)
            elif status.stand != "done":
                self._started.pop(place, None)  # it will start again
            elif place in self._open:
                if place in self._started:
                    took_s = now - self._started.pop(place)
                    self._took_s.setdefault(status.array.group, []).append(took_s)
                if status.words != "ok":
                    task = f"{status.array.group} {status.array.round}-{status.index}"
                    say(self._console, f"{task}: {status.what}: {status.words}")
            if status.stand != "done":
                self._open.add(place)
            else:
                self._open.discard(place)
        self._tasks = statuses
        for name, group in self._groups().items():
            running = sum(status.stand == "running" for status in group)
            self._at_once[name] = max(running, self._at_once.get(name, 0))

    def _groups(self) -> dict[str, list[TaskStatus]]:
        groups: dict[str, list[TaskStatus]] = {}
        for status in self._tasks:
            groups.setdefault(status.array.group, []).append(status)
        return groups

    def _time_left(self, statuses: Sequence[TaskStatus]) -> str:
        """Time until all tasks of a group are done, without waiting in the queue."""
        open_tasks = [status for status in statuses if status.stand in ("running", "waiting")]
        name = statuses[0].array.group
        at_once = self._at_once.get(name)
        if not open_tasks or not at_once:
            return "in the queue" if open_tasks else "-"
        took_s = self._took_s.get(name)
        if not took_s:
            longest_s = max(status.timeout_s for status in open_tasks)
            return f"at most {format_seconds(math.ceil(len(open_tasks) / at_once) * longest_s)}"
        each_s = sum(took_s) / len(took_s)
        return f"about {format_seconds(round(each_s * max(1.0, len(open_tasks) / at_once)))}"

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [self._overview()]
        running = [status for status in self._tasks if status.stand == "running"]
        room = max(0, self._console.height - len(self._groups()) - 2 * _FRAME)
        if running and room:
            parts.append(self._running(running[:room]))
            if len(running) > room:
                parts.append(Text(f" … and {len(running) - room} more"))
        passed = _clock(time.monotonic() - self._began)
        parts.append(Text(f" {counts(self._tasks)}; {passed} so far"))
        return Group(*parts)

    def _overview(self) -> Any:
        """Each GPU type in a row."""
        from rich.progress_bar import ProgressBar

        bars = [""] if self._console.width >= _BAR_WIDTH else []
        numbers = ("done", "running", "waiting", "failed")
        table = new_table("GPU type", *bars, *numbers, "left", right=numbers)
        for name, group in self._groups().items():
            stands = Counter[str](status.stand for status in group)
            failed = sum(status.stand == "done" and status.words != "ok" for status in group)
            bar = [
                ProgressBar(total=len(group), completed=stands["done"], width=_BAR) for _ in bars
            ]
            cells = (f"{stands['done']}/{len(group)}", stands["running"], stands["waiting"], failed)
            table.add_row(name, *bar, *map(str, cells), self._time_left(group))
        for column in table.columns:
            column.no_wrap = True
        return table

    def _running(self, running: Sequence[TaskStatus]) -> Any:
        """The running tasks, and how long they have been seen to run."""
        from rich.cells import cell_len
        from rich.text import Text

        nodes = ["node"] if self._console.width >= _BAR_WIDTH else []
        table = new_table("running", "candidate", *nodes, "for", right=("for",))
        now = time.monotonic()
        for status in running:
            place = (status.array.group, status.array.round, status.index)
            node = [status.node or "-" for _ in nodes]
            passed = _clock(now - self._started.get(place, now))
            task = f"{status.array.group} {status.array.round}-{status.index}"
            table.add_row(task, Text(status.what), *node, passed)
        widths = [max(cell_len(str(cell)) for cell in column.cells) for column in table.columns]
        for column in table.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        # only the name of the candidate is cut: the other columns and the gaps keep their width
        others = sum(widths) - widths[1] + 3 * len(widths) - 1
        table.columns[1].max_width = max(1, self._console.width - others)
        return table


def _clock(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03: of constant width, so that a ticking column does not move."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
    )
