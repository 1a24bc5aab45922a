"""Markdown tables, and the summaries of relative errors that stand in their cells."""

from __future__ import annotations

import datetime
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

PAGES = Path(__file__).parent.parent / "docs" / "accuracy"


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def markdown_table(
    head: Sequence[str], rows: Iterable[Iterable[object]], *, first_figure: int | None = None
) -> str:
    """A Markdown table; columns from `first_figure` on are aligned to the right."""
    left = len(head) if first_figure is None else first_figure
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(row(cells) for cells in (head, rule, *rows))


def write_page(page: str, title: str, text: str) -> None:
    """Write `docs/accuracy/<page>.md`, which says that the running script made it today."""
    today = datetime.datetime.now(datetime.UTC).date()
    subcommand = itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])
    script = " ".join((Path(sys.argv[0]).name, *subcommand))
    made = f"Made by `benchmarks/{script} --write` on {today}."
    document = PAGES / f"{page}.md"
    document.write_text(f"# {title}\n\n{made}\n\n{text}\n", encoding="utf-8")


def percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of relative errors: how many, the median, the 90th percentile, the worst one signed."""

    count: int
    median: float
    p90: float
    worst: float

    def cells(self) -> tuple[str, ...]:
        sizes = (f"{100 * self.median:.1f} %", f"{100 * self.p90:.1f} %")
        return (str(self.count), *sizes, percent(self.worst))


def median_and_worst(errors: Sequence[float]) -> tuple[str, str]:
    """The median size of relative errors, and the worst one signed."""
    return f"{100 * median(map(abs, errors)):.1f} %", f"{100 * max(errors, key=abs):+.0f} %"


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest of `values` that a `share` of them does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def sizes_by_strategy(errors: Mapping[str, Iterable[float]]) -> str:
    """Runs, and median, p95 and worst size of their relative errors, by name."""
    rows = []
    for name, found in errors.items():
        sizes = [abs(error) for error in found]
        figures = (median(sizes), quantile(sizes, 0.95), max(sizes))
        rows.append((name, len(sizes), *(f"{100 * figure:.2f} %" for figure in figures)))
    return markdown_table(("strategy", "runs", "median", "p95", "worst"), rows, first_figure=1)


def summary(errors: Iterable[float]) -> Summary:
    by_size = sorted(errors, key=abs)
    sizes = [abs(error) for error in by_size]
    return Summary(len(sizes), median(sizes), quantile(sizes, 0.9), by_size[-1])


def median_and_p90(values: Sequence[float], form: str = "g") -> str:
    """Both in one cell, the 90th percentile interpolated."""
    return f"{median(values):{form}} / {np.quantile(values, 0.9):{form}}"
