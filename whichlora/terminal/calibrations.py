"""Fitted coefficients and merged records as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from whichlora.terminal.tables import (
    MAX_REASONS,
    new_table,
    open_console,
    print_table,
    print_whole,
    say,
)
from whichlora.timing.model import PER_COUNT
from whichlora.units import counted, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from whichlora.calibration.database import CalibrationReport, Refit
    from whichlora.calibration.share.union import Merged
    from whichlora.predict.coefficients import Calibration


def print_refit(refit: Refit) -> None:
    """Error on left-out runs by phase: from the datasheet alone, before this fit, and now."""
    console = open_console()
    after, before = refit.after, refit.before
    numbers = ("runs", "datasheet alone", "before", "now", "worst now")
    table = new_table("phase", *numbers, right=numbers)
    for phase, cold in after.cold.items():
        old = before.held_out.get(phase) if before else None
        new = after.held_out.get(phase)
        table.add_row(
            phase,
            str(_num_runs(after, phase)),
            f"{cold.median:.1%}",
            f"{old.median:.1%} of {old.num_runs}" if old else "-",
            f"{new.median:.1%}" if new else "too few runs",
            f"{new.worst:.1%}" if new else "",
        )
    say(console, f"{after.gpu}: {counted(after.num_records, 'record')}")
    print_whole(console, table)
    say(console, "median error; 'before' and 'now' on runs that were left out of the fit")
    for phase in after.held_out:
        if line := _against_datasheet(after, phase):
            say(console, line)
    _print_outliers(console, after)


def _against_datasheet(calibration: Calibration, phase: str) -> str:
    """How a fit that is no better than the datasheet is used; empty if the fit is better."""
    cold, now = calibration.cold[phase], calibration.held_out[phase]
    if phase in calibration.by_datasheet:
        return (
            f"{phase}: the fit is worse than datasheet and priors on the {now.num_runs} runs left "
            "out, by more than chance, so it is not used: they are too few, or too unlike each "
            "other"
        )
    if now.median <= cold.median:
        return ""
    if now.typical is not None and cold.typical is not None and now.typical < cold.typical:
        return (
            f"{phase}: the fit's median is above the datasheet's, its mean is below "
            f"({now.typical:.1%} against {cold.typical:.1%}), so it is used"
        )
    return (
        f"{phase}: the fit is no better than the datasheet, by no more than chance in "
        f"{now.num_runs} runs that scatter by {_noise(calibration, phase):.0%}; it is used, more "
        "runs will tell"
    )


def _noise(calibration: Calibration, phase: str) -> float:
    return (calibration.memory if phase == "memory" else calibration.time[phase]).noise


def print_calibration(report: CalibrationReport) -> None:
    """One device: coefficients as efficiencies, errors, valid range, provenance, outliers."""
    console = open_console()
    calibration = report.calibration
    number = counted(calibration.num_records, "record")
    say(console, f"{calibration.gpu}: {number} fitted{report.stale}")
    numbers = ("runs", "left-out median", "worst", "noise", "model size", "batch", "tokens")
    rows = []
    for phase in ("memory", *calibration.time):
        held_out, ranges = calibration.held_out.get(phase), calibration.ranges.get(phase, {})
        model = calibration.memory if phase == "memory" else calibration.time[phase]
        rows.append(
            (
                phase,
                str(model.num_runs),
                f"{held_out.median:.1%}" if held_out else "-",
                f"{held_out.worst:.1%}" if held_out else "-",
                f"{model.noise:.1%}",
                *(_range(ranges.get(name)) for name in ("num_params", "batch_size", "tokens")),
            )
        )
    print_table(
        console, ("phase", *numbers), rows, right=numbers, spare=("noise", "tokens", "batch")
    )
    table = new_table("efficiency", *calibration.time, right=calibration.time)
    for name in next(iter(calibration.time.values())).mean:
        table.add_row(
            name, *(_efficiency(name, model.mean[name]) for model in calibration.time.values())
        )
    print_whole(console, table)
    say(console, "of the rates of the datasheet, or seconds each: docs/time.md has what they mean")
    if calibration.memory.num_runs:
        factors = (f"{part} {factor:.3f}" for part, factor in calibration.memory.mean.items())
        say(console, f"memory, measured over counted: {', '.join(factors)}")
    for title, counts in (("outcomes", report.outcomes), ("versions", report.versions)):
        if counts:
            say(console, f"{title}: {_counted(counts)}")
    if report.sources:
        say(console, "measured by")
        ordered = sorted(report.sources.items(), key=lambda item: (-item[1], item[0]))
        for source, count in ordered[:MAX_REASONS]:
            say(console, f"  {count:>5}  {source}", whole=True)
        _print_more(console, len(ordered))
    if report.dates:
        say(console, f"dates: {report.dates[0]} to {report.dates[1]}")
    _print_outliers(console, calibration)


def print_merged(merged: Merged, refused: Sequence[str] = ()) -> None:
    """The number of added records; refused rows go to stderr."""
    for line in refused:
        say(open_console(stderr=True), f"left out: {line}")
    console = open_console()
    for gpu, count in merged.added.items():
        number = "1 new record" if count == 1 else f"{count} new records"
        say(console, f"{gpu}: {number}; fit with: whichlora calibrate --gpu {gpu}", whole=True)
    if merged.known or not merged.added:
        were = "1 record was" if merged.known == 1 else f"{merged.known} records were"
        say(console, f"{were} here already")


def _print_outliers(console: Console, calibration: Calibration) -> None:
    if calibration.outliers:
        table = new_table(
            "down-weighted record", "phase", "measured / fitted", "weight",
            right=("measured / fitted", "weight"),
        )  # fmt: skip
        for outlier in calibration.outliers[:MAX_REASONS]:
            table.add_row(
                outlier.record, outlier.phase, f"{outlier.ratio:.2f}", f"{outlier.weight:.2g}"
            )
        print_whole(console, table)
        _print_more(console, len(calibration.outliers))
    if calibration.left_out:
        for record, why in list(calibration.left_out.items())[:MAX_REASONS]:
            say(console, f"left out: {record}: {why}")
        _print_more(console, len(calibration.left_out))


def _print_more(console: Console, count: int) -> None:
    if count > MAX_REASONS:
        say(console, f"… and {count - MAX_REASONS} more; all with --json")


def _num_runs(calibration: Calibration, phase: str) -> int:
    return (calibration.memory if phase == "memory" else calibration.time[phase]).num_runs


def _efficiency(name: str, coefficient: float) -> str:
    if name in PER_COUNT:
        return format_seconds(coefficient)
    return f"{1 / coefficient:.0%}" if coefficient else "free"


def _range(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return "-"
    low, high = (format_count(bound) for bound in bounds)
    return low if low == high else f"{low} to {high}"


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({count})" for name, count in ordered[:MAX_REASONS]]
    more = len(ordered) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
