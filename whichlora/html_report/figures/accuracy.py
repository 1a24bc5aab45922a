"""Predicted against measured."""

from __future__ import annotations

from html import escape
from typing import Any

from whichlora.html_report import axes
from whichlora.html_report.figures.frame import SIDE_BY_SIDE, new_figure
from whichlora.html_report.marks import MUTED, Figure, Marks, error_bars
from whichlora.html_report.source import Compared, Source
from whichlora.units import format_bytes, format_seconds


def accuracy(source: Source, marks: Marks) -> Figure | None:
    """Predictions and their intervals over what was measured in this run."""
    if not source.comparison:
        return None
    stages = (  # a later one is drawn over the earlier, with a thinner bar
        ("cold", "datasheet alone", "circle-open", "#9AA5B1", 5, 0.45),
        ("before", "when it was chosen", "diamond", "#E69F00", 3, 0.75),
        ("after", "after the refit", "circle", "#1F83C1", 1.5, 1.0),
    )
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"legend": {"orientation": "h", "y": -0.2}, "shapes": []}
    for axis, (quantity, make) in enumerate(
        (("memory_bytes", axes.bytes_axis), ("time_per_token_s", axes.seconds_axis)), start=1
    ):
        own = [row for row in source.comparison if row.quantity == quantity]
        known: list[float] = []
        for stage, label, symbol, colour, thickness, opacity in stages:
            guesses = [row.predicted[stage] for row in own]
            known += [bound for one in guesses for bound in (one.low, one.high)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "legendgroup": label,
                    "showlegend": axis == 1,
                    "x": [row.measured for row in own],
                    "y": [one.value for one in guesses],
                    "text": [_hover(row, stage, label) for row in own],
                    "hovertemplate": "%{text}<extra></extra>",
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "marker": {"symbol": symbol, "color": colour, "size": 9},
                    "opacity": opacity,
                    "error_y": error_bars(guesses, thickness=thickness),
                }
            )
        measured = [row.measured for row in own]
        known += measured
        low, high = axes.span(known)
        layout["shapes"].append(
            {
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
        )
        number = "" if axis == 1 else str(axis)
        what = "peak memory" if quantity == "memory_bytes" else "time per token"
        layout[f"xaxis{number}"] = make(f"measured {what}", measured, most=4) | {
            "domain": SIDE_BY_SIDE[axis - 1],
            "anchor": f"y{axis}",
        }
        layout[f"yaxis{number}"] = make(f"predicted {what}", known) | {"anchor": f"x{axis}"}
    return new_figure(
        "accuracy",
        "Predicted against measured",
        "On the line a prediction was exact. Bars are its interval.",
        data,
        **layout,
    )


def _hover(row: Compared, stage: str, label: str) -> str:
    """Hover text of one prediction beside its measurement."""
    show = format_bytes if row.quantity == "memory_bytes" else format_seconds
    guess = row.predicted[stage]
    return (
        f"<b>{escape(row.name)}</b><br>measured {show(row.measured)}<br>"
        f"{label} {show(guess.value)} ({guess.value / row.measured - 1:+.1%})<br>"
        f"{row.confidence[stage]:.0%} between {show(guess.low)} and {show(guess.high)}"
    )
