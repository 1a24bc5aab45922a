"""RoAD: pairs of each result are rotated and scaled by trained angles and factors.

Liao and Monz 2024, arXiv:2409.00119; peft 0.21.2 `tuners/road`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import PEFT_COMPARISON, RANK_SETTINGS, AdapterWork, Method, no_shapes
from whichlora.methods.operators import counted, parameter, side_kernel
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_VARIANT = Option(
    name="variant",
    summary="how many numbers a pair has: one angle, two, or four",
    default="road_1",
    choices=("road_1", "road_2", "road_4"),
)
_GROUP = Option(name="group_size", summary="outputs whose halves are paired", default=64)
_OPTIONS = (_VARIANT, _GROUP)


def _numbers(out_features: int, variant: str) -> int:
    """Angles of one layer; it has as many factors. Source: `RoadLayer.update_layer`."""
    return out_features * int(variant.removeprefix("road_")) // 2


def adapter_shapes(
    linear: Linear, r: Count, *, variant: str = "road_1"
) -> tuple[tuple[Count, Count], ...]:
    """Angles and factors. Kind: exact."""
    shape = (1 + 0 * r, _numbers(linear.out_features, variant))
    return shape, shape


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, variant: str = "road_1") -> Tensor:
    """The base's result times one column, and its rotated halves times another.

    Source: peft 0.21.2 `road.Linear.forward`, `_apply_road`.
    """
    tape, what = ops.tape, linear.name
    result = ops.base(linear, x)
    size = result.size
    wide = ops.cast(result, ops.dtypes.adapter_bytes, f"{what}: fp32 result")
    numbers = ops.constant(_numbers(linear.out_features, variant))
    of_outputs = ops.constant(linear.out_features)
    cosines = ops.constant(4 * linear.out_features * ops.dtypes.adapter_bytes)
    angles, factors = parameter(ops, numbers), parameter(ops, numbers)
    # of road_1 both are repeated; a cosine, a sine and a product with each in all variants
    for _ in range(5 if variant == "road_1" else 3):
        side_kernel(ops, of_outputs, angles.size)
    first, second = tape.several(
        [angles, factors], [of_outputs, of_outputs], angles.size, keeps=[cosines]
    )
    rows = ops.rows.of(linear.out_features)
    negative = tape.op([wide], ops.rows.of(linear.out_features // 2), wide.size)
    # backward, each half's gradient is put into a tensor of all outputs before both are added
    half = ops.rows.of(linear.out_features // 2 * wide.size)
    rotated = tape.op(
        [negative, wide], rows, wide.size, inner_backward=half, what=f"{what}: rotated halves"
    )
    kept = ops.multiply_rows(wide, first, row_last=True)
    turned = ops.multiply_rows(rotated, second, row_last=True)
    summed = ops.add(kept, turned)
    tape.hold(rotated, wide, second)
    result = ops.cast(summed, size)
    tape.hold(summed, x)
    return result


def work(linear: Linear, dtypes: Dtypes, r: Count, *, variant: str = "road_1") -> AdapterWork:
    """No product, so that what is counted for trained parameters is taken off."""
    params = 2 * _numbers(linear.out_features, variant)
    return AdapterWork(**counted(linear, params, forward_flops=0, backward_flops=0))


def refuses(linear: Linear, quant: str, *, group: int = 64) -> str:
    """Source: peft 0.21.2 `RoadLayer.update_layer`, `dispatch_default`."""
    if linear.is_stored_in(quant):
        return f"its layers are predicted on weights that are not quantised, not {quant}"
    if linear.out_features % group:
        return f"group_size must divide out_features, {linear.out_features}, got {group}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    variant = _VARIANT.text(run.method_options)
    return {
        "adapter_shapes": partial(adapter_shapes, variant=variant),
        "forward": partial(forward, variant=variant),
        "work": partial(work, variant=variant),
        "refuses": partial(refuses, group=_GROUP.whole(run.method_options)),
    }


_FIELDS = PeftFields(options=_OPTIONS)

METHOD = Method(
    name="road",
    summary="pairs of each result are rotated and scaled",
    peft_class="peft.RoadConfig",
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="road_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
