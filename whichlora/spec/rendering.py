"""How a value shows itself in a notebook: whoever can draw it registers; nothing here knows who."""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def notebook_html(value: object) -> str | None:
    """`value` as HTML; None where nobody has registered how it looks."""
    return None


class Rendered:
    """A value that a notebook shows by `notebook_html`; where that is None, by its repr."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return notebook_html(self)
