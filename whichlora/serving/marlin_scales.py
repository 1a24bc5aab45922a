"""Scales of FP8 in squares as Marlin's kernels read them, on cards without products in FP8."""

from __future__ import annotations

from whichlora.memory.entries import Fact
from whichlora.memory.weights import quantised_matrices
from whichlora.serving.base import Served
from whichlora.serving.vllm_settings import capability
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.numeric import ceil_div

FP8_CAPABILITY = 8.9
REPEATED_SCALES = Fact(
    part="weights",
    what="scales of squares, repeated for every row",
    shape="[in_features / 128, out_features]",
    dtype="compute_bytes",
    why="Marlin has no scales of squares: one becomes 128, in the place of those of the file",
    source="vLLM 0.25.0 quantization/utils/marlin_utils_fp8.py prepare_fp8_layer_for_marlin, "
    "`repeat_interleave`; logs of Qwen3.6-27B-FP8 of 14.68 GiB on an RTX 3090, and of 14.28 of "
    "Qwen3.8-27B-FP8 on an RTX 5090",
)


def repeated_bytes(served: Served, rank: ModelSpec) -> int:
    """What these scales take beyond those of the file; 0 where cards multiply in FP8.

    Kind: exact for layers, whose experts have the same. Source: `REPEATED_SCALES`.
    """
    block, width = served.dtypes.scale_block, served.dtypes.compute_bytes
    if not block or capability(served) >= FP8_CAPABILITY:
        return 0
    total = 0
    for layer, count in rank.layers():
        for linear in layer.linears:
            if is_quantised(linear, served.dtypes):
                matrices, rows, num_weights = quantised_matrices(linear)
                columns = ceil_div(num_weights // rows, block)
                squares = ceil_div(rows, block)
                total += count * matrices * columns * (width * rows - 4 * squares)
    return int(total)
