"""Time per token beside peak memory: by inference configuration, and by batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from whichlora.html import axes
from whichlora.html.figures.frame import (
    MAX_ERROR_BARS,
    SIDE_BY_SIDE,
    limit_lines,
    new_figure,
    shown_values,
)
from whichlora.html.marks import Figure, Marks, colour_legend, error_bars, shape_legend
from whichlora.html.source import Estimate, Point, Source
from whichlora.spec.numeric import ceil_div
from whichlora.units import format_bytes, format_seconds

MAX_NAMED_LINES = 12
MAX_SHAPE_LABELS = 6  # beside each other on paper


def inference_shapes(source: Source, marks: Marks) -> Figure | None:
    """Time per token and peak of every inference configuration, models side by side."""
    chosen = _timed(source, "inference")
    if not chosen:
        return None
    points = source.points
    shapes = list(dict.fromkeys((points[i].tokens, points[i].batch_size) for i in chosen))
    models = list(dict.fromkeys(points[i].model for i in chosen))
    step = 0.6 / max(1, len(models) - 1)

    def place(point: Point) -> float:
        beside = (models.index(point.model) - (len(models) - 1) / 2) * step
        return shapes.index((point.tokens, point.batch_size)) + beside

    groups = [
        (marks.labels[model], [i for i in chosen if points[i].model == model]) for model in models
    ]
    every = ceil_div(len(shapes), MAX_SHAPE_LABELS)
    figure = _pair(
        source,
        marks,
        groups,
        place=place,
        mode="markers",
        name="inference",
        title="Inference: each configuration",
        about="Crosses ran out of memory, or would by prediction (open).",
        xaxis={
            "title": {"text": "prompt + new tokens, batch size"},
            "range": [-0.5, len(shapes) - 0.5],
            "tickangle": 0,
            "tickvals": list(range(0, len(shapes), every)),
            "ticktext": [
                "<br>+".join(tokens.split("+")) + f"<br>batch {batch}"
                for tokens, batch in shapes[::every]
            ],
        },
        limits=("time_per_token_s", "inference_bytes"),
    )
    return _with_colour_legend(figure, marks, points)


def _timed(source: Source, stage: str) -> list[int]:
    return [i for i in source.indices(stage) if source.points[i].time_per_token_s is not None]


def finetune_batches(source: Source, marks: Marks) -> Figure | None:
    """Time per token and peak by batch size, one line per model and variant."""
    chosen = _timed(source, "finetune")
    if not chosen:
        return None
    points = source.points
    groups: dict[tuple[str, str], list[int]] = {}
    for i in sorted(chosen, key=lambda i: points[i].batch_size):
        groups.setdefault((points[i].model, points[i].variant), []).append(i)
    batches = sorted({points[i].batch_size for i in chosen})
    figure = _pair(
        source,
        marks,
        [
            (f"{marks.labels[model]} {variant}", indices)
            for (model, variant), indices in groups.items()
        ],
        place=lambda point: batches.index(point.batch_size),
        mode="lines+markers",
        name="finetune",
        title="Fine-tuning: by batch size",
        about="One line per model and variant. Crosses ran out of memory, or would by prediction.",
        xaxis={
            "title": {"text": "batch size"},
            "range": [-0.3, len(batches) - 0.7],
            "tickvals": list(range(len(batches))),
            "ticktext": [str(batch) for batch in batches],
        },
        limits=(None, "finetune_bytes"),
    )
    if len(groups) > MAX_NAMED_LINES:
        return _with_colour_legend(figure, marks, points)
    return figure


def _with_colour_legend(figure: Figure, marks: Marks, points: Sequence[Point]) -> Figure:
    """A legend of what colours and shapes mean, in place of one entry per line."""
    shown = [points[i] for trace in figure["data"] for i in trace["customdata"]]
    for trace in figure["data"]:
        trace |= {"showlegend": False, "legendgroup": points[trace["customdata"][0]].model}
    figure["data"] += colour_legend(marks, shown) + shape_legend(marks, shown)
    return figure


def _pair(
    source: Source,
    marks: Marks,
    groups: Sequence[tuple[str, list[int]]],
    *,
    place: Callable[[Point], float],
    mode: str,
    name: str,
    title: str,
    about: str,
    xaxis: dict[str, Any],
    limits: tuple[str | None, str],
) -> Figure:
    """Time per token on the left, peak on the right, over the same horizontal axis."""
    points = source.points
    data: list[dict[str, Any]] = []
    num_shown = sum(len(indices) for _, indices in groups)
    shown: tuple[list[float], list[float]] = ([], [])
    for label, indices in groups:
        group_points = [points[i] for i in indices]
        for axis, quantity in enumerate(("time_per_token_s", "peak_bytes")):
            estimates: list[Estimate] = [getattr(point, quantity) for point in group_points]
            bars = mode == "markers" and num_shown <= MAX_ERROR_BARS
            shown[axis].extend(shown_values(estimates) if bars else (e.value for e in estimates))
            trace: dict[str, Any] = {
                "type": "scatter",
                "mode": mode,
                "name": escape(label, quote=False),
                "legendgroup": label,
                "showlegend": axis == 0,
                "x": [place(point) for point in group_points],
                "y": [estimate.value for estimate in estimates],
                "xaxis": f"x{axis + 1}",
                "yaxis": f"y{axis + 1}",
                "customdata": indices,
                "marker": marks.markers(group_points),
                "line": {
                    "width": 1.5,
                    "color": marks.colours[group_points[0].model],
                    "dash": marks.dashes[group_points[0].method],
                },
            }
            if bars:
                trace["error_y"] = error_bars(estimates)
            if mode == "markers":  # a line has its colour, dashes and hover text
                trace = marks.with_numbers(trace, group_points)
            data.append(trace)
    time_limit = None if limits[0] is None else source.limit(limits[0])
    times = limit_lines([(time_limit, "limit", format_seconds, "y", shown[0])])
    peaks = limit_lines(
        [
            (source.limit(limits[1]), "limit", format_bytes, "y", shown[1]),
            (source.limit("device_bytes"), "device", format_bytes, "y", shown[1]),
        ],
        axis="2",
    )
    return new_figure(
        name,
        title,
        about + times[2] + peaks[2],
        data,
        xaxis=xaxis | {"domain": SIDE_BY_SIDE[0]},
        xaxis2=xaxis | {"domain": SIDE_BY_SIDE[1], "anchor": "y2"},
        yaxis=axes.seconds_axis("time per token", shown[0]),
        yaxis2=axes.bytes_axis("peak memory", shown[1]) | {"anchor": "x2"},
        shapes=times[0] + peaks[0],
        annotations=times[1] + peaks[1],
        legend={"orientation": "h", "y": -0.25},
    )
