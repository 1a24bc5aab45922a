"""Cells of a notebook of Jupyter, as text; nothing is run."""

from __future__ import annotations

import json
from collections.abc import Sequence


def code_cells(text: str) -> Sequence[str] | None:
    """The source of each cell of code; None of a text that is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
