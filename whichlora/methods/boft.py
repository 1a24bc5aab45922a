"""BOFT: each input is rotated by a dense orthogonal matrix with trained blocks.

Liu et al. 2024, arXiv:2311.06243; peft 0.21.2 `tuners/boft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    RANK_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    given,
    no_shapes,
)
from whichlora.methods.operators import counted, parameter, product
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_BLOCK = Option(
    name="boft_block_size", summary="inputs that one block rotates; it divides all", default=4
)
_OPTIONS = (_BLOCK,)
_FP32 = 4


def adapter_shapes(linear: Linear, r: Count, *, block: int = 4) -> tuple[tuple[Count, Count], ...]:
    """Blocks on the diagonal, and a factor of each output. Kind: exact."""
    return (linear.in_features + 0 * r, block), (linear.out_features + 0 * r, 1)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A permutation as a dense fp32 matrix of each target, the identity with one factor.

    Kind: exact. Source: peft 0.21.2 `BOFTLayer.update_layer`, `boft_P`.
    """
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: boft_P",
            dims="in_features, in_features",
            rows=linear.in_features + 0 * r,
            width=linear.in_features,
            count=count * linear.count,
            element_bytes=_FP32,
        )
        for linear, count in linears
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, block: int = 4) -> Tensor:
    """The base's product with the rotated input, times a factor of each output.

    Source: peft 0.21.2 `boft.Linear.forward`, `cayley_batch`.
    """
    tape, what = ops.tape, linear.name
    width = linear.in_features
    dense = ops.constant(width * width)
    identity = tape.op([], dense, x.size)
    ones = tape.op([], ops.constant(linear.out_features), x.size)
    orthogonal = _cayley(ops, ops.constant(width * block), what)
    assembled = tape.op([orthogonal], dense, orthogonal.size)
    tape.runs(width // block)  # torch 2.13 `block_diag` copies each block by itself
    diagonal = ops.cast(assembled, x.size)
    permutation = tape.weight(dense, _FP32)
    if x.size != _FP32:
        permutation = tape.op([permutation], dense, x.size)
    first = product(ops, diagonal, permutation, dense, f"{what}: permuted columns")
    second = product(ops, permutation, first, dense, f"{what}: permuted rows")
    rotation = product(ops, second, identity, dense, f"{what}: rotation")
    scale = ops.multiply_rows(
        parameter(ops, ops.constant(linear.out_features)), ones, row_last=True
    )
    rotation = ops.cast(rotation, x.size)
    rotated = product(ops, x, rotation, ops.rows.of(width), f"{what}: rotated input")
    result = ops.base(linear, rotated)
    if linear.bias:
        result = tape.op([result], result.elements, result.size, passes=True)
    result = ops.multiply_rows(result, scale, row_last=True)
    if linear.bias:
        result = tape.op([result], result.elements, result.size, passes=True)
    tape.hold(diagonal, permutation, second, rotation, orthogonal, rotated, x)
    return ops.cast(result, x.size)


def _cayley(ops: OpEmitter, elements: Any, what: str) -> Tensor:
    """Cayley's transform of each block by `linalg.solve`, in fp32."""
    tape = ops.tape
    stored = parameter(ops, elements)
    skew = ops.scale(tape.op([stored], elements, stored.size))
    # its identities are fp32, and `solve` keeps the matrix, its factors and its result
    above = tape.op([skew], elements, _FP32)
    below = tape.op([skew], elements, _FP32)
    factors = ops.constant(elements.constant * _FP32)
    solved = tape.op(
        [above, below],
        elements,
        _FP32,
        saves=[above],
        saves_result=True,
        keeps=[factors],
        inner_backward=factors,
        what=f"{what}: blocks",
    )
    tape.hold(skew, above)
    return ops.cast(solved, stored.size)


def work(linear: Linear, dtypes: Dtypes, r: Count, *, block: int = 4) -> AdapterWork:
    """Three dense products that make the rotation, in each pass, and one with each input."""
    width = linear.in_features
    dense = width * width
    params = width * block + linear.out_features
    made = 3 * 2 * width * dense
    return AdapterWork(
        wide=False,
        **counted(linear, params, forward_flops=2 * dense, backward_flops=4 * dense),
        weight_flops=linear.count * made,
        backward_weight_flops=linear.count * made,
    )


def refuses(linear: Linear, quant: str, *, block: int = 4) -> str:
    """Source: peft 0.21.2 `BOFTModel._create_new_module`, `BOFTLayer.update_layer`."""
    if linear.is_stored_in(quant):
        return f"its rotations are predicted on weights that are not quantised, not {quant}"
    if linear.in_features % block:
        return f"boft_block_size must divide {linear.in_features}, got {block}; use one that does"
    return ""


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    return (
        "boft: without PEFT's CUDA extension, which it compiles where it finds nvcc and ninja; "
        "with it, a forward launches one kernel for all blocks",
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    block = _BLOCK.whole(run.method_options)
    return given(adapter_shapes, forward, work, refuses, block=block)


def _merging(base_bytes: int) -> int:
    # of a square weight: the rotation, a copy of the weight, that in fp32, and its product
    return 12 + base_bytes


# more factors need a CUDA extension, which PEFT compiles where it can, else takes one factor
_FIELDS = PeftFields(
    options=_OPTIONS,
    plain={"boft_block_num": (0,), "boft_n_butterfly_factor": (1,), "boft_dropout": (0.0,)},
)

METHOD = Method(
    name="boft",
    summary="each input rotated by a dense orthogonal matrix",
    peft_class="peft.BOFTConfig",
    peft_defaults=(("boft_dropout", 0.0),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="boft_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    merging=_merging,
    notes=notes,
)
