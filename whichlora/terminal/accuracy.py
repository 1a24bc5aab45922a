"""The public page of a calibration: predicted against measured, by accelerator and software."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from whichlora import __version__
from whichlora.calibration.share.contribution import LEFT_OUT
from whichlora.terminal.sheet import Document, Sheet
from whichlora.terminal.tables import open_console, say
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.accuracy import Accuracy, Row
    from whichlora.workflow.contribute import Contribution

MOST_WORST = 5  # rows of each accelerator and quantity
MOST_LEFT_OUT = 12
_ERRORS = ("rows", "median", "p90", "worst", "inside", "stated")


def accuracy_document(accuracies: Sequence[Accuracy]) -> Document:
    """Errors by accelerator, by software, and the worst rows by name."""
    rows = [row for accuracy in accuracies for row in accuracy.rows]
    return Document(
        title="Predicted against measured",
        sheets=(
            _errors_sheet("by accelerator", ("accelerator", "quantity"), rows),
            _errors_sheet(
                "by accelerator and software", ("accelerator", "software", "quantity"), rows
            ),
            _worst_sheet(rows),
        ),
        lines=tuple(_closing(accuracies)),
    )


def contribution_document(contribution: Contribution) -> Document:
    """What reviewers read first: what is there, how plausible it is, and what was removed."""
    outcomes = Counter(
        (gpu, record.outcome) for gpu, records in contribution.records.items() for record in records
    )
    counted = [(gpu, outcome, str(count)) for (gpu, outcome), count in sorted(outcomes.items())]
    removed = Sheet(
        title="what was removed from every record",
        columns=("field", "what"),
        right=(),
        rows=list(LEFT_OUT.items()),
    )
    columns = ("accelerator", "outcome", "records")
    sheets = [Sheet(title="records", columns=columns, right=("records",), rows=counted)]
    if contribution.rows:
        names = ("accelerator", "quantity")
        sheets += [
            _errors_sheet("beside what this release predicts", names, contribution.rows),
            _worst_sheet(contribution.rows),
        ]
    lines = [f"left out: {why}: {count} records" for why, count in contribution.left_out.items()]
    if contribution.known:
        lines.append(f"in the shipped database already: {contribution.known} records")
    return Document(
        title=f"A contribution of {contribution.num_records} records",
        sheets=[*sheets, removed],
        lines=[
            *lines,
            "read the records before you publish them: each is a line of JSON in measurements/",
            "lengths of batches stay in them, since times mean nothing without",
            "`whichlora calibrate merge FOLDER` adds them to a database",
        ],
    )


def print_contribution(contribution: Contribution) -> None:
    console = open_console()
    for gpu, records in contribution.records.items():
        say(console, f"{gpu}: {len(records)} records")
    for why, count in contribution.left_out.items():
        say(console, f"left out: {why}: {count} records")
    if contribution.known:
        say(console, f"in the shipped database already: {contribution.known} records")
    say(console, f"removed from every record: {', '.join(LEFT_OUT)}")
    report = contribution.folder / "REPORT.md"
    say(console, f"read {report} and the records, then publish the folder", whole=True)


def _errors_sheet(title: str, names: tuple[str, ...], rows: Sequence[Row]) -> Sheet:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        of_row = {"accelerator": row.gpu, "software": row.software, "quantity": row.quantity}
        groups.setdefault(tuple(of_row[name] for name in names), []).append(row)
    return Sheet(
        title=title,
        columns=(*names, *_ERRORS),
        right=_ERRORS,
        rows=[(*key, *_summary(groups[key])) for key in sorted(groups)],
    )


def _summary(rows: Sequence[Row]) -> tuple[str, ...]:
    """Sizes of the errors, the worst with its sign, and how many values the intervals hold."""
    errors = sorted((row.error for row in rows), key=abs)
    sizes = [abs(error) for error in errors]
    bounded = [row for row in rows if row.bounds is not None]
    inside, stated = "-", "-"
    if bounded:
        inside = f"{sum(row.is_inside for row in bounded) / len(bounded):.0%}"
        stated = f"{bounded[0].confidence:.0%}"
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return (
        str(len(rows)),
        f"{median(sizes):.1%}",
        f"{p90:.1%}",
        f"{errors[-1]:+.1%}",
        inside,
        stated,
    )


def _worst_sheet(rows: Sequence[Row]) -> Sheet:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.quantity), []).append(row)
    numbers = ("measured", "predicted", "error")
    return Sheet(
        title=f"the {MOST_WORST} worst rows of each quantity",
        columns=("accelerator", "quantity", "run", "software", *numbers, "inside", "record"),
        right=numbers,
        rows=[
            (
                *key,
                row.run,
                row.software,
                *(_shown(row, value) for value in (row.measured, row.predicted)),
                f"{row.error:+.1%}",
                "-" if row.bounds is None else "yes" if row.is_inside else "no",
                row.record,
            )
            for key in sorted(groups)
            for row in sorted(groups[key], key=lambda row: -abs(row.error))[:MOST_WORST]
        ],
    )


def _shown(row: Row, value: float) -> str:
    return format_bytes(value) if row.unit == "bytes" else format_seconds(value)


def _closing(accuracies: Sequence[Accuracy]) -> Iterator[str]:
    """How the rows were made, and what is in none."""
    yield f"made by `whichlora calibrate report`, release {__version__}; no GPU is needed"
    yield (
        "errors are predicted over measured, less one; median and p90 are of sizes; inside: values "
        "within the stated interval, where a quantity has one"
    )
    yield (
        "each record is predicted by a fit that left out all records of its software, or of its "
        "model, or itself: the first of which there are three or more; the width of intervals is "
        "that of the stored fit"
    )
    for accuracy in accuracies:
        first, last = accuracy.dates
        records = f"{accuracy.num_records} records of {first} to {last}"
        yield f"{accuracy.gpu}: {records}; formulas {accuracy.formulas}"
        for record, why in list(accuracy.left_out.items())[:MOST_LEFT_OUT]:
            yield f"left out: {record}: {why}"
        if len(accuracy.left_out) > MOST_LEFT_OUT:
            yield f"… and {len(accuracy.left_out) - MOST_LEFT_OUT} more are left out"
