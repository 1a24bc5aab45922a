"""The parameter guide on a terminal, and as Markdown, CSV and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.predict.cost_words import cost_of, format_money, price_lines
from whichlora.predict.words import VERDICTS
from whichlora.spec.results import Refused
from whichlora.store.written import OTHER_OUTPUT, write_files
from whichlora.terminal.sheet import as_csv
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import refusals, shared_notes, variants
from whichlora.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from whichlora.workflow.guide import GuideRow

_COLUMNS = (
    "model",
    "accelerator",
    "method",
    "batch",
    "tokens",
    "memory",
    "95 % interval",
    "fits",
    "time for the data",
    "90 % interval",
    "cost",
    "tokens/s",
)
_TEXTS = ("model", "accelerator", "method", "strategy", "fits")
_PLAIN_WIDTH = 240  # of output that is not a terminal: two intervals need more than most tables
_STYLE = """\
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color-scheme: light dark; }
table { border-collapse: collapse; }
th, td { padding: .3em .8em; border-bottom: 1px solid #8884; text-align: left; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def is_spread(rows: Iterable[GuideRow]) -> bool:
    """Whether some run has several GPUs."""
    return any(not row.prediction.run.parallel.is_one_device for row in rows)


def flat_rows(rows: Sequence[GuideRow]) -> list[dict[str, Any]]:
    """`to_row` of all `rows`, which have the same columns."""
    spread, served = is_spread(rows), any(row.prediction.serving for row in rows)
    return [
        row.to_row()
        | (row.spread_columns() if spread else {})
        | (row.served_columns() if served else {})
        for row in rows
    ]


def print_guide(rows: Sequence[GuideRow], refused: Sequence[Refused] = ()) -> None:
    console = open_console()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    columns, cells = _table(rows)
    print_table(
        console,
        columns,
        cells,
        right=_numbers(columns),
        lift=("tokens", "model", "accelerator", "method", "batch"),
        spare=("tokens/s", "90 % interval", "95 % interval", "cost"),
    )
    for text in _footer(rows, refused):
        say(console, text)


def write_guide(path: Path, rows: Sequence[GuideRow], refused: Sequence[Refused] = ()) -> Path:
    """The guide in the format that the end of `path` names.

    Raises:
        ConfigError: another ending.
        DataFileError: it can't be written, or is a file of somebody else.
    """
    if path.suffix not in WRITERS:
        raise ConfigError(
            f"--output: {path} ends with {path.suffix or 'nothing'}; accepted are "
            f"{', '.join(WRITERS)}"
        )
    text = WRITERS[path.suffix](rows, refused)
    write_files({path: text.encode()}, instead=OTHER_OUTPUT)
    return path


def _markdown(rows: Sequence[GuideRow], refused: Sequence[Refused]) -> str:
    columns, cells = _table(rows)
    numbers = _numbers(columns)
    lines = [
        f"| {' | '.join(columns)} |",
        f"| {' | '.join('---:' if column in numbers else '---' for column in columns)} |",
        *(f"| {' | '.join(row)} |" for row in cells),
        "",
        *_footer(rows, refused),
    ]
    return "\n".join(lines) + "\n"


def _csv(rows: Sequence[GuideRow], refused: Sequence[Refused]) -> str:
    """In base units, for programs."""
    return as_csv(flat_rows(rows))


def _html(rows: Sequence[GuideRow], refused: Sequence[Refused]) -> str:
    """One page without a script."""
    columns, table = _table(rows)
    numbers = _numbers(columns)

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{escape(cell)}</{tag}>'
            if column in numbers
            else f"<{tag}>{escape(cell)}</{tag}>"
            for column, cell in zip(columns, cells, strict=True)
        )

    body = "\n".join(f"<tr>{line('td', cells)}</tr>" for cells in table)
    notes = "\n".join(f"<p>{escape(text)}</p>" for text in _footer(rows, refused))
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>Parameter guide</title>\n<style>\n{_STYLE}</style>\n"
        f"<h1>Parameter guide</h1>\n<table>\n<thead><tr>{line('th', columns)}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n{notes}\n</html>\n"
    )


WRITERS: dict[str, Callable[[Sequence[GuideRow], Sequence[Refused]], str]] = {
    ".md": _markdown,
    ".csv": _csv,
    ".html": _html,
}


def _table(rows: Sequence[GuideRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells; the GPUs and their strategy where a run has several."""
    spread = is_spread(rows)
    columns = (*_COLUMNS[:2], *(("GPUs", "strategy") if spread else ()), *_COLUMNS[2:])
    predictions = [row.prediction for row in rows]
    names = variants([each.run for each in predictions], [each.gpu for each in predictions])
    cells = [_cells(row, name, spread=spread) for row, name in zip(rows, names, strict=True)]
    return columns, cells


def _numbers(columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(column for column in columns if column not in _TEXTS)


def _cells(row: GuideRow, name: str, *, spread: bool) -> tuple[str, ...]:
    prediction, run = row.prediction, row.prediction.run
    low, high = prediction.memory.interval_bytes
    low_s, high_s = row.total_interval_s
    return (
        run.model,
        prediction.gpu,
        *((str(run.parallel.gpus), run.parallel.in_words) if spread else ()),
        name,
        str(run.batch_size),
        str(run.seq_len if run.phase == "finetune" else run.longest_sequence),
        format_bytes(prediction.memory.device_used_bytes),
        f"{format_bytes(low)} - {format_bytes(high)}",
        VERDICTS[prediction.verdict],
        format_seconds(row.total_s),
        "-" if math.isnan(low_s) else f"{format_seconds(low_s)} - {format_seconds(high_s)}",
        format_money(row.money, "" if row.offer is None else row.offer.currency),
        format_count(row.tokens_per_s),
    )


def _costs(rows: Sequence[GuideRow]) -> list[str]:
    """What the only training takes; of several, the prices behind their column."""
    cost = rows[0].prediction.cost if len(rows) == 1 else None
    if cost is None:
        return price_lines([row.prediction for row in rows])
    return cost_of(cost, rows[0].total_s, "the data")


def _footer(rows: Sequence[GuideRow], refused: Sequence[Refused]) -> list[str]:
    bases = dict.fromkeys(f"{row.prediction.gpu}: {row.prediction.basis}" for row in rows)
    notes = shared_notes([row.prediction for row in rows])
    return [
        *refusals(refused),
        *_costs(rows),
        *(f"basis: {text}" for text in bases),
        *(f"note: {text}" for text in notes),
    ]
