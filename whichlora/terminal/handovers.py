"""What was written for another tool, and what changes under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.terminal.tables import new_table, open_console, say
from whichlora.terminal.words import VERDICTS, describe
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.export import Handover


def print_handover(done: Handover) -> None:
    """The prediction before and after, what makes the difference, and the files."""
    console = open_console()
    rows = {"as recommended": done.before, f"under {done.to}": done.after}
    numbers = ("peak", "95 % interval", "time /step")
    table = new_table(describe(done.before.run), *numbers, "fits", right=numbers)
    for name, one in rows.items():
        low, high = one.memory.interval_bytes
        table.add_row(
            name,
            format_bytes(one.memory.device_used_bytes),
            f"{format_bytes(low)} - {format_bytes(high)}",
            format_seconds(one.time.step_s or 0),
            VERDICTS[one.verdict],
        )
    console.print(table)
    for name, (then, now) in done.changes.items():
        say(console, f"{done.to} changes {name}: {then} to {now}")
    for note in done.export.notes:
        say(console, f"note: {note}")
    say(console, f"basis: {done.after.basis}")
    for path in done.paths:
        say(console, f"written: {path}", whole=True)
    say(console, f"start it there with: {done.export.command}", whole=True)
