"""Plots of time against peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, TypeAlias

from whichlora.html import axes
from whichlora.html.figures.frame import MAX_ERROR_BARS, limit_lines, new_figure, shown_values
from whichlora.html.marks import MUTED, Figure, Marks, colour_legend, error_bars, shape_legend
from whichlora.html.source import Estimate, Point, Source
from whichlora.units import format_bytes, format_seconds

TimeOf: TypeAlias = Callable[[Point], Estimate | None]


def finetune_plane(source: Source, marks: Marks) -> Figure | None:
    """Whole fine-tuning time against peak memory."""
    chosen = source.indices("finetune")
    return _plane(
        source,
        marks,
        chosen,
        name="plane-finetune",
        title="Fine-tuning: total time and peak memory",
        time=lambda point: point.total_s,
        time_title="total time of the fine-tuning",
        time_limit=source.limit("total_time_s"),
        byte_limit=source.limit("finetune_bytes"),
    )


def inference_plane(source: Source, marks: Marks) -> Figure | None:
    """Time per generated token against peak memory."""
    return _plane(
        source,
        marks,
        source.indices("inference"),
        name="plane-inference",
        title="Inference: time per token and peak memory",
        time=lambda point: point.time_per_token_s,
        time_title="time per generated token",
        time_limit=source.limit("time_per_token_s"),
        byte_limit=source.limit("inference_bytes"),
    )


def _plane(
    source: Source,
    marks: Marks,
    indices: Sequence[int],
    *,
    name: str,
    title: str,
    time: TimeOf,
    time_title: str,
    time_limit: float | None,
    byte_limit: float | None,
) -> Figure | None:
    shown = [i for i in indices if time(source.points[i]) is not None]
    if not shown:
        return None
    points = source.points
    bars = len(shown) <= MAX_ERROR_BARS
    data = _front(source, shown, time) + _clouds(source, marks, shown, time, bars=bars)
    if source.winner in shown:
        data.append(_ring(source, source.winner, time))
    data += colour_legend(marks, [points[i] for i in shown])
    data += shape_legend(marks, [points[i] for i in shown])
    times = shown_values([estimate for i in shown if (estimate := time(points[i])) is not None])
    peaks = shown_values([points[i].peak_bytes for i in shown])
    lines, labels, beyond = limit_lines(
        [
            (time_limit, "limit", format_seconds, "x", times),
            (byte_limit, "limit", format_bytes, "y", peaks),
            (source.limit("device_bytes"), "device", format_bytes, "y", peaks),
        ]
    )
    about = "Lower left is better. Dashed lines are the limits."
    if bars:
        about += " Bars are the intervals of the predictions."
    return new_figure(
        name,
        title,
        f"{about}{beyond}",
        data,
        xaxis=axes.seconds_axis(time_title, times),
        yaxis=axes.bytes_axis("peak memory", peaks),
        shapes=lines,
        annotations=labels,
        legend={"orientation": "h", "y": -0.2},
    )


def _clouds(
    source: Source, marks: Marks, shown: Sequence[int], time: TimeOf, *, bars: bool
) -> list[dict[str, Any]]:
    """The candidates, one trace per model."""
    points = source.points
    traces = []
    for model in dict.fromkeys(points[i].model for i in shown):
        indices = [i for i in shown if points[i].model == model]
        times = [estimate for i in indices if (estimate := time(points[i])) is not None]
        peaks = [points[i].peak_bytes for i in indices]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "name": escape(marks.labels[model], quote=False),
            "legendgroup": model,
            "showlegend": False,  # its first point may be a cross, but the legend shows the colour
            "x": [estimate.value for estimate in times],
            "y": [estimate.value for estimate in peaks],
            "customdata": indices,
            "marker": marks.markers([points[i] for i in indices]),
        }
        if bars:
            trace |= {"error_x": error_bars(times), "error_y": error_bars(peaks)}
        traces.append(marks.with_numbers(trace, [points[i] for i in indices]))
    return traces


def _ring(source: Source, winner: int, time: TimeOf) -> dict[str, Any]:
    """A ring around the winner."""
    best = source.points[winner]
    best_time = time(best)
    assert best_time is not None
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "winner",
        "x": [best_time.value],
        "y": [best.peak_bytes.value],
        "customdata": [winner],
        "marker": {
            "symbol": "circle-open",
            "size": 20,
            "color": "#C03028",
            "line": {"width": 2.5},
        },
        "hoverinfo": "skip",
    }


def _front(source: Source, shown: Sequence[int], time: TimeOf) -> list[dict[str, Any]]:
    """The Pareto front of time and memory as a step line."""
    ends = [
        (i, estimate) for i in source.front if i in shown and (estimate := time(source.points[i]))
    ]
    if len(ends) < 2:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "none is both faster and smaller",
            "x": [estimate.value for _, estimate in ends],
            "y": [source.points[i].peak_bytes.value for i, _ in ends],
            "customdata": [i for i, _ in ends],
            "line": {"shape": "hv", "dash": "dot", "width": 1.5, "color": MUTED},
            "hoverinfo": "skip",
        }
    ]
