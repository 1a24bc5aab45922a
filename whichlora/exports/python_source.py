"""Python source as a formatter lays it out: calls, literals and import lines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from whichlora.text import quoted

_LINE_LENGTH = 88
_INLINE_LENGTH = 72  # of a bracketed expression; the text before it needs room too


class Code(str):
    """A Python expression, as opposed to a string literal of the script."""

    __slots__ = ()


def call(function: str, *arguments: Any, **keywords: Any) -> Code:
    """A call, laid out as a formatter would."""
    items = [literal(argument) for argument in arguments]
    for name, value in keywords.items():
        items.append(f"{name}{literal(value)}" if name == "**" else f"{name}={literal(value)}")
    return Code(_bracketed(f"{function}(", items, ")"))


def literal(value: Any) -> str:
    """`value` as source; JSON types and code only.

    Raises:
        TypeError: another type, whose `repr` might be anything.
    """
    if isinstance(value, Code):
        return value
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        items = [f"{literal(name)}: {literal(item)}" for name, item in value.items()]
        return _bracketed("{", items, "}")
    if isinstance(value, list | tuple):
        return _bracketed("[", [literal(item) for item in value], "]")
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no literal")


def _bracketed(opening: str, items: Sequence[str], closing: str) -> str:
    inline = f"{opening}{', '.join(items)}{closing}"
    if len(inline) <= _INLINE_LENGTH and "\n" not in inline:
        return inline
    lines = indent("".join(f"{item},\n" for item in items), "    ")
    return f"{opening}\n{lines}{closing}"


def import_lines(body: str, importable: Mapping[str, Sequence[str]]) -> str:
    """Import lines for the names of `importable` that `body` uses."""
    lines = []
    for module, names in importable.items():
        used = [name for name in names if re.search(rf"\b{name}\b", body)]
        if not used:
            continue
        line = f"from {module} import {', '.join(used)}"
        if len(line) > _LINE_LENGTH:
            line = _bracketed(f"from {module} import (", used, ")")
        lines.append(line)
    return "\n".join(lines)
