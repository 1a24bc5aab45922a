"""How much of their peak boards reach in large products: `board_power.py [--write]`.

`board_products.csv` has what others measured: the best rate of square products in PyTorch, a row
for each board, dtype and machine (github.com/zzc0721/torch-performance-test-data, commit 9d82827;
github.com/chsasank/device-benchmarks, commit 7ccc883; for the T4 also
forums.developer.nvidia.com/t/about-gpu-peak-performance/264462, a mean of 100 products). Fits the
law of `timing.sustained_factor` for boards that nobody measured and prints
`docs/accuracy/board_power.md`; `--write` stores it, and `measured_flops_per_s` of each `gpu.json`.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from markdown_tables import markdown_table, write_page

from whichlora.spec.gpu import GpuSpec
from whichlora.store.gpus import find_gpu
from whichlora.store.jsonfiles import read_object, write_object
from whichlora.timing.model import OTHER_BOARDS, limited_as

TABLE = Path(__file__).parent / "board_products.csv"
CALIBRATION = Path(__file__).parent.parent / "calibration"
PAGE, TITLE = "board_power", "What boards sustain of their peak"
LEGEND = (
    "The law of [time.md](../time.md#what-a-board-sustains), fitted to public matrix products; "
    "scatter is the root mean square of log errors, each board left out of the fit."
)
UNITS = {"16 bit": ("bf16", "fp16"), "tf32": ("tf32",), "fp32": ("fp32",)}
BY_ARCHITECTURE = {"16 bit": True, "fp32": False}  # whether a law for each predicts others better
LAW = 1 / 3
SMALL = 0.15  # log error up to which a board counts in full: some are cooled or set badly
SHRINK = 0.22  # what a board scatters over what architectures do: 0.11 over 0.5


@dataclass(frozen=True, slots=True)
class Board:
    """The best products of one board in one dtype.

    Args:
        like: boards of one architecture, `timing.limited_as`.
        watts: that it may draw, for each TFLOP/s of its peak.
        reached: share of the peak.
    """

    key: str
    like: str
    watts: float
    reached: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Share of the peak: `share * min(1, watts / full_watts[like]) ** exponent`."""

    full_watts: Mapping[str, float]
    share: float
    exponent: float = LAW

    def error(self, board: Board) -> float:
        """Log of reached over fitted."""
        full = self.full_watts[board.like]
        limited = min(0.0, self.exponent * math.log(board.watts / full))
        return math.log(board.reached / self.share) - limited


def measured(table: Path = TABLE) -> dict[str, dict[str, float]]:
    """FLOP/s by board and units, of `UNITS`.

    A source counts by the median of its machines, in the faster dtype of the same units. The
    slowest source decides: runs last, and boards that grow warm or reach their limit of power slow
    down.
    """
    machines: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            machines[row["gpu"], row["source"], row["dtype"]].append(float(row["tflops"]) * 1e12)
    by_source: dict[tuple[str, str, str], float] = defaultdict(float)
    for (key, source, dtype), rates in machines.items():
        units = next(name for name, dtypes in UNITS.items() if dtype in dtypes)
        by_source[key, source, units] = max(median(rates), by_source[key, source, units])
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (key, _, units), rate in by_source.items():
        found[key][units] = min(rate, found[key].get(units, math.inf))
    return found


def boards(found: Mapping[str, Mapping[str, float]], units: str) -> list[Board]:
    """Those whose power is known, in the first dtype of `units` that they have units for."""
    made = []
    for key, rates in found.items():
        gpu = find_gpu(key)
        dtype = next((one for one in UNITS[units] if one in gpu.peak_flops_per_s), "")
        if units in rates and dtype and gpu.power_w is not None:
            peak = gpu.peak_flops_per_s[dtype]
            watts = gpu.power_w / (peak / 1e12)
            made.append(Board(key, limited_as(gpu), watts, rates[units] / peak))
    return made


def fitted(found: Sequence[Board], *, grouped: bool) -> Fit:
    """Robust least squares of log errors; an architecture is kept near all boards."""
    from scipy.optimize import least_squares

    names = sorted({board.like for board in found} - {OTHER_BOARDS}) if grouped else []

    def fit(values: Sequence[float]) -> Fit:
        of_group = dict(zip(names, values[2:], strict=True))
        every = {board.like for board in found} | {OTHER_BOARDS}
        full = {like: math.exp(values[0] + of_group.get(like, 0.0)) for like in every}
        return Fit(full, math.exp(values[1]))

    start = [math.log(median(board.watts for board in found)), 0.0, *(0.0 for _ in names)]
    solved = least_squares(
        lambda values: [
            *(fit(values).error(board) for board in found),
            *(SHRINK * value for value in values[2:]),
        ],
        start,
        loss="soft_l1",
        f_scale=SMALL,
    )
    return fit([float(value) for value in solved.x])


def scatter(found: Sequence[Board], *, grouped: bool) -> str:
    """Root mean square of log errors, each board predicted by a fit to the others."""
    squares = 0.0
    for board in found:
        law = fitted([one for one in found if one is not board], grouped=grouped)
        if board.like not in law.full_watts:  # the only one of its architecture
            law = Fit({board.like: law.full_watts[OTHER_BOARDS]}, law.share)
        squares += law.error(board) ** 2
    return f"{100 * math.sqrt(squares / len(found)):.1f} %"


def law_table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for units, grouped in BY_ARCHITECTURE.items():
        those = boards(found, units)
        law = fitted(those, grouped=grouped)
        share = f"{law.share:.2f}"
        for like in sorted(law.full_watts) if grouped else [OTHER_BOARDS]:
            count = sum(board.like == like or not grouped for board in those)
            full = f"{law.full_watts[like]:.1f}"
            rows.append((units, like if grouped else "all", str(count), full, share))
    head = ("products in", "architecture", "boards", "`watts_needed`", "`share`")
    return markdown_table(head, rows)


def scatter_table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for units in BY_ARCHITECTURE:
        those = boards(found, units)
        alone = [math.log(board.reached) for board in those]
        mean = sum(alone) / len(alone)
        one_share = math.sqrt(sum((value - mean) ** 2 for value in alone) / len(alone))
        by_all, by_group = (scatter(those, grouped=grouped) for grouped in (False, True))
        rows.append((units, str(len(those)), f"{100 * one_share:.1f} %", by_all, by_group))
    head = ("products in", "boards", "one share", "one law", "one of each architecture")
    return markdown_table(head, rows)


def boards_table(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for key in sorted(found):
        gpu = find_gpu(key)
        cells = []
        for units, dtypes in UNITS.items():
            dtype = next((one for one in dtypes if one in gpu.peak_flops_per_s), "")
            share = found[key].get(units, 0.0) / gpu.peak_flops_per_s.get(dtype, math.inf)
            cells.append(f"{100 * share:.0f} %" if share else "")
        rows.append((key, *cells))
    return markdown_table(("measured share of the peak", *UNITS), rows)


def by_dtype(gpu: GpuSpec, rates: Mapping[str, float]) -> dict[str, int]:
    """`rates` by units as `measured_flops_per_s` of the board's `gpu.json`."""
    return {
        dtype: round(rates[units])
        for units, dtypes in UNITS.items()
        for dtype in dtypes
        if units in rates and dtype in gpu.peak_flops_per_s
    }


def store(gpu: GpuSpec, rates: Mapping[str, float]) -> None:
    """Write what was measured into the board's `gpu.json`."""
    path = CALIBRATION / gpu.key / "gpu.json"
    values = read_object(path)
    values["measured_flops_per_s"] = by_dtype(gpu, rates)
    values["sources"]["measured_flops_per_s"] = "benchmarks/board_products.csv"
    write_object(path, values)


def main() -> None:
    found = measured()
    text = "\n\n".join((law_table(found), scatter_table(found), boards_table(found)))
    print(text)
    if "--write" in sys.argv[1:]:
        for key, rates in found.items():
            store(find_gpu(key), rates)
        write_page(PAGE, TITLE, f"{LEGEND}\n\n{text}")


if __name__ == "__main__":
    main()
