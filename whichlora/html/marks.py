"""The look of a candidate in every figure: colour by model, shape by method, filled if measured.

With many models, each also has a number in its marks and in the legend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from whichlora.html.source import Estimate, Point, Source

# Okabe and Ito's palette for all kinds of colour vision, less its black and its yellow, then
# tones that differ from these; each is readable on white and on dark grey.
COLOURS = (
    "#1F83C1", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
    "#8C6BB1", "#7A8B00", "#A6611A", "#708090",
    "#9900FF", "#00B300", "#E622B8", "#0066FF", "#FF0077", "#CC77FF",  # of large plans
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
OUT_OF_MEMORY = "x"
MAX_BY_COLOUR = 8  # models; more of them have numbers, too
MAX_NUMBERED = 600  # points; more of them hide each other's numbers
MUTED = "#808080"

PART_COLOURS = {
    "weights": "#1F83C1",
    "adapters": "#56B4E9",
    "gradients": "#009E73",
    "optimizer_states": "#7A8B00",
    "activations": "#E69F00",
    "logits_and_loss": "#D55E00",
    "temporary": "#CC79A7",
    "kv_cache": "#8C6BB1",
    "allocator": "#9AA5B1",
    "context": "#5F6B7A",
}

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """Colours by model and shapes by method, the same in every figure of one report.

    Args:
        labels: by model, its name: without the organisation if no other model shares it, and
            with its number if there are many models.
        numbers: by model, the largest first; empty if colours are enough.
    """

    labels: dict[str, str]
    colours: dict[str, str]
    symbols: dict[str, str]
    dashes: dict[str, str]
    numbers: dict[str, str]

    def with_numbers(self, trace: dict[str, Any], points: Sequence[Point]) -> dict[str, Any]:
        """`trace` of `points` of one model, with the number of the model in every mark."""
        if not self.numbers or not points:
            return trace
        colour = self.colours[points[0].model]
        return trace | {
            "mode": f"{trace['mode']}+text",
            "text": [self.numbers[points[0].model]] * len(points),
            "textfont": {
                "size": 9,
                "color": ["#ffffff" if self.is_filled(point) else colour for point in points],
            },
            "marker": trace["marker"] | {"size": 14},
        }

    @staticmethod
    def is_filled(point: Point) -> bool:
        return point.measured and not point.over_memory and not point.failed

    def symbol(self, point: Point) -> str:
        if point.over_memory or point.failed:
            return OUT_OF_MEMORY if point.measured else f"{OUT_OF_MEMORY}-open"
        return self.symbols[point.method] + ("" if point.measured else "-open")

    def markers(self, points: Sequence[Point]) -> dict[str, Any]:
        """plotly's markers of `points` of one model."""
        return {
            "color": self.colours[points[0].model],
            "symbol": [self.symbol(point) for point in points],
            "size": 9,
            "line": {"width": 1.5, "color": self.colours[points[0].model]},
        }


def marks_of(source: Source) -> Marks:
    """Marks for everything in `source`; the largest model has the first colour."""
    points = [*source.points, *source.side_by_side]
    sizes = {point.model: point.num_params for point in points}
    models = sorted(sizes, key=lambda model: -sizes[model])
    methods = list(dict.fromkeys(point.method for point in points if point.stage == "finetune"))
    short = Counter(model.rsplit("/", 1)[-1] for model in models)
    labels = {model: model.rsplit("/", 1)[-1] for model in models}
    labels = {model: name if short[name] == 1 else model for model, name in labels.items()}
    numbers = {}
    if len(models) > MAX_BY_COLOUR and len(points) <= MAX_NUMBERED:
        numbers = {model: str(number) for number, model in enumerate(models, start=1)}
        labels = {model: f"{numbers[model]} {name}" for model, name in labels.items()}
    return Marks(
        labels=labels,
        numbers=numbers,
        colours=_cycled(models, COLOURS),
        symbols=_cycled(methods, SYMBOLS) | {"inference": "circle"},
        dashes=_cycled(methods, DASHES) | {"inference": "solid"},
    )


def _cycled(names: Iterable[str], values: Sequence[str]) -> dict[str, str]:
    return {name: values[i % len(values)] for i, name in enumerate(names)}


def error_bars(estimates: Sequence[Estimate], *, thickness: float = 1) -> dict[str, Any]:
    """plotly's asymmetric error bars from value to bounds."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [estimate.high - estimate.value for estimate in estimates],
        "arrayminus": [estimate.value - estimate.low for estimate in estimates],
        "thickness": thickness,
        "width": 2,
    }


def colour_legend(marks: Marks, points: Sequence[Point]) -> list[dict[str, Any]]:
    """One legend entry per model, the largest first; it shows and hides the model's group."""
    order = list(marks.colours)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escape(marks.labels[model], quote=False),
            "legendgroup": model,
            "x": [None],
            "y": [None],
            "marker": {"symbol": "circle", "color": marks.colours[model], "size": 9},
            "hoverinfo": "skip",
        }
        for model in sorted({point.model for point in points}, key=order.index)
    ]


def shape_legend(marks: Marks, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Legend entries for the shapes, without points."""
    shown = {point.method: f"{marks.symbols[point.method]}" for point in points}
    entries = {} if len(shown) < 2 else {method: f"{shown[method]}-open" for method in shown}
    if any(point.measured and not point.failed for point in points):
        entries["measured"] = "circle"
    if any(not point.measured for point in points):
        entries["predicted"] = "circle-open"
    if any(point.over_memory and point.measured for point in points):
        entries["out of memory"] = OUT_OF_MEMORY
    if any(point.over_memory and not point.measured for point in points):
        entries["predicted out of memory"] = f"{OUT_OF_MEMORY}-open"
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [None],
            "y": [None],
            "marker": {
                "symbol": symbol,
                "color": MUTED,
                "size": 9,
                "line": {"width": 1.5, "color": MUTED},
            },
            "hoverinfo": "skip",
        }
        for name, symbol in entries.items()
    ]
