"""OFT: blocks of each input are rotated by trained orthogonal matrices (version 2).

Qiu et al. 2023, arXiv:2306.07280; 2025, arXiv:2506.19847; peft 0.21.2 `tuners/oft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import RANK_SETTINGS, AdapterWork, FrozenTensor, Method, no_shapes
from whichlora.methods.operators import counted, side_kernel, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_BLOCK = Option(name="oft_block_size", summary="inputs that one block rotates", default=32)
_SHARE = Option(name="block_share", summary="one block for all of a layer", default=False)
_TERMS = Option(
    name="num_cayley_neumann_terms", summary="terms of the series for the inverse", default=5
)
_OPTIONS = (_BLOCK, _SHARE, _TERMS)


def block_size(in_features: int, asked: int) -> int:
    """The nearest divisor of `in_features`, as PEFT adjusts it.

    Kind: exact. Source: peft 0.21.2 `OFTLayer.adjust_oft_parameters`.
    """
    if asked >= in_features:
        return in_features
    higher = next(n for n in range(asked, in_features + 1) if in_features % n == 0)
    lower = next(n for n in range(asked, 0, -1) if in_features % n == 0)
    return lower if asked - lower <= higher - asked else higher


def adapter_shapes(
    linear: Linear, r: Count, *, asked: int = 32, share: bool = False
) -> tuple[tuple[Count, Count], ...]:
    """The upper triangle of each block, without the diagonal. Kind: exact."""
    block = block_size(linear.in_features, asked)
    blocks = 1 if share else linear.in_features // block
    return ((blocks + 0 * r, block * (block - 1) // 2),)


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, asked: int = 32
) -> tuple[FrozenTensor, ...]:
    """Rows and columns of the triangle's elements, two tables for each matrix. Kind: exact."""
    tables = []
    for linear, count in linears:
        block = block_size(linear.in_features, asked)
        tables.append(
            FrozenTensor(
                name=f"{linear.name}: rows, cols",
                dims="oft_block_size (oft_block_size - 1) / 2",
                rows=1 + 0 * r,
                width=block * (block - 1) // 2,
                count=2 * count * linear.count,
                element_bytes=8,
            )
        )
    return tuple(tables)


def forward(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    asked: int = 32,
    share: bool = False,
    terms: int = 5,
) -> Tensor:
    """The base's product with the rotated input.

    Source: peft 0.21.2 `oft.Linear.forward`, `OFTRotationModule.forward`.
    """
    tape, what = ops.tape, linear.name
    wide = widened(ops, linear, x)
    rotation = _rotation(ops, linear, asked=asked, share=share, terms=terms)
    if share:
        block = block_size(linear.in_features, asked)
        rotation = tape.op([rotation], ops.constant(linear.in_features * block), rotation.size)
    narrow = ops.autocast(wide, f"{what}: own copy of the input")
    used = ops.autocast(rotation, f"{what}: rotation, cast")
    rows = ops.rows.of(linear.in_features)
    by_block = tape.op(
        [narrow, used],
        rows,
        narrow.size,
        saves=[narrow, used] if x.needs_grad else [narrow],
        what=f"{what}: rotated blocks",
    )
    rotated = ops.cast(tape.op([by_block], rows, by_block.size), wide.size)
    tape.hold(wide, rotation, by_block)  # local variables of the rotation's module
    argument = ops.cast(rotated, x.size, f"{what}: rotated input")
    result = ops.cast(ops.base(linear, argument), x.size)
    tape.hold(rotated, x)
    return result


def _rotation(ops: OpEmitter, linear: Linear, *, asked: int, share: bool, terms: int) -> Tensor:
    """Cayley's transform by a Neumann series. Source: `OFTRotationModule._cayley_batch`."""
    tape, dtypes = ops.tape, ops.dtypes
    block = block_size(linear.in_features, asked)
    blocks = 1 if share else linear.in_features // block
    elements = ops.constant(blocks * block * block)
    triangle = ops.constant(blocks * (block * (block - 1) // 2))
    angles = tape.weight(triangle, dtypes.adapter_bytes, trained=True)
    side_kernel(ops, elements, angles.size)  # zeros, into which the triangle is put
    upper = tape.op([angles], elements, angles.size)
    skew = tape.op([upper], elements, upper.size, what=f"{linear.name}: skew matrices")
    tape.hold(upper)
    side_kernel(ops, ops.constant(block * block), skew.size)  # one identity, which is repeated
    result = tape.op([], elements, skew.size)
    if terms > 1:
        result = tape.in_place(result, skew)
    if terms > 2:
        power = _multiplied(ops, skew, skew, linear)
        result = tape.in_place(result, power)
        for _ in range(3, terms - 1):
            power = _multiplied(ops, power, skew, linear)
            result = tape.in_place(result, power)
        power = _multiplied(ops, power, skew, linear)
        result = tape.in_place(result, power)
    tape.hold(skew)
    return result


def _multiplied(ops: OpEmitter, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
    """`torch.bmm` of two batches of blocks; autocast casts each factor anew."""
    first, second = ops.autocast(x), ops.autocast(y)
    return ops.tape.op(
        [first, second],
        x.elements,
        first.size,
        saves=[first, second],
        what=f"{linear.name}: powers of the skew matrices",
    )


def work(
    linear: Linear,
    dtypes: Dtypes,
    r: Count,
    *,
    asked: int = 32,
    share: bool = False,
    terms: int = 5,
) -> AdapterWork:
    """One product per block and token, and a few of blocks with blocks."""
    block = block_size(linear.in_features, asked)
    blocks = 1 if share else linear.in_features // block
    products = max(0, terms - 2)
    ((rows, width),) = adapter_shapes(linear, 1, asked=asked, share=share)
    per_token = 2 * linear.in_features * block
    return AdapterWork(
        **counted(linear, rows * width, forward_flops=per_token, backward_flops=2 * per_token),
        weight_flops=linear.count * products * 2 * blocks * block**3,
        backward_weight_flops=linear.count * products * 4 * blocks * block**3,
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    asked = _BLOCK.whole(run.method_options)
    share = _SHARE.flag(run.method_options)
    terms = _TERMS.whole(run.method_options)
    bound = partial(adapter_shapes, asked=asked, share=share)
    rest: dict[str, Any] = {"asked": asked, "share": share, "terms": terms}
    return {
        "adapter_shapes": bound,
        "frozen_tensors": partial(frozen_tensors, asked=asked),
        "forward": partial(forward, **rest),
        "work": partial(work, **rest),
    }


_FIELDS = PeftFields(
    options=_OPTIONS,
    plain={"module_dropout": (0.0,), "coft": (False,), "use_cayley_neumann": (True,), "r": (0,)},
)

METHOD = Method(
    name="oft",
    summary="each input is rotated, block by block",
    peft_class="peft.OFTConfig",
    peft_defaults=(("r", 0), ("module_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="oft_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    adapter_shapes=adapter_shapes,
    frozen_tensors=frozen_tensors,
    autocast_shapes=no_shapes,
    takes_conv1d=False,
    forward=forward,
    work=work,
)
