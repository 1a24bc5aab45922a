"""Settings as YAML that every reader takes the same way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_WORDS_WITH_A_MEANING = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def yaml_text(settings: Mapping[str, Any], *, head: str = "") -> str:
    """`settings` in block style, in their order, under `head` as comment lines.

    Floats are written as 2.0e-4: without the point, PyYAML hands on a string.
    """
    comment = "".join(f"# {line}\n" if line else "#\n" for line in head.splitlines())
    return comment + "\n".join(_lines(settings)) + "\n"


def _lines(settings: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            lines.append(f"{indent}{key}:")
            for item in value:
                if isinstance(item, Mapping):
                    first, *rest = _lines(item, indent + "    ")
                    lines += [f"{indent}  - {first.strip()}", *rest]
                else:
                    lines.append(f"{indent}  - {_scalar(item)}")
        elif isinstance(value, str) and "\n" in value:
            lines.append(f"{indent}{key}: |")
            lines += [f"{indent}  {line}" for line in value.strip("\n").split("\n")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


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
    return json.dumps(text, ensure_ascii=False)


def _float(value: float) -> str:
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    if exponent and "." not in mantissa:
        mantissa += ".0"
    if exponent:
        return f"{mantissa}e{int(power):+d}"
    return text
