"""What a run tells while it works."""

from __future__ import annotations

from typing import Any, Self

from whichlora.report.terminal import open_console
from whichlora.report.words import describe, times
from whichlora.results import Measurement, Prediction
from whichlora.specs import RunConfig
from whichlora.units import format_bytes, format_seconds


class Progress:
    """Shows on stderr what runs, what is left, and what was learned.

    A spinner with the elapsed time on a terminal, plain lines elsewhere. The time that is left is
    that of every open candidate, as long as the profiles so far took; most are never profiled.
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

    def say(self, text: str) -> None:
        self._stop()
        self._console.print(text, markup=False)

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None:
        self._stop()
        left = f"{open_candidates} candidates open"
        if self._profile_s:
            each_s = sum(self._profile_s) / len(self._profile_s)
            left += f", at most {format_seconds(each_s * open_candidates)} left"
        text = f"profile {number}: {describe(run)} ({left})"
        if self._console.is_terminal:
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            bar.add_task(text, total=None)
            bar.start()
            self._status = bar
        else:
            self._console.print(text, markup=False)

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        self._stop()
        self._profile_s.append(measurement.device_s)
        name = describe(prediction.run)
        if measurement.outcome != "ok":
            self._console.print(
                f"  {name}: {measurement.outcome} {measurement.detail}", markup=False
            )
            return
        peak = measurement.peak_allocated_bytes or 0
        shown = [
            f"peak {format_bytes(peak)} ({_off(prediction.memory.peak_allocated_bytes, peak)})"
        ]
        for what, predicted, measured in times(prediction, measurement):
            shown.append(f"{what} {format_seconds(measured)} ({_off(predicted, measured)})")
        number = len(measurement.step_s or measurement.generate_s)
        shown.append(f"{number} {'batch' if number == 1 else 'batches'}")
        self._console.print(f"  {name}: {', '.join(shown)}", markup=False)


def _off(predicted: float, measured: float) -> str:
    return f"predicted {predicted / measured - 1:+.0%}" if measured else "not measured"
