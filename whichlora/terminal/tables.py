"""How tables look, on a terminal and in a file."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from whichlora.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

MAX_REASONS = 12
_GAP = 3  # blanks between two columns
_MEMORY = ("peak", "memory")  # which of the numbers of a table stays longest
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

    Where that is not enough, lines run over its edge: no word is cut.

    Args:
        right: columns of numbers, whose cells are never broken.
        lift: columns that a narrow console shows once above the table if all their cells are
            equal; the first one goes first.
        spare: columns that a narrow console leaves out after that; the first one goes first. Then
            the other numbers go, from the right, but for the memory or the first.
    """
    numbers = [name for name in columns if name in set(right)]
    cells_by_column = {name: [visible(row[i]) for row in rows] for i, name in enumerate(columns)}
    lifted, missing = _narrow(cells_by_column, console.width, lift, spare, numbers)
    lifted_text = "; ".join(
        f"{name}: {cell}" for name, cell in lifted.items() if cell not in ("", "-")
    )
    if title or lifted_text:
        say(console, f"{title} ({lifted_text})" if title and lifted_text else title or lifted_text)
    print_whole(console, _table(cells_by_column, numbers))
    if caption:
        say(console, caption)
    if missing:
        say(console, f"a wider terminal also shows: {', '.join(missing)}")


def _table(cells_by_column: Mapping[str, Sequence[str]], numbers: Sequence[str]) -> Table:
    from rich.text import Text

    table = new_table(*cells_by_column, right=numbers)
    for row in zip(*cells_by_column.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table of texts: a narrow console breaks them between words, and never within.

    Heads are broken first; numbers, which stand on the right, never are. Where that is not enough,
    lines run over the edge.
    """
    columns = [
        _Column(str(each.header), [*map(str, each.cells)], each.justify == "right")
        for each in table.columns
    ]
    widths, gap = _widths(columns, console.width)
    table.padding = (0, gap - 2, 0, 1)
    if (taken := _taken(widths, gap)) > console.width:
        table.width = taken
    for width, column in zip(widths, table.columns, strict=True):
        column.width = width
    console.print(table, crop=False)


class _Column(NamedTuple):
    name: str
    cells: Sequence[str]
    is_number: bool

    @property
    def least(self) -> int:
        """Its width where head and texts are broken between words, and numbers never."""
        return max(
            _longest([self.name], words=True), _longest(self.cells, words=not self.is_number)
        )


def _taken(widths: Iterable[int], gap: int = _GAP) -> int:
    """Columns of the terminal, with the blanks between those of the table."""
    each = list(widths)
    return sum(each) + gap * (len(each) - 1) + 2


def _longest(texts: Iterable[str], *, words: bool = False) -> int:
    from rich.cells import cell_len

    pieces = (piece for text in texts for piece in (text.split() if words else text.split("\n")))
    return max(map(cell_len, pieces), default=0)


def _widths(columns: Sequence[_Column], width: int) -> tuple[list[int], int]:
    """Of every column, and blanks between two: heads are broken, then texts, between words.

    Where that is not enough, columns stand closer.
    """
    whole = [max(_longest([each.name], words=True), _longest(each.cells)) for each in columns]
    words = [each.least for each in columns]
    widths = [max(whole[i], _longest([each.name])) for i, each in enumerate(columns)]
    gap = _GAP if _taken(words) <= width else _GAP - 1
    for least in (whole, words):
        while _taken(widths, gap) > width:
            wide = [i for i, taken in enumerate(widths) if taken > least[i]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths, gap


def _narrow(
    cells_by_column: dict[str, list[str]],
    width: int,
    lift: Sequence[str],
    spare: Sequence[str],
    numbers: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Take columns out until they fit: lifted name and cell, and the names left out."""

    def fits() -> bool:
        widths = [_longest((name, *cells)) for name, cells in cells_by_column.items()]
        return _taken(widths) <= width

    def fits_with_broken_heads() -> bool:
        least = (
            max(_longest([name], words=True), _longest(cells))
            for name, cells in cells_by_column.items()
        )
        return _taken(least) <= width

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
        if not fits_with_broken_heads() and name in cells_by_column:
            del cells_by_column[name]
            missing.append(name)
    left = [name for name in numbers if name in cells_by_column]
    kept = next((name for name in left if name in _MEMORY), left[0] if left else "")
    for name in reversed(left):
        columns = (_Column(each, cells, each in numbers) for each, cells in cells_by_column.items())
        if name != kept and _taken((each.least for each in columns), _GAP - 1) > width:
            del cells_by_column[name]
            missing.append(name)
    return lifted, missing
