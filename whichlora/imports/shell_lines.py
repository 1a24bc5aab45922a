"""Lines of a shell script as the shell joins them: continued ones in one, comments left out.

A comment reaches to the end of its line, a backslash there included, and so ends a command that the
line before it continues.
"""

from __future__ import annotations

from collections.abc import Iterator

CUT = "\x01"  # before the number of a comment's line, as the last word of what the comment ends
_QUOTES = ("'", '"')
_BEFORE_COMMENT = " \t;&|()"


def logical_lines(text: str) -> Iterator[str]:
    """The lines of `text`; one that a comment ends has a last word of CUT and a number."""
    joined, quote = "", ""
    for number, line in enumerate(text.replace(CUT, "").splitlines(), 1):
        start, quote, continues = _scanned(line, quote, joined[-1:] or " ")
        if start is not None:
            cut = f" {CUT}{number}" if joined.strip() and not line[:start].strip() else ""
            yield f"{joined}{line[:start]}{cut}"
            joined = ""
        elif continues:
            joined += f"{line[:-1]} "
        else:
            yield joined + line
            joined = ""
    if joined:
        yield joined


def _scanned(line: str, quote: str, before: str) -> tuple[int | None, str, bool]:
    """Where a comment starts, the quote that is open at the end, and whether the line goes on.

    Args:
        quote: that is open at its start.
        before: the last character of what it continues.
    """
    escaped = False
    for place, character in enumerate(line):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character == "#" and before in _BEFORE_COMMENT:
            return place, "", False
        before = character
    return None, quote, escaped
