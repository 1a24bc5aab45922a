"""Operators that several methods of PEFT have in common, and how their products are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from whichlora.methods.base import AdapterWork
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import FOUR_BIT_BNB

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.linear_form import LinearForm
    from whichlora.symbolic.operators import OpEmitter


def base_result(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The base's product, a copy of its own where 4-bit kernels made it.

    Source: peft 0.21.2 `Bnb4bitBackend.maybe_clone_base_result`.
    """
    result = ops.base(linear, x)
    if is_quantised(linear, ops.dtypes) and ops.dtypes.quant in FOUR_BIT_BNB:
        result = ops.copy(result)
    return result


def parameter(ops: OpEmitter, elements: LinearForm, *, trained: bool = True) -> Tensor:
    """A tensor of the adapter, counted with the adapters."""
    return ops.tape.weight(elements, ops.dtypes.adapter_bytes, trained=trained)


def uncached(ops: OpEmitter, factor: Tensor) -> Tensor:
    """A parameter's transpose as autocast casts it: it is no leaf, so that no copy is cached."""
    if not ops.dtypes.under_autocast:
        return factor
    return ops.cast(factor, ops.dtypes.compute_bytes)


def widened(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """`_cast_input_dtype` of PEFT's layers."""
    return ops.cast(x, ops.dtypes.adapter_bytes, f"{linear.name}: own copy of the input")


def dropped(ops: OpEmitter, x: Tensor) -> Tensor:
    return ops.dropout(x) if ops.dtypes.adapters_drop else x


def product(ops: OpEmitter, x: Tensor, factor: Tensor, elements: LinearForm, what: str) -> Tensor:
    """`x` times a matrix, both narrowed by autocast; each gradient reads the other factor."""
    narrow = ops.autocast(x, f"{what}: input, cast")
    used = ops.autocast(factor, f"{what}: factor, cast")
    saves = [used] if x.needs_grad else []
    if factor.needs_grad:
        saves.append(narrow)
    return ops.tape.op(
        [narrow, used],
        elements,
        max(narrow.size, used.size),
        saves=saves,
        reshapes=True,
        what=f"{what}: product",
    )


def side_kernel(ops: OpEmitter, written: LinearForm, size: int, read: Tensor | None = None) -> None:
    """A kernel whose small or short-lived result the bytes of memory leave out.

    It is counted as one that works in place, so that it also reads what it writes.

    Args:
        written: elements of `size` bytes.
        read: what else it reads.
    """
    source = None if read is None else replace(read, needs_grad=False)
    ops.tape.in_place(ops.tape.weight(written, size), source)


def with_low_rank(
    ops: OpEmitter, linear: Linear, x: Tensor, result: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """`result` plus B·A·x of matrices that this forward has made, in the dtype of `x`."""
    what = linear.name
    wide = widened(ops, linear, x)
    inputs = dropped(ops, wide)
    inner = product(ops, inputs, a, ops.rows.of_rank(1), f"{what}: A·x")
    ops.tape.hold(inputs)  # an argument, until the product is there
    outer = product(ops, inner, b, ops.rows.of(linear.out_features), f"{what}: B·A·x")
    result = ops.add(result, outer, f"{what}: result")
    ops.tape.hold(a, b, wide, x)
    return ops.cast(result, x.size)


def dense_weight(ops: OpEmitter, linear: Linear) -> Tensor:
    """The base's weight as `get_base_weight` of PEFT gives it, expanded if it is quantised."""
    dtypes = ops.dtypes
    elements = ops.constant(linear.in_features * linear.out_features)
    if not is_quantised(linear, dtypes):
        return ops.tape.weight(elements, dtypes.base_bytes)
    four_bit = dtypes.quant in FOUR_BIT_BNB
    size = dtypes.half_bytes if four_bit else dtypes.compute_bytes
    return ops.tape.op([], elements, size, multiplies=True)


def frozen_product(
    ops: OpEmitter, x: Tensor, factor: Tensor, elements: LinearForm, what: str
) -> Tensor:
    """`x` times a matrix that is not trained, which autocast casts for every product anew."""
    used = ops.autocast(factor, f"{what}: frozen factor, cast")
    narrow = ops.autocast(x)
    size = max(narrow.size, used.size)
    saves = [used] if x.needs_grad else []
    return ops.tape.op([narrow, used], elements, size, saves=saves, reshapes=True, what=what)


def decomposed_bytes(linear: Linear, dtypes: Dtypes) -> int:
    """One weight in fp32, and U and V of its singular values. Kind: exact, workspaces left out.

    Source: torch 2.13 `linalg_svd` with `full_matrices=False`.
    """
    num_weights = linear.in_features * linear.out_features
    vectors = min(linear.in_features, linear.out_features)
    vectors *= linear.in_features + linear.out_features
    return 4 * (num_weights * (dtypes.base_bytes != 4) + vectors)


def counted(
    linear: Linear,
    params: Count,
    *,
    forward_flops: Count,
    backward_flops: Count,
) -> dict[str, Count]:
    """Fields of `AdapterWork` for products per token that are not two for each parameter.

    Args:
        params: trained ones of one matrix.
        forward_flops, backward_flops: of one token through one matrix.
    """
    beyond = forward_flops - 2 * params
    return {
        "token_flops": linear.active * beyond,
        "backward_token_flops": linear.active * (backward_flops - 4 * params - beyond),
    }


__all__ = [
    "AdapterWork",
    "base_result",
    "counted",
    "decomposed_bytes",
    "dense_weight",
    "dropped",
    "frozen_product",
    "parameter",
    "product",
    "side_kernel",
    "uncached",
    "widened",
    "with_low_rank",
]
