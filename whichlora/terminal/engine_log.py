"""What an engine's log states beside what was predicted of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.predict.words import describe
from whichlora.terminal.tables import new_table, open_console, print_whole, say
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.engine_log import LogRecord


def print_log_record(found: LogRecord) -> None:
    """The run, its numbers and their errors, where it was recorded, and what was not read."""
    console = open_console()
    record = found.record
    versions = ", ".join(f"{name} {version}" for name, version in record.run.libraries)
    say(console, f"{describe(record.run)} on {record.gpu}{f', {versions}' if versions else ''}")
    if record.detail:
        say(console, f"it did not start: {record.detail}")
    numbers = ("predicted", "measured", "error")
    table = new_table("", *numbers, right=numbers)
    for name, measured in record.engine_log.items():
        predicted = found.predicted.get(name)
        shown = "-" if predicted is None else in_unit(name, predicted)
        error = "-" if not predicted or not measured else f"{predicted / measured - 1:+.1%}"
        table.add_row(name, shown, in_unit(name, measured), error)
    print_whole(console, table)
    say(console, found.note)
    how = "kept in" if found.is_new else "recorded before in"
    say(console, f"{how} {found.path}", whole=True)


def in_unit(name: str, value: float) -> str:
    """`value` in the unit that its name ends in."""
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") and "per_s" not in name else f"{value:,.6g}"
