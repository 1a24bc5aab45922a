"""CSV files with a header, each fault one line with its place."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from whichlora.errors import DataFileError
from whichlora.store.jsonfiles import check_plain_file
from whichlora.units import MiB

_MOST_BYTES = 4 * MiB


def read_table(
    path: Path, columns: tuple[str, ...], needed: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Rows of the CSV file at `path`, each with its place for messages, "prices.csv:3".

    Raises:
        DataFileError: the file can't be read, or a column or a value is missing or unknown.
    """
    try:
        check_plain_file(path, _MOST_BYTES)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataFileError(f"{path}: can't be read ({reason}); check the file") from None
    reader = csv.DictReader(text.splitlines(), restkey="")
    header = tuple(name.strip() for name in reader.fieldnames or ())
    if missing := [name for name in needed if name not in header]:
        raise DataFileError(f"{path}: has no column {missing[0]}; needed are {', '.join(needed)}")
    if unknown := [name for name in header if name not in columns]:
        raise DataFileError(
            f"{path}: column {unknown[0]!r} is not known; accepted are {', '.join(columns)}"
        )
    reader.fieldnames = list(header)
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if "" in row:
            raise DataFileError(f"{where}: has more cells than the {len(header)} columns; mend it")
        cells = {name: (value or "").strip() for name, value in row.items()}
        for name in needed:
            if not cells[name]:
                raise DataFileError(f"{where}: {name} is empty; fill it or remove the row")
        yield where, cells


def number(cells: Mapping[str, str], name: str, where: str) -> float:
    """The number in one cell.

    Raises:
        DataFileError: it is none.
    """
    try:
        return float(cells[name])
    except ValueError:
        raise DataFileError(f"{where}: {name} is not a number, got {cells[name]!r}") from None
