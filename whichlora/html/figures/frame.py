"""Shared parts of the figures: the frame, the limits, and the best candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from whichlora.html.marks import Figure
from whichlora.html.source import Estimate, Point, Source

MAX_ERROR_BARS = 80  # points; more bars would overlap, and the hover text has the interval
WITHIN_REACH = 4.0  # a limit this many times beyond the largest point still gets its line
SIDE_BY_SIDE = ([0.0, 0.455], [0.545, 1.0])  # of two plots in one figure


def new_figure(name: str, title: str, about: str, data: Sequence[Any], **layout: Any) -> Figure:
    return {
        "id": name,
        "title": title,
        "about": about,
        "data": list(data),
        "layout": {"margin": {"l": 72, "r": 16, "t": 16, "b": 56}, "hovermode": "closest"} | layout,
    }


def shown_values(estimates: Sequence[Estimate]) -> list[float]:
    """The values that an axis must show, with the ends of error bars that are drawn."""
    if len(estimates) > MAX_ERROR_BARS:
        return [estimate.value for estimate in estimates]
    return [
        value for estimate in estimates for value in (estimate.low, estimate.value, estimate.high)
    ]


def limit_lines(
    limits: Sequence[tuple[float | None, str, Callable[[float], str], str, list[float]]],
    axis: str = "",
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Lines and labels of the limits near the points; the axis is widened to show them.

    A limit far beyond every point would press them into a corner: it gets a sentence instead.
    """
    lines, labels, beyond = [], [], ""
    for value, name, show, across, values in limits:
        if value is None:
            continue
        if not min(values) / WITHIN_REACH <= value <= max(values) * WITHIN_REACH:
            where = "above" if across == "y" else "right of"
            where = where if value > max(values) else "below" if across == "y" else "left of"
            beyond += f" The {name} of {show(value)} lies {where} the plot."
            continue
        values.append(value)
        line, label = limit_line(value, f"{name} {show(value)}", across=across, axis=axis)
        lines.append(line)
        labels.append(label)
    return lines, labels, beyond


def limit_line(
    value: float, text: str, *, across: str, axis: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dashed line through the whole plot at `value`, and its label.

    Args:
        across: "y" for a limit of the vertical axis, "x" for one of the horizontal.
        axis: number of the axis where there are several, as plotly counts them.
    """
    along = "x" if across == "y" else "y"
    domain = f"{along}{axis} domain"
    line = {
        "type": "line",
        f"{across}ref": f"{across}{axis}",
        f"{across}0": value,
        f"{across}1": value,
        f"{along}ref": domain,
        f"{along}0": 0,
        f"{along}1": 1,
        "line": {"dash": "dash", "width": 1.5, "color": "#C03028"},
    }
    label = {
        f"{across}ref": f"{across}{axis}",
        across: math.log10(value),
        f"{along}ref": domain,
        along: 1 if across == "y" else 0,
        "text": text,
        "showarrow": False,
        "xanchor": "right",
        "yanchor": "bottom",
        "font": {"size": 11, "color": "#C03028"},
    }
    return line, label


def best_of_each(source: Source, count: int) -> list[int]:
    """The winner, then the best-ranked candidate of each model, then of each variant of a model."""
    order = sorted(
        source.indices("finetune"),
        key=lambda i: (i != source.winner, *_rank(source.points[i])),
    )
    models: dict[str, int] = {}
    variants: dict[tuple[str, str], int] = {}
    for i in order:
        point = source.points[i]
        models.setdefault(point.model, i)
        variants.setdefault((point.model, point.variant), i)
    return list(dict.fromkeys([*models.values(), *variants.values()]))[:count]


def _rank(point: Point) -> tuple[bool, bool, int, float]:
    """As the search ranks: candidates that meet the limits, then larger models, then faster ones.

    Without a time, larger batches come first.
    """
    time = -point.batch_size if point.total_s is None else point.total_s.value
    return (point.failed, point.verdict == "misses", -point.num_params, time)
