"""SHiRA: chosen elements of each weight are trained, as many as LoRA of the rank has.

Bhardwaj et al. 2024, arXiv:2406.13175; peft 0.21.2 `tuners/shira`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    FrozenTensor,
    Method,
    no_shapes,
)
from whichlora.methods.operators import counted, dense_weight, parameter, product
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import FOUR_BIT_BNB

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_SEED = Option(name="random_seed", summary="of the mask that chooses the elements", default=None)
_INDEX = 8  # bytes of one of the two indices of a sparse tensor


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """One vector of r (in_features + out_features). Kind: exact."""
    return ((1, r * (linear.in_features + linear.out_features)),)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """Where the elements are: two 32-bit indices of each. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: indices",
            dims="2, r (in_features + out_features)",
            rows=2,
            width=r * (linear.in_features + linear.out_features),
            count=count * linear.count,
            element_bytes=4,
        )
        for linear, count in linears
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """A product with a copy of the weight to which the trained elements are added.

    Source: peft 0.21.2 `shira.Linear.forward`, `get_delta_weight`.
    """
    tape, what = ops.tape, linear.name
    both = linear.in_features + linear.out_features
    stored = dense_weight(ops, linear)
    weight = tape.op([stored], stored.elements, stored.size, what=f"{what}: weight, copied")
    values = ops.scale(parameter(ops, ops.per_rank(both)))
    indices = ops.per_rank(2 * both * _INDEX)
    # of 32-bit indices 64-bit ones are made, by which the gradient is read: the node has the
    # sparse tensor with both
    sparse = tape.op(
        [values],
        ops.constant(0),
        values.size,
        saves=[values],
        keeps=[indices],
        what=f"{what}: chosen elements and where they are",
    )
    weight = tape.in_place(weight, sparse)
    tape.hold(sparse)
    result = product(ops, x, weight, ops.rows.of(linear.out_features), f"{what}: result")
    tape.hold(weight, x)
    return result


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """The gradient of the changed weight; a quantised one is expanded for the copy, too."""
    num_weights = linear.in_features * linear.out_features
    params = r * (linear.in_features + linear.out_features)
    return AdapterWork(
        **counted(linear, params, forward_flops=0, backward_flops=2 * num_weights),
        expansions=int(is_quantised(linear, dtypes)),
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `ShiraModel._create_new_module`; `ShiraLayer.update_layer`."""
    if linear.is_stored_in(quant):
        kind = "4-bit" if quant in FOUR_BIT_BNB else quant
        return f"its copies of {kind} weights are not predicted; use quant none"
    return ""


_FIELDS = PeftFields(r="r", options=(_SEED,))

METHOD = Method(
    name="shira",
    summary="chosen elements of each weight are trained",
    peft_class="peft.ShiraConfig",
    peft_defaults=(("r", 32),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="shira_",
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
    options=(_SEED,),
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    learning_rate=3e-4,
    rate_source=PEFT_COMPARISON,
)
