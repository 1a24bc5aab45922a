"""AdaLoRA: LoRA as B·diag(E)·A, whose least important singular values are masked step by step.

Zhang et al. 2023, arXiv:2303.10512; peft 0.21.2 `tuners/adalora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    Method,
    adapted_modules,
    no_shapes,
    read_options,
    stated_options,
)
from whichlora.methods.lora import leaves_cast
from whichlora.methods.operators import base_result, dropped, parameter, product, uncached, widened
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_TARGET = Option(
    name="target_r",
    summary="mean rank that is left at the end; without it half of the rank",
    default=None,
)
_TOTAL = Option(name="total_step", summary="optimizer steps of the whole training", default=1000)
_SCHEDULE = (
    Option(name="tinit", summary="steps before ranks are masked", default=0),
    Option(name="tfinal", summary="steps after the ranks are final", default=0),
    Option(name="deltaT", summary="steps from one masking to the next", default=1),
)
_OPTIONS = (_TARGET, _TOTAL, *_SCHEDULE)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A, the singular values E, B, and the rank, which is trained, too. Kind: exact."""
    return (r, linear.in_features), (r, 1), (linear.out_features, r), (1 + 0 * r, 1)


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result, to which B·(A·E)·x, scaled and divided by the rank, is added in place.

    Source: peft 0.21.2 `SVDLinear.forward`, `SVDLinear4bit.forward`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    quantised = is_quantised(linear, dtypes)
    leaves = leaves_cast(linear, dtypes)
    result = base_result(ops, linear, x)
    wide = x if leaves else widened(ops, linear, x)
    a, e = parameter(ops, ops.per_rank(linear.in_features)), parameter(ops, ops.per_rank(1))
    inputs = dropped(ops, wide)
    factor = ops.multiply_rows(a, e)
    inner = product(ops, inputs, factor, ops.rows.of_rank(1), f"{what}: A·E·x")
    b = uncached(ops, parameter(ops, ops.per_rank(linear.out_features)))
    update = product(ops, inner, b, ops.rows.of(linear.out_features), f"{what}: B·A·E·x")
    if quantised and not leaves:
        update = ops.cast(update, result.size)
    result = tape.in_place(result, _divided(ops, linear, ops.scale(update)))
    tape.hold(wide, x)
    return result


def _divided(ops: OpEmitter, linear: Linear, update: Tensor) -> Tensor:
    """By `ranknum`, a vector of one element whose fp32 makes the quotient fp32.

    Its gradient takes three tensors as large as the quotient: `div_tensor_other_backward` of torch
    2.13. It has one since `_move_adapter_to_device_of_base_layer` of PEFT puts a tensor of another
    device or dtype into a `ParameterDict`, which makes a parameter of it. An fp32 base on a CPU
    moves nothing.
    """
    moves = ops.dtypes.device_kind != "cpu" or ops.dtypes.base_bytes != 4
    rank = parameter(ops, ops.constant(1), trained=moves)
    size = max(update.size, rank.size)
    before_cast = size - update.size if update.size < size else 0
    return ops.tape.op(
        [update, rank],
        update.elements,
        size,
        saves=[update] if moves else [],
        inner_backward=ops.rows.of(linear.out_features * (3 * size * moves + before_cast)),
        what="update before its division",
    )


def refuses(linear: Linear, quant: str, *, rank: int = 16, target: int = 8) -> str:
    """Source: peft 0.21.2 `RankAllocator.mask_to_budget`, whose `kthvalue` needs a k above 0."""
    if target >= rank:
        return f"r, the rank at the start, must be above target_r, {target}, got {rank}"
    if quant == "int8" and linear.quantisable:
        return "its fp32 results of int8 layers are not predicted; use quant nf4 or none"
    return ""


def _target_r(run: RunConfig) -> int:
    return _TARGET.whole(run.method_options, unstated=run.r // 2)


def with_options(run: RunConfig) -> dict[str, Any]:
    return {"refuses": partial(refuses, rank=run.r, target=_target_r(run))}


def peft_config(run: RunConfig) -> dict[str, Any]:
    config = {
        "init_r": run.r,
        _TARGET.name: _target_r(run),
        "lora_alpha": run.lora_alpha,
        "lora_dropout": run.lora_dropout,
        _TOTAL.name: _TOTAL.of(run.method_options),
    }
    return config | stated_options(run, _OPTIONS) | adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    plain = {"rank_pattern": ({},), "use_dora": (False,), "use_rslora": (False,)}
    return {
        "r": config.init_r,
        "lora_alpha": max(1, round(config.lora_alpha)),
        "lora_dropout": float(config.lora_dropout),
        **read_options(config, _OPTIONS, plain=plain),
    }


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    if run.phase != "finetune" or _TOTAL.name in dict(run.method_options):
        return ()
    return (
        f"total_step is taken as {_TOTAL.default}; AdaLoRA needs the number of optimizer steps of "
        "your training: --method-option total_step=…",
    )


METHOD = Method(
    name="adalora",
    summary="LoRA whose ranks shrink where they matter least",
    peft_class="peft.AdaLoraConfig",
    peft_defaults=(("init_r", 12), ("target_r", 8), ("lora_alpha", 8), ("lora_dropout", 0.0)),
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="lora_",
    in_loss=True,
    num_scores=3,
    after_update="base_model.update_and_allocate",
    ignores=LORA_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    notes=notes,
)
