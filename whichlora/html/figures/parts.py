"""Bytes by part of the best candidates, and of one shape with every method and rank."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from whichlora.html import axes
from whichlora.html.figures.frame import WITHIN_REACH, best_of_each, limit_line, new_figure
from whichlora.html.marks import MUTED, PART_COLOURS, Figure, Marks
from whichlora.html.source import Point, Source
from whichlora.units import format_bytes

MAX_BARS = 8


def breakdown(source: Source, marks: Marks) -> Figure | None:
    """Predicted bytes by part of the best candidates; the page swaps in any other."""
    chosen = [i for i in best_of_each(source, MAX_BARS) if source.points[i].breakdown]
    if not chosen:
        return None
    shown = [source.points[i] for i in chosen]
    names = [_bar_name(point) for point in shown]
    data = _stack(shown, names, horizontal=True)
    for trace in data:
        trace["customdata"] = chosen
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured peak",
            "x": [
                point.peak_bytes.value if point.measured and not point.failed else None
                for point in shown
            ],
            "y": names,
            "customdata": chosen,
            "marker": {
                "symbol": "line-ns-open",
                "size": 18,
                "color": "#C03028",
                "line": {"width": 3},
            },
            "hovertemplate": "measured peak<extra></extra>",
        }
    )
    highest = max(max(point.predicted_peak_bytes, point.peak_bytes.value) for point in shown)
    return new_figure(
        "breakdown",
        "What the bytes are",
        "Predicted bytes at the peak, by part. Choose any candidate below, or with its button in "
        "the table.",
        data,
        barmode="stack",
        xaxis=axes.linear_bytes_axis("device memory", highest),
        yaxis={"autorange": "reversed", "automargin": True},
        legend={"orientation": "h", "y": -0.25, "traceorder": "normal"},
    )


def _bar_name(point: Point) -> str:
    return escape(point.name, quote=False).replace(", ", "<br>", 1)


def side_by_side(source: Source, marks: Marks) -> Figure | None:
    """Bytes by part of one shape with every method and rank."""
    shown = [point for point in source.side_by_side if point.breakdown]
    if not shown:
        return None
    names: list[list[str]] = [
        [point.method for point in shown],
        [point.variant.partition("r=")[2] or "–" for point in shown],
    ]
    heights = [point.predicted_peak_bytes for point in shown]
    limit = source.limit("finetune_bytes") or source.limit("device_bytes")
    lines, labels, beyond = [], [], ""
    if limit is not None and limit <= WITHIN_REACH * max(heights):
        line, label = limit_line(limit, f"limit {format_bytes(limit)}", across="y")
        lines, labels = [line], [label | {"y": limit}]
        heights.append(limit)
    elif limit is not None:
        beyond = f" The limit of {format_bytes(limit)} lies above the plot."
    first = shown[0]
    axis = axes.linear_bytes_axis("device memory", max(heights))
    return new_figure(
        "methods",
        "Methods and ranks side by side",
        f"{first.model}, batch size {first.batch_size}, {first.tokens} tokens: predicted bytes at "
        f"the peak.{beyond}",
        _stack(shown, names, horizontal=False),
        barmode="stack",
        xaxis={"type": "multicategory", "tickangle": 0, "title": {"text": "rank and method"}},
        yaxis=axis,
        shapes=lines,
        annotations=labels,
        legend={"orientation": "h", "y": -0.25, "traceorder": "normal"},
    )


def _stack(points: Sequence[Point], names: Any, *, horizontal: bool) -> list[dict[str, Any]]:
    """One trace per part that any of `points` has."""
    parts = list(dict.fromkeys(part for point in points for part in point.breakdown))
    parts.sort(key=lambda part: list(PART_COLOURS).index(part) if part in PART_COLOURS else 99)
    data: list[dict[str, Any]] = []
    for part in parts:
        sizes = [point.breakdown.get(part, 0) for point in points]
        bars = {"x": sizes, "y": names} if horizontal else {"x": names, "y": sizes}
        data.append(
            {
                "type": "bar",
                "name": part.replace("_", " "),
                **bars,
                "text": [format_bytes(size) for size in sizes],
                "textposition": "none",
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
                "orientation": "h" if horizontal else "v",
                "marker": {"color": PART_COLOURS.get(part, MUTED)},
                "meta": {"part": part},
            }
        )
    return data
