"""DeLoRA: LoRA whose ranks are normalised, with one trained strength for each layer.

Bini et al. 2025, arXiv:2503.18225; peft 0.21.2 `tuners/delora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.methods.base import LORA_SETTINGS, PEFT_COMPARISON, FrozenTensor, Method
from whichlora.methods.operators import dropped, parameter, product, side_kernel
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A, B, and the strength. Kind: exact."""
    return (r, linear.in_features), (linear.out_features, r), (1 + 0 * r, 1)


def _factors(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    return adapter_shapes(linear, r)[:2]


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """The norm of each column of the weight. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: delora_w_norm",
            dims="in_features",
            rows=1 + 0 * r,
            width=linear.in_features,
            count=count * linear.count,
        )
        for linear, count in linears
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus B·s·A·(w x), which is added to zeros in place first.

    Source: peft 0.21.2 `DeloraLinear.forward`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    outputs = ops.rows.of(linear.out_features)
    base = ops.base(linear, x)
    zeros = tape.op([], outputs, base.size)
    inputs = dropped(ops, x)
    norms = tape.weight(ops.constant(linear.in_features), dtypes.adapter_bytes)
    weighted = ops.multiply_rows(inputs, norms)
    a, b = (parameter(ops, ops.per_rank(n)) for n in (linear.in_features, linear.out_features))
    inner = product(ops, weighted, a, ops.rows.of_rank(1), f"{what}: A·w·x")
    for factor in (a, b):  # its norms, which are clamped
        side_kernel(ops, ops.per_rank(1), factor.size, factor)
        side_kernel(ops, ops.per_rank(1), factor.size)
    for _ in range(2):  # the strength by the rank, and the product of the norms
        side_kernel(ops, ops.per_rank(1), dtypes.adapter_bytes)
    strength = tape.op([parameter(ops, ops.constant(1))], ops.per_rank(1), dtypes.adapter_bytes)
    scaled = ops.multiply_rows(inner, strength, row_last=True)
    update = product(ops, scaled, b, outputs, f"{what}: B·A·w·x")
    tape.hold(strength)
    added = tape.in_place(zeros, update)
    tape.hold(update)
    result = ops.add(base, added, f"{what}: result")
    tape.hold(base, inputs, update, x)
    return ops.cast(result, x.size)


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `DeloraModel._create_new_module`, `reset_delora_parameters`."""
    if linear.is_stored_in(quant):
        return f"PEFT takes the norms of the stored weight, which is none in {quant}"
    return ""


_FIELDS = PeftFields(
    r="r", dropout="module_dropout", plain={"rank_pattern": ({},), "lambda_pattern": ({},)}
)

METHOD = Method(
    name="delora",
    summary="LoRA of normalised ranks, with a trained strength",
    peft_class="peft.DeloraConfig",
    peft_defaults=(("r", 8), ("delora_lambda", 15), ("module_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="delora_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=_factors,
    frozen_tensors=frozen_tensors,
    forward=forward,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
