"""DoRA: LoRA for the direction, a trained magnitude (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.architecture import Linear
from whichlora.methods import lora
from whichlora.numeric import Count
from whichlora.specs import RunConfig
from whichlora.stack import Stack


def adapter_params(linear: Linear, r: Count) -> Count:
    """LoRA's factors and one magnitude per output. Kind: exact."""
    return lora.low_rank_params(linear, r) + linear.out_features * linear.count


def saved_bytes_per_token(linear: Linear, stack: Stack) -> int:
    """Base result and LoRA result, both needed for the magnitude's gradient.

    Kind: exact. Source: saved-tensor trace of peft 0.21.2 `DoraLinearLayer.forward`.
    """
    both = stack.linear_out_bytes + stack.adapter_product_bytes
    return linear.active * linear.out_features * both


def saved_bytes(linear: Linear, stack: Stack) -> int:
    """The norm, and the magnitude over it twice (once less 1): three fp32 vectors.

    With dropout DoRA repeats the base product, and keeps the weight for it wherever that is no
    longer the parameter itself: expanded from few bits, or cast to the adapter's dtype.
    Kind: exact on CPU, unmeasured on CUDA with 4-bit weights. Source: as above.
    """
    vectors = 3 * 4 * linear.out_features * linear.count
    is_copy = stack.quant != "none" or stack.mode in ("A", "C")
    if stack.lora_dropout and is_copy:
        return vectors + linear.num_weights * stack.input_bytes
    return vectors


def transient_bytes(linear: Linear, stack: Stack) -> int:
    """The weight norm: an identity [in, in]; B·A, the same scaled, and the sum, all [out, in].

    A weight in few or other bits is expanded besides.
    Kind: exact in fp32, else an upper bound. Source: peft 0.21.2 `DoraLinearLayer.forward`.
    """
    dense = linear.in_features * linear.out_features
    identity = linear.in_features * linear.in_features
    is_copy = stack.quant != "none" or stack.mode in ("A", "C")
    return (identity + (3 + is_copy) * dense) * stack.adapter_bytes


def weight_flops(linear: Linear, r: Count) -> Count:
    """B·A as a dense matrix: [out, r] @ [r, in], and the norm over it."""
    return linear.count * (2 * r + 4) * linear.in_features * linear.out_features


def peft_config(run: RunConfig) -> dict[str, Any]:
    return lora.peft_config(run) | {"use_dora": True}


METHOD = replace(
    lora.METHOD,
    name="dora",
    summary="LoRA with a trained magnitude per output",
    peft_config=peft_config,
    adapter_params=adapter_params,
    saved_bytes_per_token=saved_bytes_per_token,
    saved_bytes=saved_bytes,
    transient_bytes=transient_bytes,
    weight_flops=weight_flops,
    forward_ops=(18, 24),
    backward_ops=(14, 20),
)
