"""OSF: the smaller singular directions of each weight are trained, the larger ones are kept.

Nayak et al. 2025, arXiv:2504.07097; peft 0.21.2 `tuners/osf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods.base import (
    PEFT_COMPARISON,
    RANK_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    given,
    no_shapes,
)
from whichlora.methods.operators import counted, decomposed_bytes, parameter, product, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_RANK = Option(
    name="effective_rank",
    summary="singular directions that are kept, or their share up to 1; half of them if left out",
    default=None,
    kind=float,
)
_OPTIONS = (_RANK,)


def _kept(linear: Linear, effective: float | None) -> int:
    """Singular directions that are frozen. Source: `OSFModel._create_and_replace`."""
    smaller = min(linear.in_features, linear.out_features)
    if effective is None:
        return smaller // 2
    rank = int(smaller * effective) if 0 < effective <= 1 else int(effective)
    return max(min(smaller, rank), 0)


def _trained(linear: Linear, effective: float | None) -> int:
    return min(linear.in_features, linear.out_features) - _kept(linear, effective)


def adapter_shapes(
    linear: Linear, r: Count, *, effective: float | None = None
) -> tuple[tuple[Count, Count], ...]:
    """U_low [out_features, k], S_low [k], V_low [k, in_features]. Kind: exact."""
    k = _trained(linear, effective) + 0 * r
    return (linear.out_features, k), (1, k), (k, linear.in_features)


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, effective: float | None = None
) -> tuple[FrozenTensor, ...]:
    """What is trained as it was, and the larger directions of the longer side. Kind: exact.

    Source: `OSFLayer.update_layer`: those of the shorter side follow from the smaller ones.
    """
    tensors = []
    for linear, count in linears:
        k, kept = _trained(linear, effective), _kept(linear, effective)
        longer = max(linear.in_features, linear.out_features)
        is_square = linear.in_features == linear.out_features
        both = linear.in_features + linear.out_features
        stored = [("U, S, V as they were", "k, in + out + 1", k, both + 1)]
        if not is_square:
            stored.append(("larger directions", "kept, the longer side", kept, longer))
        tensors += [
            FrozenTensor(
                name=f"{linear.name}: {name}",
                dims=dims,
                rows=rows,
                width=width,
                count=count * linear.count,
            )
            for name, dims, rows, width in stored
        ]
    return tuple(tensors)


def _projects(dtypes: Dtypes) -> bool:
    """Whether gradients are projected: what widens the parameters makes new ones without hooks.

    Source: peft 0.21.2 `OSFLayer._attach_hooks`, then `cast_adapter_dtype`.
    """
    wide = dtypes.base_bytes == 4
    return wide or (dtypes.adapter_bytes == dtypes.base_bytes and not dtypes.narrows_adapters_later)


def gradient_remainders(
    linear: Linear, dtypes: Dtypes, r: Count, *, effective: float | None = None
) -> Count:
    """V_low's gradient is a part of that of [V_low; V_init], which stays as a whole. Kind: exact.

    Source: torch 2.13 `cat_tensors_backward`, which narrows; `AccumulateGrad` takes the view.
    """
    if _projects(dtypes):
        return 0 * r
    return dtypes.adapter_bytes * _trained(linear, effective) * linear.in_features + 0 * r


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, effective: float | None = None) -> Tensor:
    """The result plus a product with the difference of two low-rank ones, side by side.

    Source: peft 0.21.2 `osf.Linear.forward`.
    """
    tape, what = ops.tape, linear.name
    k, kept = _trained(linear, effective), _kept(linear, effective)
    wide, tall = linear.in_features, linear.out_features
    result = base = ops.base(linear, x)
    u, s = (parameter(ops, ops.constant(k * width)) for width in (tall, 1))
    if _projects(ops.dtypes):
        v = parameter(ops, ops.constant(k * wide))
        u = _projected(ops, u, k, tall, kept if tall > wide else 0)
        v = _projected(ops, v, k, wide, kept if wide > tall else 0)
    else:  # the gradient that it gets is the whole one of both
        v = parameter(ops, ops.constant(2 * k * wide))
    scaled = ops.multiply_rows(u, s)
    initial = tape.op([], ops.constant(k * tall), u.size)
    negative = tape.op([initial], ops.constant(k * tall), u.size)
    a = _joined(ops, 2 * k * tall, scaled, negative)
    b = _joined(ops, 2 * k * wide, v)
    argument = widened(ops, linear, x)
    inner = product(ops, argument, b, ops.rows.of(2 * k), f"{what}: B·x")
    update = product(ops, inner, a, ops.rows.of(tall), f"{what}: A·B·x")
    narrow = ops.cast(update, x.size)
    result = ops.add(result, narrow, f"{what}: result")
    tape.hold(base, argument, inner, update, a, b, x)
    return result


def _joined(ops: OpEmitter, elements: int, trained: Tensor, *frozen: Tensor) -> Tensor:
    """`torch.cat` of both; the gradient of the trained part is a view of the whole one."""
    whole = ops.constant(elements)
    parts = [replace(trained, elements=whole), *frozen]
    return ops.tape.op(parts, whole, trained.size, passes=True)


def _projected(ops: OpEmitter, factor: Tensor, k: int, side: int, kept: int) -> Tensor:
    """A parameter whose gradient hooks project. Source: `OSFLayer._attach_hooks`."""
    size = factor.size
    products = (kept * k * size, k * side * size) if kept else (k * k * size,)
    inner = [ops.constant(number) for number in products]
    (part,) = ops.tape.parts(factor, [factor.elements], inner=inner)
    return part


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, effective: float | None = None
) -> AdapterWork:
    """Products of twice the trained width, and those that project gradients.

    Kind: exact. Source: operators of `osf.Linear.forward`, `OSFLayer._attach_hooks`.
    """
    k, kept = _trained(linear, effective), _kept(linear, effective)
    wide, tall = linear.in_features, linear.out_features
    both = wide + tall
    projections = sum(
        4 * k * side * (kept if side > other else k) for side, other in ((tall, wide), (wide, tall))
    )
    return AdapterWork(
        **counted(linear, k * (both + 1), forward_flops=4 * k * both, backward_flops=8 * k * both),
        backward_weight_flops=linear.count * projections * _projects(dtypes),
    )


def start_bytes(linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count) -> Count:
    """The weight in fp32, and U, S, V of the largest one. Source: `decompose_weight_matrix`."""
    return max((decomposed_bytes(linear, dtypes) for linear, _ in linears), default=0)


def refuses(linear: Linear, quant: str, *, effective: float | None = None) -> str:
    """Source: peft 0.21.2 `osf.layer.dispatch_default`, `decompose_weight_matrix`."""
    if linear.transposed:
        return "PEFT's OSF passes over Conv1D, so that nothing is trained; use method lora"
    if linear.is_stored_in(quant):
        return f"PEFT decomposes the stored weight, which is none in {quant}; use quant none"
    if not _trained(linear, effective):
        return (
            f"effective_rank keeps all {min(linear.in_features, linear.out_features)} directions, "
            f"got {effective}; use a smaller one"
        )
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    stated = _RANK.of(run.method_options)
    effective = None if stated is None else float(str(stated))
    return given(
        adapter_shapes,
        frozen_tensors,
        gradient_remainders,
        forward,
        work,
        refuses,
        effective=effective,
    )


_FIELDS = PeftFields(options=_OPTIONS, plain={"rank_pattern": ({},)})


def read_peft(config: Any) -> Mapping[str, Any]:
    if config.effective_rank == 1 and isinstance(config.effective_rank, int):
        raise ConfigError("OSFConfig.effective_rank=1 is not modelled; use 2 or a share")
    return _FIELDS.read(config)


METHOD = Method(
    name="osf",
    summary="the smaller singular directions of each weight",
    peft_class="peft.OSFConfig",
    peft_config=_FIELDS.config,
    read_peft=read_peft,
    keeps_input_dtype=True,
    parameter_prefix="osf_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    gradient_remainders=gradient_remainders,
    forward=forward,
    work=work,
    start_bytes=start_bytes,
    merging=lambda base_bytes: 12,
    learning_rate=5e-5,
    rate_source=PEFT_COMPARISON,
)
