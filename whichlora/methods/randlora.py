"""RandLoRA: updates of full rank from random matrices that layers share, scaled by trained ones.

Albert et al. 2025, arXiv:2502.00987; peft 0.21.2 `tuners/randlora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import LORA_SETTINGS, AdapterWork, FrozenTensor, Method, no_shapes
from whichlora.methods.operators import base_result, counted, dropped, parameter, product, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_ALPHA = Option(
    name="randlora_alpha", summary="divided by r: the factor of the update", default=640
)
_SPARSE = Option(name="sparse", summary="random matrices of -1, 0 and 1", default=False)
_VERY_SPARSE = Option(name="very_sparse", summary="the same with fewer of -1 and 1", default=False)
_OPTIONS = (_ALPHA, _SPARSE, _VERY_SPARSE)


def _sides(linear: Linear) -> tuple[int, int]:
    """The smaller and the larger width."""
    widths = linear.in_features, linear.out_features
    return min(widths), max(widths)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """lambda is [r, bases], gamma [bases, smaller width]; r bases are full rank. Kind: exact."""
    smaller, _ = _sides(linear)
    bases = ceil_div(smaller, r)
    return (r, bases), (bases, smaller)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A and B for the largest widths of all targets; others read a part. `RandLoraModel._find_dim`.

    Kind: exact.
    """
    if not linears:
        return ()
    widths = (
        max(linear.in_features for linear, _ in linears),
        max(linear.out_features for linear, _ in linears),
    )
    smaller, larger = min(widths), max(widths)
    return (
        FrozenTensor(name="randlora_A", dims="r, smaller width", rows=r, width=smaller),
        FrozenTensor(
            name="randlora_B",
            dims="larger width, bases, r",
            rows=larger,
            width=ceil_div(smaller, r) * r,
        ),
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, r: int = 32) -> Tensor:
    """The result plus two products, one of them with the scaled random matrix.

    Source: peft 0.21.2 `randlora.Linear.forward`, `get_scaled_bases`, `UniqueBaseGrad`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    quantised = is_quantised(linear, dtypes)
    smaller, larger = _sides(linear)
    bases = ceil_div(smaller, r)
    result = base_result(ops, linear, x)
    size = result.size
    lambdas = parameter(ops, ops.constant(r * bases))
    gammas = parameter(ops, ops.constant(bases * smaller))
    elements = bases * r * smaller
    dense = ops.constant(elements)
    of_dense = ops.constant(elements * dtypes.adapter_bytes)
    # backward, `einsum` lays out the gradient anew, and a product of it with A is as large
    scaled = tape.op(
        [lambdas, gammas],
        dense,
        dtypes.adapter_bytes,
        inner=of_dense,
        inner_backward=(of_dense, of_dense),
    )
    shared = tape.weight(ops.constant(larger * bases * r), dtypes.adapter_bytes)
    wide = widened(ops, linear, x)
    first, second = scaled, shared
    if linear.in_features > linear.out_features:
        first, second = shared, scaled
    inputs = dropped(ops, wide)
    inner = product(ops, inputs, first, ops.rows.of(bases * r), f"{what}: inner")
    tape.hold(inputs)  # an argument, until the product is there
    outer = product(ops, inner, second, ops.rows.of(linear.out_features), f"{what}: update")
    if quantised and not dtypes.under_autocast:
        outer = ops.cast(outer, size)
    result = ops.add(result, ops.scale(outer), f"{what}: result")
    tape.hold(scaled, wide, x)
    if quantised:
        tape.hold(inputs, outer)
    return ops.cast(result, wide.size if quantised and not dtypes.under_autocast else x.size)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """Two products of full rank, and a random matrix scaled in each forward."""
    smaller, larger = _sides(linear)
    rank = ceil_div(smaller, r) * r
    params = sum(rows * width for rows, width in adapter_shapes(linear, r))
    dense = rank * smaller
    return AdapterWork(
        **counted(
            linear,
            params,
            forward_flops=2 * rank * (smaller + larger),
            backward_flops=2 * rank * (2 * smaller + larger),
        ),
        weight_flops=linear.count * 2 * dense,
        backward_weight_flops=linear.count * 4 * dense,
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    return {"forward": partial(forward, r=run.r)}


def _merging(base_bytes: int) -> int:
    # `get_delta_weight`: the scaled matrix, at most as large as the weight, the product, and that
    # times a number, all in fp32
    return 12


_FIELDS = PeftFields(r="r", dropout="randlora_dropout", options=_OPTIONS)

METHOD = Method(
    name="randlora",
    summary="updates of full rank from random matrices that all layers share",
    peft_class="peft.RandLoraConfig",
    peft_defaults=(("r", 32), ("randlora_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="randlora_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    merging=_merging,
)
