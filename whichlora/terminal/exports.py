"""An export for another tool: the prediction before and after, and the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.predict.words import VERDICTS, describe
from whichlora.terminal.tables import new_table, open_console, print_whole, say
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.export import WrittenExport


def print_export(written: WrittenExport) -> None:
    """The prediction before and after, what makes the difference, and the files."""
    console = open_console()
    rows = {"as recommended": written.before, f"under {written.to}": written.after}
    numbers = ("peak", "95 % interval", "time /step")
    table = new_table(describe(written.before.run), *numbers, "fits", right=numbers)
    for name, prediction in rows.items():
        low, high = prediction.memory.interval_bytes
        table.add_row(
            name,
            format_bytes(prediction.memory.device_used_bytes),
            f"{format_bytes(low)} - {format_bytes(high)}",
            format_seconds(prediction.time.step_s or 0),
            VERDICTS[prediction.verdict],
        )
    print_whole(console, table)
    for name, (then, now) in written.changes.items():
        say(console, f"{written.to} changes {name}: {then} to {now}")
    for note in written.export.notes:
        say(console, f"note: {note}")
    say(console, f"basis: {written.after.basis}")
    for path in written.paths:
        say(console, f"written: {path}", whole=True)
    say(console, f"start it there with: {written.export.command}", whole=True)
