"""The report's figures as plotly's JSON, made without plotly.

A trace's `customdata` holds indices into the candidates. The page filters by them and adds the
hover text; an image needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from whichlora.html.figures.accuracy import accuracy
from whichlora.html.figures.dataset import dataset_size
from whichlora.html.figures.pairs import finetune_batches, inference_shapes
from whichlora.html.figures.parts import breakdown, side_by_side
from whichlora.html.figures.planes import finetune_plane, inference_plane
from whichlora.html.figures.waits import waits
from whichlora.html.marks import Figure, Marks, marks_of
from whichlora.html.source import Source


def build_figures(source: Source) -> list[Figure]:
    """Every figure that `source` has data for, in the order of the page."""
    marks = marks_of(source)
    makers: tuple[Callable[[Source, Marks], Figure | None], ...] = (
        finetune_plane,
        inference_plane,
        waits,
        inference_shapes,
        finetune_batches,
        dataset_size,
        accuracy,
        breakdown,
        side_by_side,
    )
    return [figure for make in makers if (figure := make(source, marks)) is not None]


__all__ = ["build_figures"]
