"""Axes with readable units, as values of plotly's layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from whichlora.units import format_bytes, format_count, format_seconds

MAX_TICKS = 8
MARGIN = 0.06  # of the axis, left free at both ends

# Candidates for ticks, the coarser ladder first.
_COARSE, _FINE = (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
_SECONDS = [
    [
        *(digit * 10.0**power for power in range(-7, 1) for digit in digits),
        *(60.0 * minutes for minutes in minutes_of_hour),
        *(3600.0 * digit * 10**power for power in range(5) for digit in digits),
    ]
    for digits, minutes_of_hour in (
        (_COARSE, (0.25, 0.5, 1, 2, 5, 10, 20, 30)),
        (_FINE, (0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 25, 30, 40, 50)),
    )
]
_BYTES = [
    [2.0**power * step for power in range(10, 50) for step in steps]
    for steps in ((1, 1.5), (1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875))
]
_COUNTS = [
    [digit * 10.0**power for power in range(12) for digit in digits] for digits in (_COARSE, _FINE)
]
MIN_TICKS = 3


def span(values: Sequence[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis that shows all `values`."""
    positive = [value for value in values if value > 0]
    if not positive:
        return 1.0, 10.0
    low, high = math.log10(min(positive)), math.log10(max(positive))
    margin = max(MARGIN * (high - low), 0.05)
    return 10 ** (low - margin), 10 ** (high + margin)


def seconds_axis(title: str, values: Sequence[float], *, most: int = MAX_TICKS) -> dict[str, Any]:
    """A logarithmic axis of seconds, labelled in ms, s, min or h."""
    return _log_axis(title, values, _SECONDS, _short(format_seconds), most)


def bytes_axis(title: str, values: Sequence[float], *, most: int = MAX_TICKS) -> dict[str, Any]:
    """A logarithmic axis of bytes, labelled at powers of two."""
    return _log_axis(title, values, _BYTES, _short(format_bytes), most)


def counts_axis(title: str, values: Sequence[float], *, most: int = MAX_TICKS) -> dict[str, Any]:
    """A logarithmic axis of counts."""
    return _log_axis(title, values, _COUNTS, format_count, most)


def linear_bytes_axis(title: str, highest: float) -> dict[str, Any]:
    """An axis of bytes from zero, for bars that add up."""
    step = next(
        step for step in (2.0**power for power in range(160)) if highest / step <= MAX_TICKS
    )
    ticks = [step * i for i in range(int(highest / step) + 1)]
    return {
        "title": {"text": title},
        "range": [0, highest * (1 + MARGIN)],
        "tickvals": ticks,
        "ticktext": ["0", *(_short(format_bytes)(tick) for tick in ticks[1:])],
    }


def _log_axis(
    title: str,
    values: Sequence[float],
    ladders: Sequence[Sequence[float]],
    show: Callable[[float], str],
    most: int,
) -> dict[str, Any]:
    low, high = span(values)
    within = [[tick for tick in ladder if low <= tick <= high] for ladder in ladders]
    ticks = next((ticks for ticks in within if len(ticks) >= MIN_TICKS), [])
    if not ticks:  # the values are closer than two ticks: even steps between the ends
        ticks = [low * (high / low) ** (i / 4) for i in range(1, 4)]
    elif len(ticks) > most:
        ticks = ticks[:: math.ceil(len(ticks) / most)]
    return {
        "type": "log",
        "title": {"text": title},
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [show(tick) for tick in ticks],
    }


def _short(show: Callable[[float], str]) -> Callable[[float], str]:
    """`show` without the zero decimals and zero seconds of a round tick."""

    def shortened(value: float) -> str:
        text = show(value)
        for suffix in (" 00 s", " 00 min"):
            text = text.removesuffix(suffix)
        number, _, unit = text.rpartition(" ")
        if "." in number:
            number = number.rstrip("0").rstrip(".")
        return f"{number} {unit}".strip()

    return shortened
