"""Fit what the kernels of serving engines reach of a datasheet, by GPU.

    git clone https://github.com/ai-dynamo/aiconfigurator    (tables with Git LFS; PyPI's
        aiconfigurator-core has them, too)
    python benchmarks/engine_kernels.py aiconfigurator --write    docs/accuracy/engine_kernels.md

The tables state the seconds of vLLM's products, of the experts of a layer, of attention over a
prompt and of attention while decoding. A kernel is fitted as a time of its own plus the slower of
arithmetic and memory, in relative error; `whichlora/serving/kernel_rates.py` has the results,
rounded. Apache-2.0.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from markdown_tables import markdown_table, write_page
from scipy.optimize import least_squares

from whichlora.store.gpus import find_target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

SYSTEMS = Path("aic-core/src/aiconfigurator_core/systems/data")
GPUS = {
    "a100_sxm": "a100-sxm-80gb",
    "l40s": "l40s-48gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-180gb",
    "rtx_pro_6000_server": "rtx-pro-6000-blackwell-server-96gb",
}
LEAST_WEIGHTS = 4_000_000  # of a matrix, so that its reads matter
FEW_ROWS = 64  # of a product that reads decide: those of decoding steps
CODE_BYTES = 0.53  # with their scales
FP4_BYTES = 0.5625  # with a byte for each 16
CHOICES = "power_law_1.01"  # of the table's distributions of tokens over experts
HEAD_DIM = 128
HEADER = (
    "GPU",
    "kernel",
    "n",
    "its own time",
    "bandwidth",
    "peak",
    "query passes",
    "an input",
    "activations",
    "median",
    "p90",
)


def tables(
    clone: Path, system: str, operation: str, name: str, engine: str = "vllm"
) -> list[pd.DataFrame]:
    """Those of an engine's releases, the newest last."""
    found = sorted(
        (clone / SYSTEMS / system / operation / engine).glob(f"*/{name}_perf.parquet"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)],
    )
    return [pd.read_parquet(path) for path in found]


def table(clone: Path, system: str, operation: str, name: str) -> pd.DataFrame:
    """The newest of vLLM's tables."""
    return tables(clone, system, operation, name)[-1]


def _fitted(
    predicted: Callable[[Array], Array], measured: Array, first: list[float]
) -> tuple[Array, float, float]:
    """Coefficients, and the median and p90 of relative errors."""

    def residuals(logs: Array) -> Array:
        return np.log(predicted(np.exp(logs)) / measured)

    logs = least_squares(residuals, np.log(first), loss="soft_l1", f_scale=0.1).x
    errors = np.abs(np.expm1(residuals(logs)))
    return np.exp(logs), float(np.median(errors)), float(np.quantile(errors, 0.9))


def products(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Its own time and reads of products of few rows, the share of the peak of all."""
    frame = table(clone, system, "gemm", "gemm")
    frame = frame[(frame.gemm_dtype == "bfloat16") & (frame.n * frame.k >= LEAST_WEIGHTS)]
    few, median, p90 = _of_products(frame[frame.m <= FEW_ROWS], peak, bandwidth)
    every, _, _ = _of_products(frame, peak, bandwidth)
    return (
        "products", str(len(frame)), _us(few[0]), f"{1 / few[1]:.2f}", f"{1 / every[2]:.2f}", "",
        "", "", _percent(median), _percent(p90),
    )  # fmt: skip


def _of_products(frame: pd.DataFrame, peak: float, bandwidth: float) -> tuple[Array, float, float]:
    m, n, k = (frame[name].to_numpy(float) for name in ("m", "n", "k"))
    flops, moved = 2 * m * n * k, 2 * (n * k + m * k + m * n)

    def seconds(c: Array) -> Array:
        return c[0] + np.maximum(c[1] * moved / bandwidth, c[2] * flops / peak)

    return _fitted(seconds, 1e-3 * frame.latency.to_numpy(float), [4e-6, 1.2, 1.4])


def narrow(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Of 8-bit floats, whose inputs a kernel of its own narrows; shares are of twice the peak."""
    frame = table(clone, system, "gemm", "gemm")
    return _of_narrow(frame, "fp8", "products in 8 bits", 1, 2 * peak, bandwidth)


def fp4(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Of 4-bit floats (NVFP4) on both sides; shares are of four times the peak."""
    frame = table(clone, system, "gemm", "gemm")
    return _of_narrow(frame, "nvfp4", "products in NVFP4", FP4_BYTES, 4 * peak, bandwidth)


def _of_narrow(
    frame: pd.DataFrame, dtype: str, name: str, element_bytes: float, peak: float, bandwidth: float
) -> tuple[str, ...]:
    """Products whose inputs and weights take `element_bytes` each, and outputs 16 bit."""
    frame = frame[(frame.gemm_dtype == dtype) & (frame.n * frame.k >= LEAST_WEIGHTS)]
    if frame.empty:
        return ()
    m, n, k = (frame[column].to_numpy(float) for column in ("m", "n", "k"))
    flops, moved = 2 * m * n * k, element_bytes * (n * k + m * k) + 2 * m * n

    def seconds(c: Array) -> Array:
        work = np.maximum(c[1] * moved / bandwidth, c[2] * flops / peak)
        return c[0] + work + c[3] * m * k

    first = [8e-6, 1.2, 1.5, 3e-12]
    c, median, p90 = _fitted(seconds, 1e-3 * frame.latency.to_numpy(float), first)
    return (
        name, str(len(frame)), _us(c[0]), f"{1 / c[1]:.2f}", f"{1 / c[2]:.2f}", "",
        f"{1e12 * c[3]:.1f} ps", "", _percent(median), _percent(p90),
    )  # fmt: skip


def fp4_experts(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Of the same; shares are of four times the peak."""
    frame = _of_form(table(clone, system, "moe", "moe"), "nvfp4")
    return _of_experts(frame, "experts in NVFP4", FP4_BYTES, 4 * peak, bandwidth)


def experts(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    frame = _of_form(table(clone, system, "moe", "moe"), "bfloat16")
    return _of_experts(frame, "experts", 2, peak, bandwidth)


def narrow_experts(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Of 8-bit floats, in blocks where the table has them; shares are of twice the peak."""
    every = table(clone, system, "moe", "moe")
    blocks = _of_form(every, "fp8_block")
    frame = _of_form(every, "fp8") if blocks.empty else blocks
    return _of_experts(frame, "experts in 8 bits", 1, 2 * peak, bandwidth)


def code_experts(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    """Of codes of 4 bits that Marlin's kernel unpacks; by SGLang where vLLM has none.

    Of vLLM 0.14 where it has them: 0.18 and 0.19 read as if no expert were skipped, 0.24 has few.
    """
    for engine in ("vllm", "sglang"):
        found = [_of_form(each, "int4_wo") for each in tables(clone, system, "moe", "moe", engine)]
        for frame in [*(each for each in found if _is_of_0_14(each)), *reversed(found)]:
            if not frame.empty:
                return _of_experts(frame, "experts in 4 bits", CODE_BYTES, peak, bandwidth)
    return ()


def _is_of_0_14(frame: pd.DataFrame) -> bool:
    is_vllm = frame.framework.str.upper() == "VLLM"
    return bool((is_vllm & frame.version.str.startswith("0.14.")).any())


def _of_form(frame: pd.DataFrame, form: str) -> pd.DataFrame:
    usual = (frame.moe_dtype == form) & (frame.moe_ep_size == 1)
    return frame[usual & (frame.distribution == CHOICES)]


def _of_experts(
    frame: pd.DataFrame, named: str, width: float, peak: float, bandwidth: float
) -> tuple[str, ...]:
    """Both products of chosen experts and what is between them, after routing.

    Rows of each expert are filled up to tiles of 16 to 128: half a tile in the mean.
    """
    if frame.empty:
        return ()
    tokens, hidden, inner, active, count, ranks = (
        frame[name].to_numpy(float)
        for name in (
            "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
        )
    )  # fmt: skip
    visited = count * (1 - (1 - active / count) ** tokens)
    rows = tokens * active / visited
    tile = np.clip(2 ** np.ceil(np.log2(rows)), 16, 128)
    weights = 3 * hidden * inner / ranks
    flops = 2 * visited * (rows + tile / 2) * weights
    moved = 2 * tokens * active * (2 * hidden + 3 * inner / ranks)

    def seconds(c: Array) -> Array:
        work = np.maximum(c[1] * visited * weights * width / bandwidth, c[2] * flops / peak)
        return c[0] + work + c[3] * moved / bandwidth

    first = [3e-5, 1.2, 2.0, 3.0]
    c, median, p90 = _fitted(seconds, 1e-3 * frame.latency.to_numpy(float), first)
    return (
        named, str(len(frame)), _us(c[0]), f"{1 / c[1]:.2f}", f"{1 / c[2]:.2f}", "", "",
        f"{1 / c[3]:.2f}", _percent(median), _percent(p90),
    )  # fmt: skip


def decoding(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    frame = table(clone, system, "attention", "generation_attention")
    groups = frame.num_heads / frame.num_key_value_heads
    usual = (frame.head_dim == HEAD_DIM) & groups.between(2, 8)
    usual &= frame.kv_cache_dtype == "bfloat16"
    if "window_size" in frame:
        usual &= frame.window_size == 0
    frame = frame[usual]
    batch, heads, keys = (
        frame[name].to_numpy(float) for name in ("batch_size", "num_heads", "num_key_value_heads")
    )
    cached = batch * (frame.step.to_numpy(float) + 1) * keys * 2 * HEAD_DIM * 2
    queries = batch * heads * 2 * HEAD_DIM * 2

    def seconds(c: Array) -> Array:
        return c[0] + (c[1] * cached + c[2] * queries) / bandwidth

    c, median, p90 = _fitted(seconds, 1e-3 * frame.latency.to_numpy(float), [1e-5, 1.2, 10.0])
    return (
        "attention, decoding", str(len(frame)), _us(c[0]), f"{1 / c[1]:.2f}", "", f"{c[2]:.0f}", "",
        "", _percent(median), _percent(p90),
    )  # fmt: skip


def prompts(clone: Path, system: str, peak: float, bandwidth: float) -> tuple[str, ...]:
    frame = table(clone, system, "attention", "context_attention")
    usual = (frame.head_dim == HEAD_DIM) & (frame.kv_cache_dtype == "bfloat16")
    if "window_size" in frame:
        usual &= frame.window_size == 0
    frame = frame[usual & (frame.attn_dtype == "bfloat16")]
    batch, heads, tokens = (
        frame[name].to_numpy(float) for name in ("batch_size", "num_heads", "isl")
    )
    flops = batch * heads * tokens**2 * 2 * HEAD_DIM

    def seconds(c: Array) -> Array:
        return c[0] + c[1] * flops / peak + c[2] * batch * tokens * heads

    c, median, p90 = _fitted(seconds, 1e-3 * frame.latency.to_numpy(float), [1e-5, 1.8, 1e-9])
    return (
        "attention, prompt", str(len(frame)), _us(c[0]), "", f"{1 / c[1]:.2f}", "", "",
        "", _percent(median), _percent(p90),
    )  # fmt: skip


FITS = (
    products, narrow, fp4, experts, narrow_experts, fp4_experts, code_experts, decoding, prompts,
)  # fmt: skip


def rows(clone: Path) -> Iterator[tuple[str, ...]]:
    for system, key in GPUS.items():
        gpu = find_target(key)
        for fit in FITS:
            cells = fit(clone, system, gpu.peak_flops_per_s["bf16"], gpu.bandwidth_bytes_per_s)
            if cells:
                yield (key, *cells)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    text = (
        "Tables of [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator) (Apache-2.0): "
        "vLLM's operators, 16 bit and products of 8-bit and 4-bit floats (NVFP4), the newest "
        "release of each GPU. "
        "Shares are of the datasheet; an input is one number that is narrowed. Experts "
        "are all kernels of a layer after routing; activations are what passes between their "
        "products. `kernel_rates` states these by multiprocessor, as H100 and H200 agree so, and "
        "what Marlin unpacks (4 bits), too. Of products in 16 bit, their own time, the bandwidth "
        f"and errors are of up to {FEW_ROWS} "
        "rows, which wait for weights."
        "\n\n" + markdown_table(HEADER, rows(asked.clone))
    )
    print(text)
    if asked.write:
        write_page("engine_kernels", "Kernels of serving engines", text)


if __name__ == "__main__":
    main()
