"""Settings as YAML that every parser reads alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from whichlora.text import quoted

_PLAIN = re.compile(r"\.|(?:[A-Za-z_/]|\./)[\w./-]*")
_WORDS_WITH_A_MEANING = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(settings: Mapping[str, Any], *, head: str = "", rate_comment: str = "") -> str:
    """`settings` in block style, in their order, under `head` as comment lines.

    Floats are written as 2.0e-4: without the point, PyYAML reads a string.

    Args:
        rate_comment: the line above `learning_rate`.
    """
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for key, value in settings.items():
        lines += rate_comment.splitlines() * (key == "learning_rate")
        lines += _lines({key: value})
    return "\n".join(lines) + "\n"


def _lines(settings: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in settings.items():
        name = _scalar(key)
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            lines.append(f"{indent}{name}:")
            for item in value:
                if isinstance(item, Mapping):
                    first, *following = _lines(item, indent + "    ")
                    lines += [f"{indent}  - {first.strip()}", *following]
                else:
                    lines.append(f"{indent}  - {_scalar(item)}")
        elif isinstance(value, str) and _is_block(value):
            lines.append(f"{indent}{name}: |")
            lines += [f"{indent}  {line}" for line in value.removesuffix("\n").split("\n")]
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}")
    return lines


def _is_block(text: str) -> bool:
    """Whether `text` is whole lines that a block can hold as they are."""
    lines = text.split("\n")
    plain = all(line and line.isprintable() and line[0] != " " for line in lines[:-1])
    return len(lines) > 1 and not lines[-1] and plain


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS_WITH_A_MEANING:
        return text
    return quoted(text)


def _float(value: float) -> str:
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    if exponent and "." not in mantissa:
        mantissa += ".0"
    if exponent:
        return f"{mantissa}e{int(power):+d}"
    return text
