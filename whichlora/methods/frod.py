"""FRoD: each weight is written anew, by a frozen U, a trained sparse matrix and a shared V.

Source: peft 0.21.2 `tuners/frod`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    FrozenTensor,
    Method,
    given,
    no_shapes,
)
from whichlora.methods.operators import counted, dropped, frozen_product, parameter, product
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_RATE = Option(
    name="sparse_rate",
    summary="share of the sparse matrix's elements that are trained",
    default=0.01,
)
_OPTIONS = (_RATE,)
_INDEX = 8


def _chosen(linear: Linear, rate: float) -> int:
    """Trained elements off the diagonal. Source: `FrodModel._init_frod_projections`."""
    side = linear.in_features
    others = side * side - side
    chosen = min(int(side * side * rate), others)
    return max(1, chosen) if rate > 0 and others else chosen


def adapter_shapes(
    linear: Linear, r: Count, *, rate: float = 0.01
) -> tuple[tuple[Count, Count], ...]:
    """The diagonal, and elements beside it. Kind: exact."""
    return (1 + 0 * r, linear.in_features), (1 + 0 * r, _chosen(linear, rate))


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, rate: float = 0.01
) -> tuple[FrozenTensor, ...]:
    """U of each weight, as large as it; V and the places of elements once for each name.

    Kind: exact where matrices of one name are of one kind of module, which T5's are not.
    Source: `FrodLayer.update_layer`, `_category_from_key`.
    """
    tensors = [
        FrozenTensor(
            name=f"{linear.name}: U",
            dims="out_features, in_features",
            rows=linear.out_features + 0 * r,
            width=linear.in_features,
            count=count * linear.count,
            as_base=True,
        )
        for linear, count in linears
    ]
    for linear in {linear.name: linear for linear, _ in linears}.values():
        side = linear.in_features
        tensors += [
            FrozenTensor(
                name=f"{linear.name}: V",
                dims="in_features, in_features",
                rows=side + 0 * r,
                width=side,
                as_base=True,
            ),
            FrozenTensor(
                name=f"{linear.name}: places",
                dims="2, sparse_rate in_features^2",
                rows=2 + 0 * r,
                width=_chosen(linear, rate),
                element_bytes=_INDEX,
            ),
        ]
    return tuple(tensors)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, rate: float = 0.01) -> Tensor:
    """U (S + L) V.T x in place of the base's product, or beside it where dropout drops.

    Source: peft 0.21.2 `frod.Linear.forward`.
    """
    tape, size, what = ops.tape, x.size, linear.name
    wide, tall = linear.in_features, linear.out_features
    inner_rows, rows = ops.rows.of(wide), ops.rows.of(tall)
    chosen = ops.constant(_chosen(linear, rate))
    held = [x]
    base = bare = x
    if ops.dtypes.adapters_drop:
        base = bare = ops.base(linear, x)
        if linear.bias:
            bare = tape.op([base], rows, base.size, passes=True)
        held += [base, bare]
    u, v = (
        ops.cast(tape.weight(ops.constant(n * wide), ops.dtypes.base_bytes), size)
        for n in (tall, wide)
    )
    values, diagonal = (ops.cast(parameter(ops, n), size) for n in (chosen, ops.constant(wide)))
    sparse = _sparse(ops, values, chosen.constant, what)
    inputs = dropped(ops, x)
    turned = frozen_product(ops, inputs, v, inner_rows, f"{what}: V·x")
    within = _sparse_product(ops, turned, sparse, wide, f"{what}: S·V·x")
    scaled = ops.multiply_rows(turned, diagonal, row_last=True)
    both = ops.add(within, scaled)
    added = frozen_product(ops, both, u, rows, f"{what}: U·(S + L)·V·x")
    held += [u, v, sparse, diagonal, inputs, turned, within, scaled, added]
    if ops.dtypes.adapters_drop:
        stored = ops.cast(tape.weight(ops.constant(wide * tall), ops.dtypes.base_bytes), size)
        again = frozen_product(ops, inputs, stored, rows, f"{what}: product of dropped inputs")
        result = ops.add(ops.add(base, added), tape.view(again, copies_gradient=True))
        held += [stored, again]
    else:
        result = tape.op([added], rows, added.size, passes=True) if linear.bias else added
    result = ops.cast(result, size)
    tape.hold(*held)
    return result


def _sparse(ops: OpEmitter, values: Tensor, chosen: int, what: str) -> Tensor:
    """S with its 64-bit places: values and places as bytes, as its gradient has both, too.

    Source: torch 2.13 `_coalesce_sparse_cpu`, which sorts keys, and `sparse_mask`, which looks
    places up in those of the gradient.
    """
    keys = ops.constant(_INDEX * chosen)
    places = ops.constant(2 * _INDEX * chosen)
    return ops.tape.op(
        [values],
        ops.constant((2 * _INDEX + values.size) * chosen),
        1,
        inner=[keys] * 4,
        inner_backward=[keys, keys, places, places],
        what=f"{what}: S",
    )


def _sparse_product(ops: OpEmitter, x: Tensor, sparse: Tensor, side: int, what: str) -> Tensor:
    """With S as a dense matrix where `x` is in 16 bits; its gradient is dense in any case.

    Source: peft 0.21.2 `FrodLayer._sparse_activation_mm`; torch 2.13 `to_dense_backward`,
    `_sparse_addmm_sparse_backward`: the dense gradient, of which the places are taken.
    """
    square = ops.constant(side * side)
    taken = ops.constant(x.size * sparse.elements.constant // (2 * _INDEX + x.size))
    if x.size < 4:
        dense = ops.tape.op(
            [sparse], square, x.size, saves=[sparse], inner_backward=taken, what=f"{what}: S, dense"
        )
        return product(ops, x, dense, x.elements, what)
    return ops.tape.op(
        [x, sparse],
        x.elements,
        x.size,
        saves=[x, sparse] if x.needs_grad else [x],
        inner=x.form,
        inner_backward=[ops.constant(x.size * side * side), taken],
        what=what,
    )


def work(linear: Linear, dtypes: Dtypes, r: Count, *, rate: float = 0.01) -> AdapterWork:
    """Products with V and U, and in 16 bits one with S as a dense matrix.

    The base's own product, which is counted elsewhere, is left out without dropout.
    Kind: exact. Source: operators of `frod.Linear.forward`.
    """
    wide, tall = linear.in_features, linear.out_features
    chosen = _chosen(linear, rate)
    is_narrow = dtypes.stream_bytes < 4 or dtypes.autocast
    in_sparse = 2 * wide * wide if is_narrow else 2 * chosen
    base = 0 if dtypes.adapters_drop else 2 * wide * tall
    again = 2 * wide * tall * dtypes.adapters_drop
    through = 2 * wide * (wide + tall) + in_sparse + again
    return AdapterWork(
        **counted(
            linear,
            wide + chosen,
            forward_flops=through - base,
            backward_flops=through - base + 2 * wide * wide,
        ),
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `FrodLayer._calculate_frod_u_and_lambda`."""
    if linear.transposed:
        return "its factors of a Conv1D are not predicted; use method lora"
    if linear.is_stored_in(quant):
        return f"PEFT decomposes the stored weight, which is none in {quant}; use quant none"
    return ""


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    if run.phase != "finetune":
        return ()
    return (
        "frod decomposes every weight on the host before the first step, in fp32 and fp64, which "
        "is not predicted",
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    rate = _RATE.number(run.method_options)
    return given(adapter_shapes, frozen_tensors, forward, work, rate=rate)


_FIELDS = PeftFields(
    dropout="frod_dropout", options=_OPTIONS, plain={"runtime_offload_base_weight": (False,)}
)

METHOD = Method(
    name="frod",
    summary="each weight anew: a trained sparse matrix between frozen ones",
    peft_class="peft.FrodConfig",
    peft_defaults=(("frod_dropout", 0.0),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="frod_",
    ignores=LORA_SETTINGS | {"lora_alpha", "r"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    merging=lambda base_bytes: 5 * base_bytes,
    notes=notes,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
