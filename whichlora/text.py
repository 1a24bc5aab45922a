"""Make text of a user safe for code, a shell, a spreadsheet and a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence

from whichlora.errors import ConfigError


def require_printable(setting: str, text: str) -> str:
    """`text`, if every character of it can be seen: no line ends, controls or bidi overrides.

    Raises:
        ConfigError: it is no text, is blank, or has such a character.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{setting}: must be text, got {type(text).__name__}")
    if not text.strip():
        raise ConfigError(f"{setting}: is blank; give a name")
    if not text.isprintable():
        hidden = next(character for character in text if not character.isprintable())
        raise ConfigError(
            f"{setting}: {text!a} holds the character U+{ord(hidden):04X}, which can't be "
            "seen; rename it"
        )
    return text


def visible(text: str, *, keep: str = "") -> str:
    """`text` for people, with the characters that a terminal acts on or hides as escapes.

    Args:
        keep: characters that stay, such as a line end.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


# Excel, LibreOffice and Google Sheets read a cell that begins with these as a formula.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")


def csv_cell(text: str) -> str:
    """`text` as a cell that no spreadsheet runs; `from_csv_cell` gives it back.

    An apostrophe in front marks it as text, there and for us; a text that begins with one gets
    another. A number keeps its sign.
    """
    if text.startswith("'") or (_FORMULA.match(text) and not _NUMBER.fullmatch(text)):
        return f"'{text}"
    return text


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """`rows` as CSV that no spreadsheet runs; numbers stay numbers."""
    text = io.StringIO()
    plain = csv.writer(text, lineterminator="\n")
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        cells = [csv_cell(cell) if isinstance(cell, str) else cell for cell in row]
        # with this line end the writer does not quote a carriage return, which no reader takes
        returns = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (quoted if returns else plain).writerow(cells)
    return text.getvalue()


def from_csv_cell(cell: str) -> str:
    """The inverse of `csv_cell`; another cell with an apostrophe in front stays as it is."""
    escaped = cell[:1] == "'" and (cell[1:2] == "'" or _FORMULA.match(cell[1:]))
    return cell[1:] if escaped else cell


def quoted(text: str) -> str:
    """`text` in double quotes, as Python and YAML 1.2 both read it back; all of it can be seen."""
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(text, ensure_ascii=False)
    )
