"""One table as rows of text: on a terminal, in Markdown, in HTML; rows as CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from whichlora.terminal.tables import new_table, print_whole
from whichlora.text import csv_text, visible

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 110  # columns of a terminal from which wide tables are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table: `right` names the columns of numbers, `rules` the rows that end a section.

    Args:
        totals: rows in bold, where a form has that.
    """

    title: str
    columns: tuple[str, ...]
    right: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    rules: frozenset[int] = frozenset()
    totals: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """An answer for Markdown and for a notebook: a headline, tables, and lines below them."""

    title: str
    sheets: Sequence[Sheet]
    lines: Sequence[str] = ()


def show(console: Console, sheet: Sheet) -> None:
    """Print `sheet`; brackets are shapes here, never markup."""
    from rich.text import Text

    table = new_table(*sheet.columns, right=sheet.right)
    for i, row in enumerate(sheet.rows):
        table.add_row(*(Text(cell) for cell in row), end_section=i in sheet.rules)
    if sheet.title:
        console.print(sheet.title, markup=False)
    print_whole(console, table)


# What ends a cell, or begins code, HTML, a link or an image.
_MARKUP = re.compile(r"[\\`|<&]|\](?=[(\[:])|!(?=\[)")


def markdown_text(text: str) -> str:
    """`text` on one line of Markdown, where GitHub shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", visible(text))


def as_markdown(document: Document) -> str:
    """`document` as GitHub shows it: a table has one line per row."""
    parts = [f"# {markdown_text(document.title)}\n", *map(markdown_table, document.sheets)]
    return "\n".join([*parts, *(f"- {markdown_text(line)}" for line in document.lines)]) + "\n"


def markdown_table(sheet: Sheet) -> str:
    """One table as GitHub shows it, its title as a heading."""
    lines = [[markdown_text(cell.strip()) for cell in row] for row in (sheet.columns, *sheet.rows)]
    for i in sheet.totals:
        cells = zip(sheet.columns, lines[1 + i], strict=True)
        lines[1 + i] = [f"**{c}**" if c and name not in sheet.right else c for name, c in cells]
    lines.insert(1, ["---:" if column in sheet.right else "---" for column in sheet.columns])
    heading = f"## {markdown_text(sheet.title)}\n\n" if sheet.title else ""
    return heading + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_html(document: Document) -> str:
    """`document` for a notebook; no text in it is markup."""
    tables = "".join(map(_html_table, document.sheets))
    lines = "".join(f"<li>{_html_text(line)}</li>" for line in document.lines)
    return f"<div><p><b>{_html_text(document.title)}</b></p>{tables}<ul>{lines}</ul></div>"


def _html_table(sheet: Sheet) -> str:
    """Plain elements alone: the notebook's own theme styles them."""
    right = [' style="text-align: right"' * (column in sheet.right) for column in sheet.columns]

    def row(cells: Sequence[str], tag: str) -> str:
        each = zip(cells, right, strict=True)
        texts = (f"<{tag}{style}>{_html_text(cell)}</{tag}>" for cell, style in each)
        return f"<tr>{''.join(texts)}</tr>"

    rows = (row(cells, "th" if i in sheet.totals else "td") for i, cells in enumerate(sheet.rows))
    caption = f"<caption>{_html_text(sheet.title)}</caption>" if sheet.title else ""
    head = f"<thead>{row(sheet.columns, 'th')}</thead>"
    return f"<table>{caption}{head}<tbody>{''.join(rows)}</tbody></table>"


def _html_text(text: str) -> str:
    return escape(visible(text, keep="\n")).replace("\n", "<br>")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`, which have the same columns, below their names; no cell is a formula."""
    names = list(rows[0]) if rows else []
    return csv_text([names, *([row[name] for name in names] for row in rows)]) if rows else ""
