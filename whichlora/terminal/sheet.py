"""One table as rows of text, shown on a terminal or written as Markdown; rows as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whichlora.terminal.tables import new_table
from whichlora.text import csv_text

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 110  # columns of a terminal from which wide tables are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table: `right` names the columns of numbers, `rules` the rows that end a section."""

    title: str
    columns: tuple[str, ...]
    right: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    rules: frozenset[int] = frozenset()


def show(console: Console, sheet: Sheet) -> None:
    """Print `sheet`; brackets are shapes here, never markup."""
    from rich.text import Text

    table = new_table(*sheet.columns, right=sheet.right)
    for i, row in enumerate(sheet.rows):
        table.add_row(*(Text(cell) for cell in row), end_section=i in sheet.rules)
    console.print(sheet.title, markup=False)
    console.print(table)


def as_markdown(sheet: Sheet) -> str:
    """`sheet` under a heading, one line per row."""
    rule = ["---:" if column in sheet.right else "---" for column in sheet.columns]
    lines = [sheet.columns, rule, *sheet.rows]
    table = "\n".join(f"| {' | '.join(cell.strip() for cell in line)} |" for line in lines)
    return f"## {sheet.title}\n\n{table}\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`, which have the same columns, below their names; no cell is a formula."""
    names = list(rows[0]) if rows else []
    return csv_text([names, *([row[name] for name in names] for row in rows)]) if rows else ""
