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


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """LoRA's factors and the magnitudes. Kind: exact."""
    return *lora.low_rank_shapes(linear, r), (1, linear.out_features)


def weight_flops(linear: Linear, r: Count) -> Count:
    """B·A as a dense matrix: an identity [in, in] is sent through both factors.

    Kind: exact. Nothing flows back: the norm is a constant of the gradient.
    """
    both = linear.in_features + linear.out_features
    return linear.count * 2 * r * linear.in_features * both


def weight_bytes(linear: Linear, stack: Stack) -> int:
    """What building B·A and the norm of the sum reads and writes in one forward.

    A quantised weight is expanded besides (`work.training_work`), read back included there.
    Kind: exact. Source: operators of peft 0.21.2 `DoraLinearLayer.forward`, counted by a trace.
    """
    adapter, product = stack.adapter_bytes, stack.adapter_product_bytes
    wide = stack.dropped_bytes  # what the input is cast to
    base = 2 if stack.quant != "none" else stack.base_bytes
    narrows = adapter + product if adapter != product else 0
    identity = adapter + narrows + product  # written, cast, read
    dense = product  # B·A
    dense += product + wide if product != wide else 0  # cast to the input's dtype
    dense += base + wide if base != wide else 0  # the weight, cast
    dense += 2 * wide + 3 * wide + wide  # B·A scaled, added to the weight, the norm
    if stack.quant != "none":
        dense -= base
    if stack.lora_dropout:
        narrow = stack.input_bytes
        # the cast that autocast makes for the repeated product; then forward and backward read it
        dense += (wide + narrow if wide != narrow else 0) + 2 * narrow
    identities = linear.in_features * linear.in_features * identity
    return linear.count * (identities + linear.in_features * linear.out_features * dense)


def token_bytes(linear: Linear, stack: Stack) -> tuple[int, int]:
    """The magnitude's products, where LoRA only scales and adds: forward and backward.

    Kind: exact without dropout. Source: as above; what LoRA does for the same outputs is in
    `work.elementwise_forward_bytes` and taken off here.
    """
    product, result = stack.adapter_product_bytes, stack.linear_out_bytes
    wide = max(stack.adapter_bytes, product)

    def cast(narrow: int) -> int:
        return narrow + wide if narrow != wide else 0

    # magnitude times base, and times B·A; that scaled; both added; added to the base's result
    forward = (result + wide) + (product + wide) + 2 * wide + 3 * wide + (result + 2 * wide)
    forward += cast(result) - lora.output_bytes(stack)
    # of each product: the other factor's gradient, the magnitude's multiplied and summed
    backward = sum(2 * wide + (one + 2 * wide) + wide + cast(one) for one in (product, result))
    backward += 2 * cast(result) + 2 * wide + 3 * result - 2 * stack.compute_bytes
    outputs = linear.active * linear.out_features
    return outputs * forward, outputs * backward


def base_products(stack: Stack) -> int:
    """With dropout the base product is made again, of the dropped input."""
    return 1 if stack.lora_dropout else 0


def peft_config(run: RunConfig) -> dict[str, Any]:
    return lora.peft_config(run) | {"use_dora": True}


METHOD = replace(
    lora.METHOD,
    name="dora",
    summary="LoRA with a trained magnitude per output",
    peft_config=peft_config,
    adapter_params=adapter_params,
    adapter_shapes=adapter_shapes,
    weight_flops=weight_flops,
    weight_bytes=weight_bytes,
    token_bytes=token_bytes,
    base_products=base_products,
    expands_weight=True,
    forward_ops=(18, 24),
    backward_ops=(14, 20),
)
