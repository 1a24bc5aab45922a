"""What a fine-tuning method is to the formulas: bytes, work and a PEFT configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whichlora.architecture import Linear
from whichlora.numeric import Count
from whichlora.specs import Quant, RunConfig, Serve
from whichlora.stack import Stack


def _nothing(linear: Linear, stack: Stack) -> int:
    return 0


def _no_params(linear: Linear, r: Count) -> Count:
    return 0 * r


def _no_bytes(linear: Linear, stack: Stack) -> tuple[int, int]:
    return 0, 0


def _none(stack: Stack) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to fine-tune; every function describes one adapted matrix (`Linear`).

    Args:
        peft_config: keyword arguments of `peft.LoraConfig` (or of the config class named by
            its key "peft_type"), None for a method without adapters.
        trains_base: all base weights get gradients.
        base_quant: storage of the base weights where the user does not say.
        serve: how its model is served where the user does not say.
        adapter_params: trainable parameters added for rank r.
        adapter_shapes: (rows, width) of the tensors that one of the `count` matrices gets; None:
            optimizers are told of one tensor with all of its parameters.
        weight_flops: products of one forward that do not grow with the tokens, for rank r.
        weight_bytes: read and written by one forward whatever the number of tokens.
        token_bytes: read and written per token beyond what LoRA does, forward and backward.
        expands_weight: a forward expands the quantised weight once more.
        base_products: products with the base weight beyond its own, in every pass.
        forward_ops, backward_ops: kernels launched beyond those of the frozen base layer, without
            and with autocast.
    """

    name: str
    summary: str
    peft_config: Callable[[RunConfig], dict[str, Any] | None]
    trains_base: bool = False
    base_quant: Quant = "none"
    serve: Serve = "merged"
    adapter_params: Callable[[Linear, Count], Count] = _no_params
    adapter_shapes: Callable[[Linear, Count], tuple[tuple[Count, Count], ...]] | None = None
    weight_flops: Callable[[Linear, Count], Count] = _no_params
    weight_bytes: Callable[[Linear, Stack], int] = _nothing
    token_bytes: Callable[[Linear, Stack], tuple[int, int]] = _no_bytes
    base_products: Callable[[Stack], int] = _none
    expands_weight: bool = False
    forward_ops: tuple[int, int] = (0, 0)
    backward_ops: tuple[int, int] = (0, 0)
