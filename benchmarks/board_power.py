"""How much of their peak boards reach in large products: `board_power.py DATABASE.md [--write]`.

`DATABASE.md` is that of https://github.com/zzc0721/torch-performance-test-data, which is not part
of this repository: a row for each board that somebody measured, with the best rate that square
products of PyTorch reached in each dtype. Boards that the catalog has with their power give the
constants of `timing.power_factor`. Prints `docs/accuracy/board_power.md`; `--write` stores it.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from markdown_tables import markdown_table, write_page

from whichlora.errors import ConfigError
from whichlora.spec.gpu import GpuSpec
from whichlora.store.gpus import find_gpu

PAGE, TITLE = "board_power", "The power of a board"
LEGEND = (
    "The law of [time.md](../time.md#the-power-of-a-board), fitted to public matrix products; "
    "scatter is the standard deviation of log errors."
)
COLUMNS = ("device", "fp32", "tf32", "fp16", "bf16")
UNITS = {"bf16, fp16": ("bf16", "fp16"), "fp32": ("fp32",)}
LAW = 1 / 3
SMALL = 0.15  # log error up to which a board counts in full: some are cooled or set badly


@dataclass(frozen=True, slots=True)
class Board:
    """The best products of one board in one dtype.

    Args:
        watts: that it may draw, for each TFLOP/s of its peak.
        reached: share of the peak, the median over those who measured.
    """

    watts: float
    reached: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Share of the peak: `share * min(1, watts / full_watts) ** exponent`."""

    full_watts: float
    share: float
    exponent: float

    def error(self, board: Board) -> float:
        """Log of reached over fitted."""
        limited = min(0.0, self.exponent * math.log(board.watts / self.full_watts))
        return math.log(board.reached / self.share) - limited


def rates(text: str) -> Iterator[tuple[GpuSpec, dict[str, float]]]:
    """The rows whose device is one board of the catalog; FLOP/s by dtype."""
    for line in text.splitlines():
        cells = dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:]), strict=False))
        try:
            gpu = find_gpu(cells.pop("device"))
        except (ConfigError, KeyError):  # not in the catalog, or several boards of it
            continue
        found = {}
        for dtype, cell in cells.items():
            try:
                found[dtype] = float(cell) * 1e12
            except ValueError:  # empty, or "N/A"
                continue
        yield gpu, found


def boards(text: str, dtypes: Sequence[str]) -> list[Board]:
    """One for each accelerator, in the first of `dtypes` that it has units for."""
    shares = defaultdict(list)
    watts = {}
    for gpu, found in rates(text):
        dtype = next((one for one in dtypes if one in gpu.peak_flops_per_s), "")
        if dtype in found and gpu.power_w is not None:
            peak = gpu.peak_flops_per_s[dtype]
            shares[gpu.key].append(found[dtype] / peak)
            watts[gpu.key] = gpu.power_w / (peak / 1e12)
    return [Board(watts[key], median(reached)) for key, reached in shares.items()]


def fitted(found: Sequence[Board], exponent: float | None) -> Fit:
    """Robust least squares of log errors; the exponent is fitted where it is None."""
    from scipy.optimize import least_squares

    def fit(values: Sequence[float]) -> Fit:
        return Fit(math.exp(values[0]), math.exp(values[1]), exponent or values[2])

    start = [math.log(median(board.watts for board in found)), 0.0, LAW][: 2 if exponent else 3]
    solved = least_squares(
        lambda values: [fit(values).error(board) for board in found],
        start,
        loss="soft_l1",
        f_scale=SMALL,
    )
    return fit([float(value) for value in solved.x])


def scatter(errors: Sequence[float]) -> str:
    """Standard deviation of log errors."""
    mean = sum(errors) / len(errors)
    return f"{100 * math.sqrt(sum((one - mean) ** 2 for one in errors) / len(errors)):.1f} %"


def table(text: str) -> str:
    rows = []
    for units, dtypes in UNITS.items():
        found = boards(text, dtypes)
        law, free = fitted(found, LAW), fitted(found, None)
        rows.append(
            (
                units,
                str(len(found)),
                f"{law.full_watts:.1f}",
                f"{law.share:.2f}",
                scatter([law.error(board) for board in found]),
                scatter([math.log(board.reached) for board in found]),
                f"{free.exponent:.2f}",
                scatter([free.error(board) for board in found]),
            )
        )
    head = (
        "products in",
        "boards",
        "`watts_needed`",
        "`share`",
        "scatter about it",
        "about one share",
        "exponent, if fitted",
        "scatter then",
    )
    return markdown_table(head, rows)


def main() -> None:
    paths = [argument for argument in sys.argv[1:] if argument != "--write"]
    if len(paths) != 1:
        sys.exit("board_power.py: give the path of the database.md named in its docstring")
    text = table(Path(paths[0]).read_text(encoding="utf-8"))
    print(text)
    if "--write" in sys.argv[1:]:
        write_page(PAGE, TITLE, f"{LEGEND}\n\n{text}")


if __name__ == "__main__":
    main()
