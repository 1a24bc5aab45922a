"""Which kernel computes an attention, and whether it reads a mask."""

from __future__ import annotations

from typing import Literal

from whichlora.spec.architecture import Attention, Linear
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count

MAX_FUSED_HEAD_DIM = 256  # beyond it CUDA has no fused kernel

Kernel = Literal["fused", "math", "eager"]


def fused_qkv(attention: Attention) -> Linear | None:
    """The projection that returns q, k and v in one tensor, if there is one."""
    if attention.projection == "gated":  # its query and gate together may be as wide
        return None
    width = attention.q_width + attention.k_width + attention.v_width
    return next((linear for linear in attention.linears if linear.out_features == width), None)


def attention_kernel(attention: Attention, dtypes: Dtypes) -> Kernel:
    """What computes the attention: `attn` is requested, the class and the device decide.

    Source: torch 2.13 `sdp_utils.cpp` and `sdp_utils_cpp.cpp`; the classes of transformers 5.23.
    """
    if dtypes.attn == "flash_attention_2":
        return "fused"
    if dtypes.attn == "eager" or attention.sdpa == "eager":
        return "eager"
    if attention.sdpa == "math":
        return "math"
    if dtypes.device_kind == "cpu":  # its flash kernel has no dropout
        return "math" if attention.dropout and dtypes.training else "fused"
    return "math" if attention.head_dim > MAX_FUSED_HEAD_DIM else "fused"


def is_masked(attention: Attention, dtypes: Dtypes, span: Count) -> Count:
    """1 where SDPA gets a mask tensor, else 0: padding, or a window that the tokens fill.

    Source: transformers 5.23 `_ignore_causal_mask_sdpa`.

    Kind: exact.
    """
    if dtypes.padded or attention.always_masked:
        return 1 + 0 * span
    if attention.sliding_window is None:
        return 0 * span
    return 1 * (span >= attention.sliding_window)


def has_mask_per_head(attention: Attention) -> bool:
    """Whether the model adds ALiBi to its mask, which all layers then share. Falcon does."""
    return attention.always_masked and attention.position == "alibi"
