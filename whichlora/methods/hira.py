"""HiRA: each weight is multiplied with a low-rank matrix, and added to itself.

Huang et al. 2025, ICLR (openreview TwJrTz9cRS); peft 0.21.2 `tuners/hira`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.methods.base import LORA_SETTINGS, PEFT_COMPARISON, AdapterWork, Method, no_shapes
from whichlora.methods.operators import (
    counted,
    dense_weight,
    dropped,
    parameter,
    product,
    uncached,
    widened,
)
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A is [r, in_features], B is [out_features, r]. Kind: exact."""
    return (r, linear.in_features), (linear.out_features, r)


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus a product with the weight times B·A, element by element.

    Source: peft 0.21.2 `hira.Linear.forward`.
    """
    tape, what = ops.tape, linear.name
    result = ops.base(linear, x)
    size = result.size
    # `hira_A.T` and `hira_B.T` are no leaves, whose casts autocast would cache
    a, b = (
        uncached(ops, parameter(ops, ops.per_rank(width)))
        for width in (linear.in_features, linear.out_features)
    )
    dense = ops.constant(linear.in_features * linear.out_features)
    matrix = product(ops, a, b, dense, f"{what}: B·A")
    argument = widened(ops, linear, x)
    inputs = dropped(ops, argument)
    weight = ops.multiply(matrix, dense_weight(ops, linear))
    update = product(ops, inputs, weight, ops.rows.of(linear.out_features), f"{what}: update")
    result = ops.add(result, update, f"{what}: result")
    tape.hold(matrix, argument, inputs, update, x)
    return ops.cast(result, size)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """A second dense product, and its weight built in every forward and gone back through."""
    num_weights = linear.in_features * linear.out_features
    params = r * (linear.in_features + linear.out_features)
    built = linear.count * 2 * r * num_weights
    return AdapterWork(
        **counted(linear, params, forward_flops=2 * num_weights, backward_flops=4 * num_weights),
        weight_flops=built,
        backward_weight_flops=2 * built,
    )


def refuses(linear: Linear, quant: str) -> str:
    if linear.is_stored_in(quant):
        return f"its expanded copies of weights in {quant} are not predicted; use quant none"
    return ""


_FIELDS = PeftFields(r="r", dropout="hira_dropout", plain={"rank_pattern": ({},)})

METHOD = Method(
    name="hira",
    summary="a low-rank matrix that each weight is multiplied with",
    peft_class="peft.HiraConfig",
    peft_defaults=(("r", 32), ("hira_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="hira_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
    learning_rate=4.5e-3,
    rate_source=PEFT_COMPARISON,
)
