"""How tables look, on a terminal and in a file."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whichlora.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

MAX_REASONS = 12
PLAIN_WIDTH = 160  # of output that is not a terminal: nothing is cut off


def open_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class VisibleConsole(Console):
        """A console whose text can't move the cursor, change colours or hide."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield segment._replace(text=visible(segment.text, keep="\n"))

        def on_broken_pipe(self) -> None:
            """Leave the exit code to the command line; rich's own 1 means that nothing fits."""
            raise

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return VisibleConsole(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def new_table(*columns: str, right: Iterable[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def say(console: Console, text: str, *, whole: bool = False) -> None:
    """Print `text` literally; brackets are never markup.

    A terminal wraps it between words, with continuation lines indented. Elsewhere a line stays
    one line, so that programs can read it.

    Args:
        whole: never wrap: a path or a command must stay in one piece to be copied.
    """
    if console.is_terminal and not whole:
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        lines = textwrap.wrap(
            text.strip(),
            console.width,
            initial_indent=indent[2:],
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(lines)
    console.print(text, markup=False, soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[str] = (),
    lift: Sequence[str] = (),
    spare: Sequence[str] = (),
    title: str = "",
    caption: str = "",
) -> None:
    """Print `rows` under `columns`; a narrow console shows fewer columns.

    Args:
        right: columns of numbers, which are never broken.
        lift: columns that a narrow console shows once above the table if all their cells are
            equal; the first one goes first.
        spare: columns that a narrow console leaves out after that; the first one goes first.
    """
    from rich.text import Text

    cells_by_column = {name: [visible(row[i]) for row in rows] for i, name in enumerate(columns)}
    lifted, missing = _narrow(cells_by_column, console.width, lift, spare)
    lifted_text = "; ".join(
        f"{name}: {cell}" for name, cell in lifted.items() if cell not in ("", "-")
    )
    if title or lifted_text:
        say(console, f"{title} ({lifted_text})" if title and lifted_text else title or lifted_text)
    numbers = set(right)
    table = new_table(*cells_by_column, right=numbers)
    for column in table.columns:
        column.no_wrap = column.header in numbers
    for row in zip(*cells_by_column.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    if caption:
        say(console, caption)
    if missing:
        say(console, f"a wider terminal also shows: {', '.join(missing)}")


def _narrow(
    cells_by_column: dict[str, list[str]], width: int, lift: Sequence[str], spare: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Take columns out until they fit: lifted name and cell, and the names left out."""
    from rich.cells import cell_len

    def fits() -> bool:
        widths = [max(map(cell_len, (name, *cells))) for name, cells in cells_by_column.items()]
        return sum(widths) + 3 * (len(widths) - 1) + 2 <= width  # with the blanks between them

    lifted: dict[str, str] = {}
    for name in lift:
        if not fits() and len(set(cells_by_column.get(name, ()))) == 1:
            lifted[name] = cells_by_column.pop(name)[0]
    if not fits() and "model" in cells_by_column:
        short = {model: model.rpartition("/")[2] for model in cells_by_column["model"]}
        if len(set(short.values())) == len(short):  # no two organisations with one name
            cells_by_column["model"] = [short[model] for model in cells_by_column["model"]]
    missing = []
    for name in spare:
        if not fits() and name in cells_by_column:
            del cells_by_column[name]
            missing.append(name)
    return lifted, missing
