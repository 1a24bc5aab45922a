"""A sweep while it runs: on a terminal a picture that stays in place, elsewhere lines."""

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
    """`2 done, 1 running`, what there is most of first."""
    number = Counter(one.stand for one in statuses)
    return ", ".join(f"{count} {stand}" for stand, count in number.most_common())


class SweepProgress(Progress):
    """How many tasks of each GPU type stand how, those that run now, and the time that is left.

    What fails is said above it at once. The time that is left counts no waiting in the queue: open
    tasks by the tasks that run at once, each as long as those that were seen to end took, and
    before the first has ended as long as it may at most.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._began = time.monotonic()
        self._said = ""
        self._tasks: Sequence[TaskStatus] = ()
        self._open: set[tuple[str, int, int]] = set()
        self._started: dict[tuple[str, int, int], float] = {}
        self._took_s: dict[str, list[float]] = {}
        self._at_once: dict[str, int] = {}  # the most that were seen to run

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        """Nothing: the table has shown it."""

    def say(self, text: str) -> None:
        say(self._console, text)  # above the picture, which stays

    def tasks(self, statuses: Sequence[TaskStatus]) -> None:
        self._take(statuses)
        if self._console.is_interactive:
            if self._status is None:
                from rich.live import Live

                self._status = Live(
                    console=self._console, get_renderable=self._picture, refresh_per_second=1
                )
                self._status.start()
            self._status.refresh()
        else:
            line = "; ".join(f"{name}: {counts(own)}" for name, own in self._groups().items())
            if line != self._said:
                say(self._console, line)
            self._said = line

    def _take(self, statuses: Sequence[TaskStatus]) -> None:
        """Note what has begun and ended since the last time."""
        now = time.monotonic()
        for one in statuses:
            place = (one.array.group, one.array.round, one.index)
            if one.stand == "running":
                self._started.setdefault(place, now)
            elif one.stand != "done":
                self._started.pop(place, None)  # it will begin again
            elif place in self._open:
                if place in self._started:
                    took_s = now - self._started.pop(place)
                    self._took_s.setdefault(one.array.group, []).append(took_s)
                if one.words != "ok":
                    task = f"{one.array.group} {one.array.round}-{one.index}"
                    say(self._console, f"{task}: {one.what}: {one.words}")
            if one.stand != "done":
                self._open.add(place)
            else:
                self._open.discard(place)
        self._tasks = statuses
        for name, own in self._groups().items():
            running = sum(one.stand == "running" for one in own)
            self._at_once[name] = max(running, self._at_once.get(name, 0))

    def _groups(self) -> dict[str, list[TaskStatus]]:
        groups: dict[str, list[TaskStatus]] = {}
        for one in self._tasks:
            groups.setdefault(one.array.group, []).append(one)
        return groups

    def _left(self, own: Sequence[TaskStatus]) -> str:
        """Time until a group is through, if nothing waits in the queue any longer."""
        left = [one for one in own if one.stand in ("running", "waiting")]
        group = own[0].array.group
        at_once = self._at_once.get(group)
        if not left or not at_once:
            return "in the queue" if left else "-"
        took_s = self._took_s.get(group)
        if not took_s:
            longest_s = max(one.timeout_s for one in left)
            return f"at most {format_seconds(math.ceil(len(left) / at_once) * longest_s)}"
        each_s = sum(took_s) / len(took_s)
        return f"about {format_seconds(round(each_s * max(1.0, len(left) / at_once)))}"

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [self._overview()]
        running = [one for one in self._tasks if one.stand == "running"]
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
        for name, own in self._groups().items():
            stands = Counter[str](one.stand for one in own)
            failed = sum(one.stand == "done" and one.words != "ok" for one in own)
            bar = [ProgressBar(total=len(own), completed=stands["done"], width=_BAR) for _ in bars]
            cells = (f"{stands['done']}/{len(own)}", stands["running"], stands["waiting"], failed)
            table.add_row(name, *bar, *map(str, cells), self._left(own))
        for column in table.columns:
            column.no_wrap = True
        return table

    def _running(self, running: Sequence[TaskStatus]) -> Any:
        """The tasks that run, and for how long they have been seen to."""
        from rich.cells import cell_len
        from rich.text import Text

        nodes = ["node"] if self._console.width >= _BAR_WIDTH else []
        table = new_table("running", "candidate", *nodes, "for", right=("for",))
        now = time.monotonic()
        for one in running:
            place = (one.array.group, one.array.round, one.index)
            node = [one.node or "-" for _ in nodes]
            passed = _clock(now - self._started.get(place, now))
            task = f"{one.array.group} {one.array.round}-{one.index}"
            table.add_row(task, Text(one.what), *node, passed)
        widths = [max(cell_len(str(cell)) for cell in column.cells) for column in table.columns]
        for column in table.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        # the name of the candidate alone is cut; beside it stand the others and the blanks between
        others = sum(widths) - widths[1] + 3 * len(widths) - 1
        table.columns[1].max_width = max(1, self._console.width - others)
        return table


def _clock(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03: of one width, so that a ticking column stands still."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
