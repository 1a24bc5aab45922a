"""C3A: a trained block-circular convolution of each input.

Chen et al. 2024, arXiv:2407.19342; peft 0.21.2 `tuners/c3a`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    PEFT_COMPARISON,
    RANK_SETTINGS,
    AdapterWork,
    Method,
    given,
    no_shapes,
)
from whichlora.methods.operators import counted
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_BLOCK = Option(name="block_size", summary="of the convolution; it divides all widths", default=256)
_FP32 = 4
_COMPLEX = 8  # bytes of one complex number of two fp32


def adapter_shapes(
    linear: Linear, r: Count, *, block: int = 256
) -> tuple[tuple[Count, Count], ...]:
    """[out_features / block, in_features / block, block]. Kind: exact."""
    return ((linear.out_features + 0 * r, linear.in_features // block),)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, block: int = 256) -> Tensor:
    """The result, to which the convolution of the fp32 input is added in place.

    Source: peft 0.21.2 `C3ALinear.forward`, `BlockCircularConvolution`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    kernel_elements = ops.constant(linear.in_features * linear.out_features // block)
    result = ops.base(linear, x)
    wide = ops.cast(x, _FP32, f"{what}: fp32 input")
    stored = tape.weight(kernel_elements, dtypes.adapter_bytes, trained=True)
    kernel = ops.cast(stored, _FP32, f"{what}: fp32 kernel")
    rows = ops.rows.of
    in_frequencies = rows(_COMPLEX * linear.in_features)
    frequencies = rows(_COMPLEX * linear.out_features)
    of_kernel = ops.constant(_COMPLEX * linear.in_features * linear.out_features // block)
    # transforms of input and kernel, their product, and that transformed back; all are one node
    # of the graph, and the gradient's way back has as many
    products = tape.op(
        [wide, kernel], frequencies, 1, inner=(in_frequencies, of_kernel), detached=True
    )
    convolved = tape.op([products], frequencies, 1, detached=True)
    outputs = rows(linear.out_features)
    divided = tape.op(
        [convolved, wide, kernel],
        outputs,
        _FP32,
        saves=[wide, kernel],
        inner_backward=rows(
            (_FP32 + _COMPLEX) * linear.out_features + (2 * _COMPLEX - _FP32) * linear.in_features
        ),
        what=f"{what}: input and kernel of the convolution",
    )
    result = tape.in_place(result, ops.cast(divided, result.size))
    tape.hold(divided, kernel, x)
    return ops.cast(result, x.size)


def work(linear: Linear, dtypes: Dtypes, r: Count, *, block: int = 256) -> AdapterWork:
    """A complex product per frequency; the transforms take the time of the bytes that they move.

    Source: `BlockCircularConvolution`.
    """
    params = linear.in_features * linear.out_features // block
    products = 8 * params  # four products and four sums for each complex one
    return AdapterWork(
        wide=True, **counted(linear, params, forward_flops=products, backward_flops=2 * products)
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    block = _BLOCK.whole(run.method_options)
    return given(adapter_shapes, forward, work, refuses, block=block)


def refuses(linear: Linear, quant: str, *, block: int = 256) -> str:
    """Source: peft 0.21.2 `C3ALayer.update_layer`, `C3AModel._create_new_module`."""
    if linear.is_stored_in(quant):
        return f"its kernel is predicted beside weights that are not quantised, not {quant}"
    for width in (linear.in_features, linear.out_features):
        if width % block:
            return f"block_size must divide {width}, got {block}; use one that does"
    return ""


_FIELDS = PeftFields(options=(_BLOCK,), plain={"block_size_pattern": ({},)})

METHOD = Method(
    name="c3a",
    summary="a block-circular convolution beside each layer",
    peft_class="peft.C3AConfig",
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="c3a_",
    ignores=RANK_SETTINGS,
    options=(_BLOCK,),
    with_options=with_options,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    refuses=refuses,
    takes_conv1d=False,
    forward=forward,
    work=work,
    learning_rate=0.3,
    rate_source=PEFT_COMPARISON,
)
