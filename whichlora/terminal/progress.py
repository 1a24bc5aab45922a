"""Progress of a run on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from whichlora.predict.words import describe
from whichlora.spec.results import Measurement, Prediction
from whichlora.spec.run import RunConfig
from whichlora.terminal.tables import open_console, say
from whichlora.terminal.words import times
from whichlora.units import format_bytes, format_seconds


class Progress:
    """Shows on stderr what runs, how many candidates are open, and each measurement.

    A terminal gets a spinner with the elapsed time, everything else plain lines. The time left is
    an upper bound: the mean time of a profile, times the open candidates, most of which are never
    profiled.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = open_console(stderr=True)
        self._console.quiet = quiet
        self._status: Any = None
        self._profile_s: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self, text: str, *, expected_s: float | None = None) -> None:
        """Show a spinner, the elapsed time and `text` until the next message."""
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, Task, TextColumn, TimeElapsedColumn
        from rich.table import Column
        from rich.text import Text

        class Described(TextColumn):
            def render(self, task: Task) -> Text:
                return Text(f"{text}{_time_left(expected_s, task.elapsed or 0.0)}")

        bar = Bar(
            SpinnerColumn(),
            TimeElapsedColumn(),
            Described("", table_column=Column()),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        bar.add_task("", total=None)
        bar.start()
        self._status = bar

    def say(self, text: str) -> None:
        self._stop()
        say(self._console, text)

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None:
        self._stop()
        remaining = (
            "1 candidate open" if open_candidates == 1 else f"{open_candidates} candidates open"
        )
        if self._profile_s:
            each_s = sum(self._profile_s) / len(self._profile_s)
            remaining += f", at most {format_seconds(each_s * open_candidates)} left"
        text = f"profile {number}: {describe(run)}"
        if self._console.is_interactive:
            self._show(f"{text}\n{remaining}")  # two lines, which a narrow terminal never cuts off
        else:
            say(self._console, f"{text} ({remaining})")

    def training(self, job: Path, *, expected_s: float | None) -> None:
        """The winning job runs from here on."""
        self._stop()
        takes = "" if expected_s is None else f", about {format_seconds(expected_s)}"
        say(self._console, f"training: {job}{takes}", whole=True)
        if self._console.is_interactive:
            self._show("training", expected_s=expected_s)

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        self._stop()
        self._profile_s.append(measurement.device_s)
        name = describe(prediction.run)
        if measurement.outcome != "ok":
            say(self._console, f"  {name}: {measurement.outcome} {measurement.detail}")
            return
        peak = measurement.peak_allocated_bytes or 0
        shown = [
            f"peak {format_bytes(peak)} ({_off(prediction.memory.peak_allocated_bytes, peak)})"
        ]
        for quantity, predicted, measured in times(prediction, measurement):
            shown.append(f"{quantity} {format_seconds(measured)} ({_off(predicted, measured)})")
        number = len(measurement.step_s or measurement.generate_s)
        shown.append(f"{number} {'batch' if number == 1 else 'batches'}")
        say(self._console, f"  {name}: {', '.join(shown)}")


def _time_left(expected_s: float | None, passed_s: float) -> str:
    """Of a job that should take `expected_s`."""
    if expected_s is None:
        return ""
    left_s = round(expected_s - passed_s)
    return f", about {format_seconds(left_s)} left" if left_s > 0 else ", longer than predicted"


def _off(predicted: float, measured: float) -> str:
    if not measured:
        return "not measured"
    text = f"{predicted / measured - 1:+.0%}"
    return f"predicted {'+0%' if text == '-0%' else text}"
