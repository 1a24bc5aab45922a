"""HRA: each weight is multiplied with a chain of trained Householder reflections.

Yuan et al. 2024, arXiv:2405.17484; peft 0.21.2 `tuners/hra`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import LORA_SETTINGS, AdapterWork, Method, no_shapes
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

_ORTHOGONAL = Option(
    name="apply_GS",
    summary="Gram-Schmidt: vectors are made orthogonal in each forward",
    default=False,
)
_OPTIONS = (_ORTHOGONAL,)
_FP32 = 4


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """One vector for each reflection, [in_features, r]. Kind: exact."""
    return ((linear.in_features, r),)


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, r: int = 16, orthogonal: bool = False
) -> Tensor:
    """The product with the reflected weight, which every forward makes anew.

    Source: peft 0.21.2 `hra.HRALinear.forward`, `get_delta_weight`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    width = linear.in_features
    dense = ops.constant(width * width)
    identity = tape.op([], dense, _FP32)
    stored = parameter(ops, ops.constant(width * r))
    made = _orthogonal if orthogonal else _reflected
    delta = made(ops, stored, linear, r)
    start = ops.cast(identity, stored.size)
    rotation = product(ops, start, delta, dense, f"{what}: reflections")
    tape.hold(identity, start, stored)
    base = tape.weight(ops.constant(width * linear.out_features), dtypes.base_bytes)
    original = ops.cast(base, rotation.size, f"{what}: weight, cast")
    weight = product(ops, original, rotation, base.elements, f"{what}: reflected weight")
    tape.hold(rotation)
    argument = ops.cast(x, weight.size, f"{what}: own copy of the input")
    result = product(ops, argument, weight, ops.rows.of(linear.out_features), f"{what}: result")
    result = ops.cast(result, x.size)
    tape.hold(delta, original, weight, argument, x)
    return result


def _reflected(ops: OpEmitter, stored: Tensor, linear: Linear, r: int) -> Tensor:
    """Reflections one after another: each keeps the matrix that it reads."""
    tape, what = ops.tape, f"{linear.name}: reflections"
    width = linear.in_features
    column, dense = ops.constant(width), ops.constant(width * width)
    vectors = _normalised(ops, stored, ops.constant(r))
    chain = tape.op([], dense, stored.size)
    for vector in tape.parts(vectors, (column,) * r):
        before = chain
        twice = ops.scale(before)
        seen = product(ops, twice, vector, column, what)
        outer = product(ops, seen, vector, dense, what)
        chain = _difference(ops, before, outer)
        tape.hold(before)
    tape.hold(vectors)
    return chain


def _orthogonal(ops: OpEmitter, stored: Tensor, linear: Linear, r: int) -> Tensor:
    """Vectors that are made orthogonal one by one, and one product of all of them."""
    tape, what = ops.tape, f"{linear.name}: reflections"
    width = linear.in_features
    column, scalar = ops.constant(width), ops.constant(1)
    done: list[Tensor] = []
    for vector in tape.parts(stored, (column,) * r):
        for earlier in done:
            share = product(ops, earlier, vector, scalar, what)
            vector = _difference(ops, vector, ops.multiply_rows(earlier, share))
        done.append(_normalised(ops, vector, scalar))
    vectors = tape.op(done, stored.elements, stored.size)
    identity = tape.op([], ops.constant(width * width), stored.size)
    outer = product(ops, ops.scale(vectors), vectors, identity.elements, what)
    result = _difference(ops, identity, outer)
    tape.hold(vectors, *done)
    return result


def _normalised(ops: OpEmitter, x: Tensor, lengths: Any) -> Tensor:
    """`x / x.norm()`: the norm keeps its argument and itself."""
    length = ops.tape.op([x], lengths, x.size, saves=[x], saves_result=True)
    return ops.tape.op([x, length], x.elements, x.size, saves=[x, length], inner_backward=x.form)


def _difference(ops: OpEmitter, x: Tensor, y: Tensor) -> Tensor:
    """`x - y`: the gradient of `y` is negated in the width of the difference."""
    size = max(x.size, y.size)
    return ops.tape.op([x, y], x.elements, size, passes=True)


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, rank: int = 16, orthogonal: bool = False
) -> AdapterWork:
    """Two thin products for each reflection, and two dense ones that make the weight.

    Orthogonal vectors are multiplied at once; the products that make them so are left out.
    """
    width, num_weights = linear.in_features, linear.in_features * linear.out_features
    dense = width * width
    made = 2 * width * (dense + num_weights)
    chain_flops = (2 if orthogonal else 4) * rank * dense
    return AdapterWork(
        replaces_base=True,
        # the gradient of the weight is a product more than a frozen layer has
        **counted(linear, width * r, forward_flops=0 * r, backward_flops=2 * num_weights + 0 * r),
        weight_flops=linear.count * (chain_flops + made),
        backward_weight_flops=linear.count * (2 * chain_flops + made),
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `HRAModel._create_new_module`, `HRALinear.forward`."""
    if linear.is_stored_in(quant):
        return f"PEFT's HRA multiplies the stored weight, which is none in {quant}; use quant none"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    orthogonal = _ORTHOGONAL.flag(run.method_options)
    return {
        "forward": partial(forward, r=run.r, orthogonal=orthogonal),
        "work": partial(work, rank=run.r, orthogonal=orthogonal),
    }


def _merging(base_bytes: int) -> int:
    # of a square weight: the chain before and after a reflection and their difference, as many
    # fp32 matrices as chain, weight and product
    return 3 * _FP32


_FIELDS = PeftFields(r="r", options=_OPTIONS)

METHOD = Method(
    name="hra",
    summary="each weight times a chain of trained reflections",
    peft_class="peft.HRAConfig",
    peft_defaults=(("r", 8),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="hra_",
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
    merging=_merging,
)
