"""LoRA: a rank-r update B·A beside each frozen target (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from typing import Any

from whichlora.architecture import Linear
from whichlora.methods.base import Method
from whichlora.numeric import Count
from whichlora.specs import ALL_LINEAR, RunConfig
from whichlora.stack import Stack


def low_rank_params(linear: Linear, r: Count) -> Count:
    """A is [r, in_features], B is [out_features, r]. Kind: exact."""
    rank = r * linear.rank_multiple
    return rank * (linear.in_features + linear.out_features) * linear.count


def low_rank_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A and B. Kind: exact."""
    rank = r * linear.rank_multiple
    return (rank, linear.in_features), (linear.out_features, rank)


def cast_bytes(stack: Stack) -> int:
    """Read and written per input of one forward: widened to the adapter dtype, and narrowed.

    Kind: exact where each target reads an input of its own. Source: as `output_bytes`.
    """
    if stack.adapter_bytes != 4 or stack.shared_inputs:
        return 0
    widened = stack.compute_bytes + 4
    return 2 * widened if stack.autocast else widened


def output_bytes(stack: Stack) -> int:
    """Read and written per output of one forward: the update scaled, added to the base result.

    Where adapters work in fp32 on a 16-bit base without autocast, the sum is fp32 and narrowed.
    Kind: exact. Source: operators of peft 0.21.2 `lora.Linear.forward`, counted by a trace.
    """
    product, result = stack.adapter_product_bytes, stack.linear_out_bytes
    wide = max(product, result)
    narrowed = wide + result if wide != result else 0
    return 2 * product + (result + product + wide) + narrowed


def peft_config(run: RunConfig) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig`; the caller resolves target groups but all-linear."""
    targets = run.target_modules
    return {
        "r": run.r,
        "lora_alpha": run.lora_alpha,
        "lora_dropout": run.lora_dropout,
        "target_modules": ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        "bias": run.bias,
        **({"use_rslora": True} if run.use_rslora else {}),
    } | ({"modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {})


# Kernels per target: traced on transformers 5.23 and peft 0.21.2, 7 targets against 2 of a Llama
# layer, forward 94 and 54 with autocast, 66 and 46 without; backward 130 and 80, 102 and 72.
METHOD = Method(
    name="lora",
    summary="low-rank adapters on a 16-bit base",
    peft_config=peft_config,
    adapter_params=low_rank_params,
    adapter_shapes=low_rank_shapes,
    forward_ops=(4, 8),
    backward_ops=(6, 10),
)
