"""Axes in the units that people read, as plain values of plotly's layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from whichlora.units import format_bytes, format_count, format_seconds

MAX_TICKS = 8
MARGIN = 0.06  # of the axis, left free at both ends

_SECONDS = [
    *(digit * 10.0**power for power in range(-7, 1) for digit in (1, 2, 5)),
    *(60.0 * minutes for minutes in (0.25, 0.5, 1, 2, 5, 10, 20, 30)),
    *(3600.0 * digit * 10**power for power in range(5) for digit in (1, 2, 5)),
]
_BYTES = [2.0**power * step for power in range(10, 50) for step in (1, 1.5)]
_COUNTS = [digit * 10.0**power for power in range(12) for digit in (1, 2, 5)]


def span(values: Sequence[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis that shows all `values`."""
    known = [value for value in values if value > 0]
    if not known:
        return 1.0, 10.0
    low, high = math.log10(min(known)), math.log10(max(known))
    margin = max(MARGIN * (high - low), 0.05)
    return 10 ** (low - margin), 10 ** (high + margin)


def seconds_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis of seconds, labelled in ms, s, min or h."""
    return _log_axis(title, values, _SECONDS, _short(format_seconds))


def bytes_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis of bytes, labelled at powers of two."""
    return _log_axis(title, values, _BYTES, _short(format_bytes))


def counts_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis of numbers of things."""
    return _log_axis(title, values, _COUNTS, format_count)


def linear_bytes_axis(title: str, highest: float) -> dict[str, Any]:
    """An axis of bytes from zero, for bars that add up."""
    steps = (
        step for step in _BYTES if math.log2(step).is_integer() and highest / step <= MAX_TICKS
    )
    step = next(steps)
    ticks = [step * i for i in range(int(highest / step) + 1)]
    return {
        "title": {"text": title},
        "range": [0, highest * (1 + MARGIN)],
        "tickvals": ticks,
        "ticktext": ["0", *(_short(format_bytes)(tick) for tick in ticks[1:])],
    }


def _log_axis(
    title: str, values: Sequence[float], ladder: Sequence[float], show: Callable[[float], str]
) -> dict[str, Any]:
    low, high = span(values)
    ticks = [tick for tick in ladder if low <= tick <= high]
    if len(ticks) < 2:  # less than one rung apart: even steps between the ends
        ticks = [low * (high / low) ** (i / 4) for i in range(1, 4)]
    elif len(ticks) > MAX_TICKS:
        ticks = ticks[:: math.ceil(len(ticks) / MAX_TICKS)]
    return {
        "type": "log",
        "title": {"text": title},
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [show(tick) for tick in ticks],
    }


def _short(show: Callable[[float], str]) -> Callable[[float], str]:
    """`show` without the decimals and the empty rest that a round tick has."""

    def shortened(value: float) -> str:
        text = show(value)
        for rest in (" 00 s", " 00 min"):
            text = text.removesuffix(rest)
        number, _, unit = text.rpartition(" ")
        if "." in number:
            number = number.rstrip("0").rstrip(".")
        return f"{number} {unit}".strip()

    return shortened
