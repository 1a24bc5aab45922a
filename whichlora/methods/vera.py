"""VeRA: two random matrices shared by all targets, and two trained vectors for each.

Kopiczko et al. 2024, arXiv:2310.11454; peft 0.21.2 `tuners/vera`.
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
from whichlora.methods.operators import (
    base_result,
    counted,
    dropped,
    frozen_product,
    parameter,
    widened,
)
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_OPTIONS = (
    Option(name="d_initial", summary="first value of the trained factors of ranks", default=0.1),
)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """One factor per rank, one per output. Kind: exact."""
    return (1, r), (1, linear.out_features)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A and B as large as the largest target; the others read a part. `VeraModel._find_dim`."""
    if not linears:
        return ()
    width = max(linear.in_features for linear, _ in linears)
    rows = max(linear.out_features for linear, _ in linears)
    return (
        FrozenTensor(name="vera_A", dims="r, largest in_features", rows=r, width=width),
        FrozenTensor(name="vera_B", dims="largest out_features, r", rows=rows, width=r),
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus lambda_b * (B (lambda_d * (A x))). Source: `vera.Linear.forward`."""
    tape, dtypes = ops.tape, ops.dtypes
    result = base_result(ops, linear, x)
    size = result.size
    wide = widened(ops, linear, x)
    of_rank = ops.rows.of_rank(1)
    a = parameter(ops, ops.per_rank(linear.in_features), trained=False)  # a part of the shared one
    inner = frozen_product(ops, dropped(ops, wide), a, of_rank, f"{linear.name}: A·x")
    by_rank = tape.weight(ops.per_rank(1), dtypes.adapter_bytes, trained=True)
    inner = ops.multiply_rows(inner, by_rank)
    outputs = ops.rows.of(linear.out_features)
    b = parameter(ops, ops.per_rank(linear.out_features), trained=False)
    outer = frozen_product(ops, inner, b, outputs, f"{linear.name}: B·A·x")
    by_output = tape.weight(ops.constant(linear.out_features), dtypes.adapter_bytes, trained=True)
    result = ops.add(result, ops.multiply_rows(outer, by_output), f"{linear.name}: result")
    result = ops.cast(ops.cast(result, size), x.size)  # orig_dtype, then previous_dtype
    tape.hold(wide, x)
    return result


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """The products with A and B, neither of which is trained.

    Source: operators of `vera.Linear.forward`.
    """
    through = 2 * r * (linear.in_features + linear.out_features)
    params = r + linear.out_features
    return AdapterWork(
        **counted(linear, params, forward_flops=through, backward_flops=through),
    )


_FIELDS = PeftFields(r="r", dropout="vera_dropout", options=_OPTIONS)

METHOD = Method(
    name="vera",
    summary="trained vectors around two random matrices that all layers share",
    peft_class="peft.VeraConfig",
    peft_defaults=(("r", 256), ("vera_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="vera_lambda_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
