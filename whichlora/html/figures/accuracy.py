"""Predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from whichlora.html import axes
from whichlora.html.figures.frame import SIDE_BY_SIDE, new_figure
from whichlora.html.marks import MUTED, Figure, Marks, error_bars
from whichlora.html.source import Compared, Source
from whichlora.units import format_bytes, format_seconds


class _Stage(NamedTuple):
    """The moment of a prediction, and how it is drawn."""

    name: str
    label: str
    symbol: str
    colour: str
    thickness: float
    opacity: float


_STAGES = (  # a later one is drawn over the earlier, with a thinner bar
    _Stage("cold", "datasheet alone", "circle-open", "#9AA5B1", 5, 0.45),
    _Stage("before", "when it was chosen", "diamond", "#E69F00", 3, 0.75),
    _Stage("after", "after the refit", "circle", "#1F83C1", 1.5, 1.0),
)
_PLOTS = (
    ("memory_bytes", "peak memory", axes.bytes_axis),
    ("time_per_token_s", "time per token", axes.seconds_axis),
)


def accuracy(source: Source, marks: Marks) -> Figure | None:
    """Predictions and their intervals over the measurements of this run."""
    if not source.comparison:
        return None
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"legend": {"orientation": "h", "y": -0.2}, "shapes": []}
    for axis, (quantity, label, make) in enumerate(_PLOTS, start=1):
        rows = [row for row in source.comparison if row.quantity == quantity]
        data += [_guesses(rows, stage, axis) for stage in _STAGES]
        guesses = [row.predicted[stage.name] for stage in _STAGES for row in rows]
        measured = [row.measured for row in rows]
        shown = [bound for guess in guesses for bound in (guess.low, guess.high)] + measured
        layout["shapes"].append(_diagonal(shown, axis))
        number = "" if axis == 1 else str(axis)
        layout[f"xaxis{number}"] = make(f"measured {label}", measured, most=4) | {
            "domain": SIDE_BY_SIDE[axis - 1],
            "anchor": f"y{axis}",
        }
        layout[f"yaxis{number}"] = make(f"predicted {label}", shown) | {"anchor": f"x{axis}"}
    return new_figure(
        "accuracy",
        "Predicted against measured",
        "On the line a prediction was exact. Bars are its interval.",
        data,
        **layout,
    )


def _guesses(rows: Sequence[Compared], stage: _Stage, axis: int) -> dict[str, Any]:
    """The predictions of one stage over the measurements."""
    guesses = [row.predicted[stage.name] for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": stage.label,
        "legendgroup": stage.label,
        "showlegend": axis == 1,
        "x": [row.measured for row in rows],
        "y": [guess.value for guess in guesses],
        "text": [_hover(row, stage) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "marker": {"symbol": stage.symbol, "color": stage.colour, "size": 9},
        "opacity": stage.opacity,
        "error_y": error_bars(guesses, thickness=stage.thickness),
    }


def _diagonal(values: Sequence[float], axis: int) -> dict[str, Any]:
    """The line of exact predictions, through the shown range."""
    low, high = axes.span(values)
    return {
        "type": "line",
        "xref": f"x{axis}",
        "yref": f"y{axis}",
        "x0": low,
        "y0": low,
        "x1": high,
        "y1": high,
        "layer": "below",
        "line": {"width": 1, "color": MUTED},
    }


def _hover(row: Compared, stage: _Stage) -> str:
    """Hover text of one prediction beside its measurement."""
    show = format_bytes if row.quantity == "memory_bytes" else format_seconds
    guess = row.predicted[stage.name]
    return (
        f"<b>{escape(row.name)}</b><br>measured {show(row.measured)}<br>"
        f"{stage.label} {show(guess.value)} ({guess.value / row.measured - 1:+.1%})<br>"
        f"{row.confidence[stage.name]:.0%} between {show(guess.low)} and {show(guess.high)}"
    )
