"""A plot of time against peak memory in characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from textwrap import wrap

from whichlora.search.feasibility import Candidate
from whichlora.units import format_bytes, format_seconds

MIN_WIDTH, MAX_WIDTH, HEIGHT = 40, 72, 12  # characters inside the frame
WITHIN_REACH = 4.0  # a limit this many times beyond the largest candidate still gets its line
MARGIN = 1.08  # from the outermost candidate to the frame
WINNER, OUT_OF_MEMORY, OTHER_MODEL = "★", "×", "·"
ACROSS, UP = "┄", "┊"
JOINED = "\N{NO-BREAK SPACE}"  # no line of the legend ends between a mark and its meaning


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis from `low` to `high` over `cells` characters."""

    low: float
    high: float
    cells: int

    def cell(self, value: float) -> int:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(self.cells - 1, max(0, int(share * self.cells)))

    def value(self, cell: int) -> float:
        """The value in the middle of a cell."""
        return float(self.low * (self.high / self.low) ** ((cell + 0.5) / self.cells))


def plane(
    candidates: Sequence[Candidate],
    winner: Candidate | None,
    *,
    time_limit_s: float | None,
    byte_limits: Sequence[float],
    width: int,
    device_bytes: float | None = None,
) -> list[str]:
    """Lines of a plot of time against peak memory, with a legend; none without candidates.

    A letter is a model, capital where it was measured. Where several candidates share a cell, the
    winner is shown first, then what ran out of memory, then what was measured.

    Args:
        device_bytes: the one of `byte_limits` that is the memory of the device.
    """
    places = [
        (_time_s(candidate), candidate.memory_bytes.value, candidate) for candidate in candidates
    ]
    places = [place for place in places if place[0] > 0 and place[1] > 0]
    if not places:
        return []
    # 14 columns are for the labels of the vertical axis and the frame
    cells = max(MIN_WIDTH, min(MAX_WIDTH, width - 14))
    across, limit_s = _scale([place[0] for place in places], [time_limit_s], cells)
    up, limits_bytes = _scale([place[1] for place in places], byte_limits, HEIGHT)
    grid = [[" "] * cells for _ in range(HEIGHT)]
    for limit in limits_bytes:
        grid[up.cell(limit)] = [ACROSS] * cells
    for limit in limit_s:
        for row in grid:
            row[across.cell(limit)] = UP
    letters = _letters(candidates)
    for time_s, num_bytes, candidate in sorted(
        places, key=lambda place: _precedence(place[2], winner)
    ):
        grid[up.cell(num_bytes)][across.cell(time_s)] = _mark(candidate, winner, letters)
    return [
        *_framed(grid, up, limits_bytes),
        _time_labels(across),
        *_legend(
            letters,
            candidates,
            limits=[
                *(
                    f"{ACROSS}{JOINED}{'device' if limit == device_bytes else 'limit'} "
                    f"{format_bytes(limit)}"
                    for limit in limits_bytes
                ),
                *(f"{UP}{JOINED}limit {format_seconds(limit)}" for limit in limit_s),
            ],
            cells=cells,
        ),
    ]


def _time_s(candidate: Candidate) -> float:
    return (candidate.total_s or candidate.time_per_token_s).value


def _scale(
    values: Sequence[float], limits: Sequence[float | None], cells: int
) -> tuple[Scale, list[float]]:
    """A scale that holds all values and the limits near them; and these limits."""
    low, high = min(values), max(values)
    near = [
        limit
        for limit in limits
        if limit is not None and low / WITHIN_REACH <= limit <= high * WITHIN_REACH
    ]
    return Scale(min([low, *near]) / MARGIN, max([high, *near]) * MARGIN, cells), near


def _letters(candidates: Sequence[Candidate]) -> dict[str, str]:
    """A letter per model, the largest first; a dot for those after the alphabet."""
    sizes = {candidate.run.model: candidate.prediction.num_params for candidate in candidates}
    models = sorted(sizes, key=lambda model: -sizes[model])
    return {
        model: ascii_lowercase[i] if i < len(ascii_lowercase) else OTHER_MODEL
        for i, model in enumerate(models)
    }


def _ran_out(candidate: Candidate) -> bool:
    return candidate.measurement is not None and candidate.measurement.outcome == "oom"


def _precedence(candidate: Candidate, winner: Candidate | None) -> tuple[bool, bool, bool]:
    return (candidate is winner, _ran_out(candidate), candidate.source == "measured")


def _mark(candidate: Candidate, winner: Candidate | None, letters: dict[str, str]) -> str:
    if candidate is winner:
        return WINNER
    if _ran_out(candidate):
        return OUT_OF_MEMORY
    letter = letters[candidate.run.model]
    return letter.upper() if candidate.source == "measured" else letter


def _framed(grid: list[list[str]], up: Scale, limits: Sequence[float]) -> list[str]:
    """Rows from the largest down, a label at every fourth and at each limit."""
    at_limit = {up.cell(limit): limit for limit in limits}
    lines = []
    for i in reversed(range(len(grid))):
        label = ""
        if i in at_limit:
            label = format_bytes(at_limit[i])
        elif i % 4 == 0 and not {i - 1, i + 1} & set(at_limit):
            label = format_bytes(up.value(i))
        lines.append(f"{label:>10} │{''.join(grid[i]).rstrip()}")
    return [*lines, f"{'':>10} └{'─' * len(grid[0])}"]


def _time_labels(across: Scale) -> str:
    """Labels at the start, the middle and the end of the horizontal axis."""
    start, middle, end = (
        format_seconds(across.value(cell)) for cell in (0, across.cells // 2, across.cells - 1)
    )
    line = f"{start}{middle:^{across.cells - len(start) - len(end)}}{end}"
    return f"{'':>12}{line}"


def _legend(
    letters: dict[str, str],
    candidates: Sequence[Candidate],
    *,
    limits: Sequence[str],
    cells: int,
) -> list[str]:
    names = [
        f"{letter}{JOINED}{model}" for model, letter in letters.items() if letter != OTHER_MODEL
    ]
    meaning = [f"{WINNER} winner", "capital: measured"]
    if any(_ran_out(candidate) for candidate in candidates):
        meaning.append(f"{OUT_OF_MEMORY} ran out of memory")
    indent = " " * 12
    return [
        line.replace(JOINED, " ")
        for text in (", ".join(names), ", ".join([*meaning, *limits]))
        for line in wrap(
            text,
            cells + len(indent),
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    ]
