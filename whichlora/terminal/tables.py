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
        """A console on which text can't move the cursor, change colours or hide."""

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
    """`text` as it is: on a terminal broken between words, what follows its first line indented.

    Elsewhere a line stays a line, for whatever reads it; brackets are never markup.

    Args:
        whole: it holds a path or a command, which must stay in one piece to be copied.
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
    """`rows` under `columns`; where the console is too narrow for them, less of them.

    Args:
        right: columns of numbers, which are never broken.
        lift: columns that are said once above the table, the first to go first, if all their
            cells are the same.
        spare: columns that are left out, the first to go first.
    """
    from rich.text import Text

    kept = {name: [visible(row[i]) for row in rows] for i, name in enumerate(columns)}
    lifted, missing = _narrow(kept, console.width, lift, spare)
    said = "; ".join(f"{name}: {cell}" for name, cell in lifted.items() if cell not in ("", "-"))
    if title or said:
        say(console, f"{title} ({said})" if title and said else title or said)
    numbers = set(right)
    table = new_table(*kept, right=numbers)
    for column in table.columns:
        column.no_wrap = column.header in numbers
    for row in zip(*kept.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    if caption:
        say(console, caption)
    if missing:
        say(console, f"a wider terminal also shows: {', '.join(missing)}")


def _narrow(
    kept: dict[str, list[str]], width: int, lift: Sequence[str], spare: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Take columns out of `kept` until it fits: what they all said, and what is lost."""
    from rich.cells import cell_len

    def fits() -> bool:
        widths = [max(map(cell_len, (name, *cells))) for name, cells in kept.items()]
        return sum(widths) + 3 * (len(widths) - 1) + 2 <= width  # with the blanks between them

    lifted: dict[str, str] = {}
    for name in lift:
        if not fits() and len(set(kept.get(name, ()))) == 1:
            lifted[name] = kept.pop(name)[0]
    if not fits() and "model" in kept:
        short = {model: model.rpartition("/")[2] for model in kept["model"]}
        if len(set(short.values())) == len(short):  # no two organisations with one name
            kept["model"] = [short[model] for model in kept["model"]]
    missing = []
    for name in spare:
        if not fits() and name in kept:
            del kept[name]
            missing.append(name)
    return lifted, missing
