"""Local files → rows with their lines; the standard library reads all but Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from whichlora.dataset.base import Row
from whichlora.errors import ConfigError, DataFileError


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Each row of `path` with its line, or with its number where the format has no lines.

    Raises:
        DataFileError: not readable, or not what its suffix says, with the line.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataFileError(
            f"{path}: can't be read as {path.suffix or 'a file without suffix'}; "
            f"accepted: {', '.join(_READERS)}"
        )
    try:
        yield from reader(path)
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be read ({error.strerror or error}); check the path"
        ) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataFileError(
                    f"{path}:{number}: is not UTF-8 text (byte 0x{line[error.start]:02x}); "
                    "save the file as UTF-8"
                ) from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataFileError(
                f"{path}:{number}: is not JSON: {reason}; correct the line"
            ) from None
        if not isinstance(row, dict):
            raise DataFileError(
                f"{path}:{number}: is not a JSON object, got {type(row).__name__}; "
                'write {"column": value, …} per line'
            )
        yield number, row


def _read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """A list of objects, or an object per line, which many files of this name hold."""
    try:
        rows = json.loads("".join(line for _, line in _lines(path)))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _read_jsonl(path)
            return
        raise DataFileError(
            f"{path}:{error.lineno}: is not JSON: {error.msg}; correct it"
        ) from None
    except (ValueError, RecursionError) as error:  # numbers or lists that are too deep to read
        raise DataFileError(f"{path}: is not JSON: {error}; correct it") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise DataFileError(f"{path}: is not a JSON list of objects; one row is one object")
    yield from enumerate(rows, start=1)


def _read_csv(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # its 128 KiB are less than one long document
    _, header = next(_lines(path), (1, ""))
    reader = csv.reader(
        (line for _, line in _lines(path)), delimiter=_delimiter(path, header), strict=True
    )
    try:
        columns = next(reader, [])
        twice = [column for column in columns if columns.count(column) > 1]
        if twice:
            raise DataFileError(f"{path}:1: has the column {twice[0]!r} twice; rename one of them")
        for values in reader:
            if values and len(values) != len(columns):
                raise DataFileError(
                    f"{path}:{reader.line_num}: has {len(values)} values for the "
                    f"{len(columns)} columns {', '.join(columns)}; quote a value that holds the "
                    "delimiter"
                )
            if values:
                yield reader.line_num, dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise DataFileError(f"{path}:{reader.line_num}: is not CSV: {error}; correct it") from None


def _delimiter(path: Path, header: str) -> str:
    """A comma, or what spreadsheets write too where the header has none: a semicolon or a tab."""
    if path.suffix == ".tsv":
        return "\t"
    return next((mark for mark in (",", ";", "\t") if mark in header), ",")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"dataset.path: reading {path} needs pyarrow; pip install 'whichlora[profile]', or "
            "give JSONL"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise DataFileError(f"{path}: is not Parquet: {error}; write it again") from None
    yield from enumerate(rows, start=1)


def _read_text(path: Path) -> Iterator[tuple[int, Row]]:
    """One row per line that is not blank."""
    for number, line in _lines(path):
        if line.strip():
            yield number, {"text": line.rstrip("\r\n")}


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
