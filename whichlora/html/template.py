"""A page with slots: `{{name}}` becomes a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def filled(template: str, texts: Mapping[str, str]) -> str:
    """`template` with each slot filled once: filled-in text may itself look like a slot."""
    first, *slots = template.split("{{")
    parts = [first]
    for piece in slots:
        slot, _, text = piece.partition("}}")
        parts += [texts[slot], text]
    return "".join(parts)


def script_json(values: Any) -> str:
    """JSON that is safe inside a script element: no text in it can close the element."""
    text = json.dumps(values, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
