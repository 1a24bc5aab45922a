"""Lily: a low-rank update whose second matrix a router mixes from some that all layers share.

Zhong et al. 2024, arXiv:2407.09946; peft 0.21.2 `tuners/lily`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    Method,
    SharedTensor,
    given,
)
from whichlora.methods.operators import counted, parameter, product, uncached, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_STRIDE = Option(name="stride_A", summary="layers in a row that share one A", default=1)
_EXPERTS = Option(name="num_B", summary="matrices B of which each update is mixed", default=2)
_OPTIONS = (
    _STRIDE,
    _EXPERTS,
    Option(name="scaling", summary="factor of the update", default=1.0),
)


def adapter_shapes(
    linear: Linear, r: Count, *, stride: int = 1, experts: int = 2
) -> tuple[tuple[Count, Count], ...]:
    """The router, and A where no other layer has it. Kind: exact."""
    router = (experts, r)
    return (router,) if stride > 1 else ((r, linear.in_features), router)


def shared_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, stride: int = 1, experts: int = 2
) -> tuple[SharedTensor, ...]:
    """All B of the matrices of one name and shape, and an A for each `stride` of them.

    Kind: exact. Source: peft 0.21.2 `LilyModel._post_injection_hook`.
    """
    numbers: dict[tuple[str, int, int], int] = {}
    for linear, count in linears:
        key = (linear.name, linear.in_features, linear.out_features)
        numbers[key] = numbers.get(key, 0) + count
    tensors = []
    for (name, width, rows), number in numbers.items():
        tensors.append(
            SharedTensor(
                name=f"{name}: lily_B", dims="num_B, r, out_features", rows=experts * r, width=rows
            )
        )
        if stride > 1:
            tensors.append(
                SharedTensor(
                    name=f"{name}: lily_A",
                    dims="r, in_features",
                    rows=r,
                    width=width,
                    count=ceil_div(number, stride),
                    is_factor=True,
                )
            )
    return tuple(tensors)


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, stride: int = 1, experts: int = 2
) -> Tensor:
    """The result plus A·x times the mixed B.

    Source: peft 0.21.2 `lily.Linear.forward`; torch 2.13 `einsum`, which runs `bmm`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    result = ops.base(linear, x)
    size = result.size
    outputs = ops.rows.of(linear.out_features)
    wide = widened(ops, linear, x)
    hidden = _compressed(ops, linear, wide, stride)
    of_router = ops.rows.of(experts)
    logits = product(
        ops, hidden, parameter(ops, ops.per_rank(experts)), of_router, f"{what}: router"
    )
    in_fp32 = ops.cast(logits, 4) if dtypes.under_autocast else logits
    chances = ops.softmax(in_fp32)
    mean = tape.op([chances], ops.constant(experts), chances.size)
    # a view of the weight is no leaf, whose cast autocast would cache
    stored = tape.shared_weight(
        f"{what}: lily_B", ops.per_rank(experts * linear.out_features), dtypes.adapter_bytes
    )
    every = uncached(ops, stored)
    mixed = product(ops, mean, every, ops.per_rank(linear.out_features), f"{what}: mixed B")
    delta = product(ops, hidden, mixed, outputs, f"{what}: update")
    update = ops.cast(ops.scale(delta), size)
    result = ops.add(result, update, f"{what}: result")
    tape.hold(hidden, logits, chances, mean, mixed, delta, wide, x)
    return result


def _compressed(ops: OpEmitter, linear: Linear, x: Tensor, stride: int) -> Tensor:
    """A·x, where autocast's one copy of a shared A is divided between its layers."""
    what, rank = f"{linear.name}: A·x", ops.rows.of_rank(1)
    if stride == 1:
        factor = parameter(ops, ops.per_rank(linear.in_features))
        return product(ops, x, factor, rank, what)
    narrow = ops.autocast(x, f"{what}: input, cast")
    # the copy's node is one, too, so that gradients are summed up as wide as it
    factor = ops.tape.shared_weight(
        f"{linear.name}: lily_A", ops.per_rank(linear.in_features), narrow.size
    )
    share = ops.per_rank(ceil_div(linear.in_features * narrow.size, stride))
    return ops.tape.op(
        [narrow, factor],
        rank,
        narrow.size,
        saves=[narrow],
        keeps=[share] if ops.dtypes.under_autocast else [],
        reshapes=True,
        what=f"{what}: product",
    )


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, stride: int = 1, experts: int = 2
) -> AdapterWork:
    """LoRA's products and the router's, and one that mixes B in each forward."""
    params = r * experts + (r * linear.in_features if stride == 1 else 0 * r)
    per_token = 2 * r * (linear.in_features + linear.out_features + experts)
    mixed = r * linear.out_features
    return AdapterWork(
        **counted(linear, params, forward_flops=per_token, backward_flops=2 * per_token),
        weight_flops=2 * experts * mixed,
        backward_weight_flops=4 * experts * mixed,
    )


def refuses(linear: Linear, quant: str, *, experts: int = 2) -> str:
    """Source: peft 0.21.2 `LilyModel._create_new_module`, `LilyConfig.__post_init__`."""
    if experts < 2:
        return f"num_B is 2 or more, so that its router learns, got {experts}"
    if linear.count > 1:
        return "matrices that its experts share are not predicted; use method lora"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    stride = _STRIDE.whole(run.method_options)
    experts = _EXPERTS.whole(run.method_options)
    sizes = {"stride": stride, "experts": experts}
    fields = given(adapter_shapes, shared_tensors, forward, work, **sizes)
    fields["autocast_shapes"] = fields["adapter_shapes"]
    return fields | {"refuses": partial(refuses, experts=experts)}


_FIELDS = PeftFields(r="r", options=_OPTIONS)

METHOD = Method(
    name="lily",
    summary="low-rank updates mixed from matrices that layers share",
    peft_class="peft.LilyConfig",
    peft_defaults=(("r", 32),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="lily_",
    merges=False,
    names_targets=True,
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    shared_tensors=shared_tensors,
    forward=forward,
    work=work,
)
