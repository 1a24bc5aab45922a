"""PVeRA: VeRA whose inner vector is drawn from a distribution that is trained.

arXiv:2512.07703; peft 0.21.2 `tuners/pvera`.
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
from whichlora.methods.operators import base_result, dropped, frozen_product, parameter, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_OPTIONS = (
    Option(name="d_initial", summary="first value of the trained factors of ranks", default=0.1),
    Option(name="sample_at_inference", summary="draw when it is served, too", default=False),
)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """Two factors per rank, of mean and variance, and one per output. Kind: exact."""
    return (1, 2 * r), (1, linear.out_features)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A and B as large as the largest target; the others read a part. `PveraModel._find_dim`."""
    if not linears:
        return ()
    width = max(linear.in_features for linear, _ in linears)
    rows = max(linear.out_features for linear, _ in linears)
    return (
        FrozenTensor(name="pvera_A", dims="2r, largest in_features", rows=2 * r, width=width),
        FrozenTensor(name="pvera_B", dims="largest out_features, r", rows=rows, width=r),
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus lambda_b * (B z), z being drawn with mean and variance lambda_d * (A x).

    Source: peft 0.21.2 `pvera.Linear.forward`, `_reparametrize`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    # layers of a quantised base return the dtype of the input that they have widened themselves
    quantised = is_quantised(linear, dtypes)
    stays_wide = quantised and not dtypes.under_autocast
    result = base_result(ops, linear, x)
    size = result.size
    wide = widened(ops, linear, x)
    inputs = dropped(ops, wide)
    of_ranks, of_rank = ops.rows.of_rank(2), ops.rows.of_rank(1)
    a = parameter(ops, ops.per_rank(2 * linear.in_features), trained=False)  # a part of it
    inner = frozen_product(ops, inputs, a, of_ranks, f"{what}: A·x")
    tape.hold(inputs)  # an argument, until the product is there
    by_rank = tape.weight(ops.per_rank(2), dtypes.adapter_bytes, trained=True)
    drawn = ops.multiply_rows(inner, by_rank)
    both = drawn  # mean and logarithm of the variance are views of its halves
    if dtypes.training:
        half = tape.op([both], of_rank, both.size)
        deviation = tape.op(
            [half], of_rank, both.size, saves_result=True, what=f"{what}: deviation"
        )
        noise = tape.op([], of_rank, both.size)
        scaled = ops.multiply(deviation, noise)
        drawn = tape.op([both, scaled], of_rank, both.size)
        tape.hold(deviation, noise)
    outputs = ops.rows.of(linear.out_features)
    b = parameter(ops, ops.per_rank(linear.out_features), trained=False)
    outer = frozen_product(ops, drawn, b, outputs, f"{what}: B·z")
    tape.hold(drawn)
    by_output = tape.weight(ops.constant(linear.out_features), dtypes.adapter_bytes, trained=True)
    update = ops.multiply_rows(outer, by_output)
    tape.hold(both)
    if stays_wide:
        update = ops.cast(update, size)
    result = ops.add(result, update, f"{what}: result")
    if quantised:
        tape.hold(inputs, update)
    tape.hold(wide, x)
    return ops.cast(result, wide.size if stays_wide else x.size)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """The products with A, of twice the rank, and B, neither of which is trained.

    Source: operators of `pvera.Linear.forward`.
    """
    both = 2 * linear.in_features + linear.out_features
    return AdapterWork(token_flops=2 * r * both)


_FIELDS = PeftFields(r="r", dropout="pvera_dropout", options=_OPTIONS)

METHOD = Method(
    name="pvera",
    summary="VeRA with a drawn inner vector",
    peft_class="peft.PveraConfig",
    peft_defaults=(("r", 256), ("pvera_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="pvera_lambda_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    learning_rate=3e-3,
    rate_source=PEFT_COMPARISON,
)
