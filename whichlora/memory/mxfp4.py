"""Experts in MXFP4: 4-bit floats in blocks of 32 that share an 8-bit exponent (gpt-oss)."""

from __future__ import annotations

from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import packed_experts
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count, ceil_div

BLOCK = 32  # weights that share one exponent
_INDEX_BYTES = 4 + 8  # into the table of 16 values: int32, which torch widens to int64
_MOST_CODES = 32768 * 1024 * BLOCK // 2  # that are expanded at once: `rows_per_chunk`
_WIDE_SCALE_BYTES = 4

SWIZZLED_BLOCKS = Fact(
    part="temporary",
    what="expert blocks before they are laid out for the kernel",
    shape="[num_experts, out_features, in_features / 2]",
    dtype="uint8",
    why="convert_layout writes them anew while the tensor that was read is still held",
    source="transformers 5.23 integrations/mxfp4.py swizzle_mxfp4_convertops",
    kind="upper bound",
)
EXPANDED_EXPERTS = Fact(
    part="weights",
    what="expert blocks that are being expanded",
    shape="[num_experts, in_features, out_features] and its parts",
    dtype="16 bit, int32 and uint8",
    why="from_pretrained expands one parameter after the other, and transposes it into a copy",
    source="transformers 5.23 integrations/mxfp4.py convert_moe_packed_tensors",
    kind="upper bound",
)


def packed_parts(num_weights: int) -> tuple[int, int]:
    """Bytes of the codes and of the exponents of `num_weights` values: 4.25 bits each.

    Kind: exact. Source: OCP Microscaling Formats 1.0, section 5.3; transformers 5.23
    `Mxfp4GptOssExperts`.
    """
    codes: Count = ceil_div(num_weights, 2)
    return int(codes), int(ceil_div(num_weights, BLOCK))


def _largest_parameter(model: ModelSpec) -> int:
    return max((linear.num_weights for linear in packed_experts(model)), default=0)


def swizzling_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """What is on the device beside the loaded weights while one parameter is laid out.

    Kind: upper bound; a layout that pads nothing is a view. Source: `SWIZZLED_BLOCKS`.
    """
    return sum(packed_parts(_largest_parameter(model))) if dtypes.quant == "mxfp4" else 0


def expanding_bytes(model: ModelSpec, width: int) -> int:
    """What one parameter's expansion holds beside the weights that are loaded.

    The codes and their exponents, in 8 and 32 bit; the result; then either indices of every second
    weight with the values that they pick, or the transposed copy. The one copy that stays is among
    the weights.

    Args:
        width: bytes of an element of the result.

    Kind: exact, traced (`tests/memory/test_mxfp4_oracle.py`).
    Source: transformers 5.23 `_convert_moe_packed_tensors`.
    """
    num_weights = _largest_parameter(model)
    codes, exponents = packed_parts(num_weights)
    held = codes + exponents + _WIDE_SCALE_BYTES * exponents
    picking = width * num_weights + (_INDEX_BYTES + width) * min(codes, _MOST_CODES)
    transposing = 2 * width * num_weights
    return held + max(picking, transposing) - width * num_weights
