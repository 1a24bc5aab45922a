"""How tiles and waves explain public matrix products: `product_tiles.py VIDUR NEUSIGHT [--write]`.

`VIDUR` is a clone of https://github.com/microsoft/vidur (products in fp16 of transformer layers,
median of repeated runs), `NEUSIGHT` one of https://github.com/sitar-lab/NeuSight (products in
fp32). Neither is part of this repository. Fits `products.LAST_WAVE_LOST`. Prints
`docs/accuracy/product_tiles.md`; `--write` stores it.
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from markdown_tables import markdown_table, summary, write_page
from numpy.typing import NDArray

from whichlora.errors import ConfigError
from whichlora.spec.gpu import GpuSpec
from whichlora.store.gpus import find_gpu
from whichlora.timing import model as timing
from whichlora.timing.products import TILE

PAGE, TITLE = "product_tiles", "Tiles and waves of matrix products"
LEGEND = (
    "Seconds of one product are the slower of its FLOPs and its bytes, each times a coefficient, "
    "plus a constant. `lost` is the share of the last wave that idle multiprocessors lose "
    "([time.md](../time.md#tiles-and-waves)). Errors are median and 90th percentile: of a fit to "
    "the GPU itself, and of one to the other GPUs."
)
ROWS = 700  # of each GPU, drawn at random
LEAST_ROWS, LEAST_SIDE = 64, 256
VIDUR_GPUS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "a40": "a40-48gb"}

Array = NDArray[np.float64]
Product = tuple[int, int, int]  # rows, columns, inner


@dataclass(frozen=True, slots=True)
class Products:
    """Measured products of one GPU."""

    gpu: GpuSpec
    dtype: str
    shapes: Array
    seconds: Array

    def tiles(self, lost: float | None) -> Array:
        """FLOPs with idle multiprocessors, over those without; `lost` None: no tiles."""
        rows, columns, _ = self.shapes.T
        assert self.gpu.num_multiprocessors is not None
        if lost is None:
            return np.ones(len(rows))
        tiles = np.ceil(rows / TILE) * np.ceil(columns / TILE)
        missing = -tiles % self.gpu.num_multiprocessors
        return np.asarray((tiles + lost * missing) * TILE * TILE / (rows * columns))

    def log_errors(self, values: Sequence[float], lost: float | None) -> Array:
        rows, columns, inner = self.shapes.T
        rate = timing.product_rate(self.gpu, self.dtype) * timing.sustained_factor(
            self.gpu, self.dtype
        )
        size = 4 if self.dtype == "fp32" else 2
        moved = size * (rows * inner + inner * columns + rows * columns)
        arithmetic = 2 * rows * columns * inner * self.tiles(lost) / rate * math.exp(values[0])
        reads = moved / self.gpu.bandwidth_bytes_per_s * math.exp(values[1])
        return np.log((np.maximum(arithmetic, reads) + math.exp(values[2])) / self.seconds)


def vidur_products(folder: Path) -> Iterator[tuple[str, Product, float]]:
    for path in sorted(folder.glob("data/profiling/compute/*/*/*/mlp.csv")):
        key = VIDUR_GPUS[path.relative_to(folder).parts[3]]
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                ranks, hidden = int(row["num_tensor_parallel_workers"]), int(row["n_embd"])
                heads, groups = int(row["n_head"]), int(row["n_kv_head"])
                mlp, head_dim = int(row["n_expanded_embd"]), hidden // heads
                up = mlp * (2 if row["use_gated_mlp"] == "True" else 1)
                for name, columns, inner in (
                    ("attn_pre_proj", (heads + 2 * groups) * head_dim // ranks, hidden),
                    ("attn_post_proj", hidden, heads * head_dim // ranks),
                    ("mlp_up_proj", up // ranks, hidden),
                    ("mlp_down_proj", hidden, mlp // ranks),
                ):
                    shape = (int(row["num_tokens"]), columns, inner)
                    yield key, shape, float(row[f"time_stats.{name}.median"]) * 1e-3


def neusight_products(folder: Path) -> Iterator[tuple[str, Product, float]]:
    data = folder / "scripts" / "asplos" / "data" / "dataset"
    for path in (*sorted(data.glob("train/collect/linear/*/*.csv")), data / "test/linear.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                try:
                    key = find_gpu(row["Device"]).key
                except ConfigError:
                    continue
                if row["B"] == "1":
                    shape = (int(row["M"]), int(row["N"]), int(row["K"]))
                    yield key, shape, float(row["Latency"]) * 1e-3


def drawn(found: Iterator[tuple[str, Product, float]], dtype: str) -> dict[str, Products]:
    """`ROWS` products of each GPU, repeated ones as their median."""
    measured: dict[str, dict[Product, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, shape, seconds in found:
        if shape[0] >= LEAST_ROWS and min(shape[1:]) >= LEAST_SIDE:
            measured[key][shape].append(seconds)
    products = {}
    for key, by_shape in sorted(measured.items()):
        shapes = sorted(by_shape)
        chosen = random.Random(0).sample(shapes, min(ROWS, len(shapes)))
        seconds = np.array([median(by_shape[shape]) for shape in chosen])
        products[key] = Products(find_gpu(key), dtype, np.array(chosen, dtype=float), seconds)
    return products


def fitted(found: Sequence[Products], lost: float | Callable[[float], float] | None) -> Array:
    """Coefficients; a callable `lost` makes the share of a fourth value, which is fitted too."""
    from scipy.optimize import least_squares

    def residuals(values: Array) -> Array:
        share = lost(values[3]) if callable(lost) else lost
        return np.concatenate(
            [one.log_errors(values, share) / math.sqrt(len(one.seconds)) for one in found]
        )

    start = [0.2, 0.2, math.log(5e-6), *([-1.0] if callable(lost) else [])]
    return np.asarray(least_squares(residuals, start, loss="soft_l1", f_scale=0.005).x)


def share(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def table(products: Mapping[str, Products]) -> str:
    everything = list(products.values())
    values = fitted(everything, share)
    lost = share(float(values[3]))
    rows = []
    for key, one in products.items():
        others = [other for name, other in products.items() if name != key]
        cells = [key, str(len(one.seconds))]
        for form in (None, 0.0, lost):
            for seen in ([one], others):
                errors = summary(np.expm1(one.log_errors(fitted(seen, form), form)).tolist())
                cells.append(f"{100 * errors.median:.0f}, {100 * errors.p90:.0f} %")
        rows.append(cells)
    head = ["GPU", "n", "no tiles", "unseen", "tiles", "unseen", "tiles and waves", "unseen"]
    efficiency = 100 * math.exp(-float(values[0]))
    fit = f"All together: `lost` {lost:.2f}, {efficiency:.0f} % of the sustained peak."
    return f"{markdown_table(head, rows)}\n\n{fit}"


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:] if argument != "--write"]
    if len(paths) != 2:
        sys.exit("product_tiles.py: give the two folders named in its docstring")
    half = drawn(vidur_products(paths[0]), "fp16")
    full = drawn(neusight_products(paths[1]), "fp32")
    text = f"## fp16 (Vidur)\n\n{table(half)}\n\n## fp32 (NeuSight)\n\n{table(full)}"
    print(text)
    if "--write" in sys.argv[1:]:
        write_page(PAGE, TITLE, f"{LEGEND}\n\n{text}")


if __name__ == "__main__":
    main()
