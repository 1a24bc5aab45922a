"""LoHa: the elementwise product of two low-rank matrices is added to each weight.

Hyeon-Woo et al. 2021, arXiv:2108.06098; peft 0.21.2 `tuners/loha`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.methods.base import LORA_SETTINGS, AdapterWork, Method
from whichlora.methods.operators import counted, parameter, product
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import FOUR_BIT_BNB

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """Two pairs of factors, [out_features, r] and [r, in_features]. Kind: exact."""
    return (
        (linear.out_features, r),
        (r, linear.in_features),
        (linear.out_features, r),
        (r, linear.in_features),
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus a product with the dense update.

    Source: peft 0.21.2 `LoHaLayer.forward`, `Linear._get_delta_activations`, `HadaWeight`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    result = ops.base(linear, x)
    num_weights = linear.in_features * linear.out_features
    dense = ops.constant(num_weights)
    factors = [
        parameter(ops, ops.per_rank(width))
        for width in (linear.out_features, linear.in_features) * 2
    ]
    size = dtypes.adapter_bytes
    if dtypes.under_autocast:
        size = dtypes.compute_bytes
        for factor in factors:  # cast within the function, and cached
            ops.autocast(factor)
    # backward, outside of autocast: the scaled gradient, a product of two factors, that times the
    # gradient, and what the other two factors had, which their variable still holds
    update = tape.op(
        factors,
        dense,
        size,
        inner=(*ops.short_lived(num_weights * size), *[ops.constant(num_weights * size)] * 2),
        inner_backward=(
            ops.constant(num_weights * size),
            *ops.short_lived(num_weights * dtypes.adapter_bytes),
            *[ops.constant(num_weights * dtypes.adapter_bytes)] * 3,
        ),
    )
    argument = ops.cast(x, size, f"{what}: own copy of the input")
    rows = ops.rows.of(linear.out_features)
    added = product(ops, argument, update, rows, f"{what}: dense update")
    tape.hold(update, argument)
    summed = ops.add(result, added, f"{what}: result")
    tape.hold(x)
    return ops.cast(summed, x.size)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """A second dense product, and the update built of two products in every forward.

    A backward repeats both, and has one for the gradient of each of four factors.
    """
    both = linear.in_features + linear.out_features
    num_weights = linear.in_features * linear.out_features
    built = linear.count * 4 * r * num_weights
    return AdapterWork(
        **counted(
            linear, 2 * r * both, forward_flops=2 * num_weights, backward_flops=4 * num_weights
        ),
        weight_flops=built,
        backward_weight_flops=3 * built,
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `LycorisTuner._create_new_module`, `LoHaLayer.update_layer`."""
    if linear.is_stored_in(quant):
        kind = "packed codes" if quant in FOUR_BIT_BNB else f"weights in {quant}"
        return f"PEFT gives its update the shape of the stored weight, which is none of {kind}"
    return ""


_FIELDS = PeftFields(
    r="r",
    alpha="alpha",
    plain={"rank_dropout": (0.0,), "module_dropout": (0.0,), "rank_pattern": ({},)},
)

METHOD = Method(
    name="loha",
    summary="the elementwise product of two low-rank updates",
    peft_class="peft.LoHaConfig",
    peft_defaults=(("r", 8), ("alpha", 8)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="hada_",
    ignores=LORA_SETTINGS | {"lora_dropout"},
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    forward=forward,
    work=work,
)
