"""GLoRA: each weight is scaled and shifted by low-rank matrices, each bias by small vectors.

Chavan et al. 2023, arXiv:2306.07967; peft 0.21.2 `tuners/glora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    FrozenTensor,
    Method,
    given,
)
from whichlora.methods.operators import counted, parameter, product, side_kernel
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_WEIGHT = Option(
    name="config_A_B",
    summary="what scales and shifts a weight: matrices, a number per output, or one number",
    default="lora",
    choices=("lora", "vector", "constant"),
)
_COUPLING = Option(
    name="config_C",
    summary="what a weight is multiplied with and added to its bias, where there is one",
    default="lora",
    choices=("lora", "vector", "none"),
)
_BIAS = Option(
    name="config_D_E",
    summary="what scales and shifts a bias, where there is one",
    default="constant",
    choices=("vector", "constant", "none"),
)
_OPTIONS = (_WEIGHT, _COUPLING, _BIAS)


class _Kinds(NamedTuple):
    weight: str = "lora"
    coupling: str = "lora"
    bias: str = "constant"

    def of(self, linear: Linear) -> _Kinds:
        """Without a bias there is nothing of its own."""
        return self if linear.bias else self._replace(coupling="none", bias="none")


_USUAL = _Kinds()


def adapter_shapes(
    linear: Linear, r: Count, *, kinds: _Kinds = _USUAL
) -> tuple[tuple[Count, Count], ...]:
    """A and B of the weight; of a bias C, D and E. Kind: exact."""
    wide, tall = linear.in_features, linear.out_features
    scalar = 1 + 0 * r
    kinds = kinds.of(linear)
    of_weight: dict[str, tuple[tuple[Count, Count], ...]] = {
        "lora": ((tall, r), (r, wide)),
        "vector": ((scalar, tall),),
        "constant": ((scalar, 1),),
    }
    of_coupling: dict[str, tuple[tuple[Count, Count], ...]] = {
        "lora": ((wide, r), (r, 1)),
        "vector": ((scalar, wide),),
        "none": (),
    }
    of_bias: dict[str, tuple[tuple[Count, Count], ...]] = {
        "vector": ((scalar, tall),),
        "constant": ((scalar, 1),),
        "none": (),
    }
    return (*2 * of_weight[kinds.weight], *of_coupling[kinds.coupling], *2 * of_bias[kinds.bias])


def autocast_shapes(
    linear: Linear, r: Count, *, kinds: _Kinds = _USUAL
) -> tuple[tuple[Count, Count], ...]:
    """Factors of matrices, which products read as they are."""
    only = _Kinds(kinds.weight, kinds.coupling, "none").of(linear)
    if only.weight != "lora":
        return ()
    shapes = adapter_shapes(linear, r, kinds=only._replace(coupling="none"))
    if only.coupling == "lora":
        shapes += (linear.in_features, r), (r, 1)
    return shapes


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, kinds: _Kinds = _USUAL
) -> tuple[FrozenTensor, ...]:
    """Zeros in place of what is not trained. Source: `GloraEmptyPath`."""
    tensors = []
    for linear, count in linears:
        kind = kinds.of(linear)
        width = linear.in_features * (kind.coupling == "none")
        width += 2 * linear.out_features * (kind.bias == "none")
        if width:
            tensors.append(
                FrozenTensor(
                    name=f"{linear.name}: zeros",
                    dims="in_features, 2 out_features",
                    rows=1 + 0 * r,
                    width=width,
                    count=count * linear.count,
                    as_base=True,
                )
            )
    return tuple(tensors)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, kinds: _Kinds = _USUAL) -> Tensor:
    """The result plus a product with W + W·A + B, less the result.

    Source: peft 0.21.2 `GloraLinear.forward`.
    """
    tape, size, what = ops.tape, ops.dtypes.base_bytes, linear.name
    kind = kinds.of(linear)
    rows, elements = ops.rows.of(linear.out_features), linear.in_features * linear.out_features
    base = ops.base(linear, x)
    dense = ops.constant(elements)
    stored = tape.weight(dense, size)
    scale, shift = (_of_weight(ops, linear, kind.weight) for _ in range(2))
    if kind.weight == "lora":
        scaled = ops.multiply(stored, scale)
    else:  # the gradient of what is repeated is summed up
        scaled = tape.op(
            [scale], dense, size, saves=[stored], inner_backward=ops.constant(size * elements)
        )
    changed = ops.add(stored, scaled)
    weight = ops.add(changed, shift)
    bias = _bias(ops, linear, kind)
    narrow = ops.autocast(x, f"{what}: own copy of the input")
    used = ops.autocast(weight, f"{what}: changed weight, cast")
    adapted = tape.op(
        [narrow, used, *bias],
        rows,
        narrow.size,
        saves=[used, narrow] if x.needs_grad else [narrow],
        reshapes=True,
        what=f"{what}: product with the changed weight",
    )
    both = ops.add(base, adapted)
    again = ops.scale(base)
    negative = tape.view(again, copies_gradient=True)
    result = ops.add(both, negative, f"{what}: result")
    tape.hold(both)
    result = ops.cast(result, base.size)
    tape.hold(base, scale, shift, weight, adapted, x)
    return result


def _of_weight(ops: OpEmitter, linear: Linear, kind: str) -> Tensor:
    """A or B. Source: `GloraLoraPath`, `GloraVectorPath`, `GloraScalarPath`."""
    if kind != "lora":
        count = linear.out_features if kind == "vector" else 1
        return ops.cast(parameter(ops, ops.constant(count)), ops.dtypes.base_bytes)
    left, right = (
        parameter(ops, ops.per_rank(width)) for width in (linear.out_features, linear.in_features)
    )
    dense = ops.constant(linear.in_features * linear.out_features)
    matrix = product(ops, left, right, dense, f"{linear.name}: low-rank matrix")
    return ops.cast(matrix, ops.dtypes.base_bytes)


def _bias(ops: OpEmitter, linear: Linear, kinds: _Kinds) -> list[Tensor]:
    """The bias that is scaled, shifted and coupled, if one of its parts is trained."""
    size = ops.dtypes.base_bytes
    parts = []
    if kinds.bias != "none":
        count = ops.constant(linear.out_features if kinds.bias == "vector" else 1)
        parts += [ops.cast(parameter(ops, count), size) for _ in range(2)]
    column = ops.constant(linear.in_features)
    if kinds.coupling == "lora":
        left, right = (parameter(ops, ops.per_rank(n)) for n in (linear.in_features, 1))
        parts.append(ops.cast(product(ops, left, right, column, f"{linear.name}: C"), size))
    elif kinds.coupling == "vector":
        parts.append(ops.cast(parameter(ops, column), size))
    outputs = ops.constant(linear.out_features)
    if linear.bias:  # the weight times C, a product with D, and sums
        weight = ops.tape.weight(ops.constant(linear.in_features * linear.out_features), size)
        side_kernel(ops, outputs, size, weight)
        for _ in range(3):
            side_kernel(ops, outputs, size)
    if not parts:
        return []
    return [ops.tape.op(parts, outputs, size)]


def work(linear: Linear, dtypes: Dtypes, r: Count, *, kinds: _Kinds = _USUAL) -> AdapterWork:
    """A second dense product, and its weight built in every forward and gone back through."""
    num_weights = linear.in_features * linear.out_features
    kind = kinds.of(linear)
    params: Count = 0 * r
    for height, width in adapter_shapes(linear, r, kinds=kinds):
        params = params + height * width
    low_rank = kind.weight == "lora"
    built = 4 * r * num_weights * low_rank
    return AdapterWork(
        wide=False,
        **counted(linear, params, forward_flops=2 * num_weights, backward_flops=4 * num_weights),
        weight_flops=linear.count * built,
        backward_weight_flops=linear.count * 2 * built,
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `GloraModel._create_new_module`."""
    if linear.transposed or linear.is_subclass or linear.is_stored_in(quant):
        return "PEFT's GLoRA takes plain nn.Linear alone, not Conv1D or quantised; use method lora"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    kinds = _Kinds(*(option.text(run.method_options) for option in _OPTIONS))
    return given(adapter_shapes, autocast_shapes, frozen_tensors, forward, work, kinds=kinds)


_FIELDS = PeftFields(r="r", options=_OPTIONS)

METHOD = Method(
    name="glora",
    summary="each weight and bias is scaled and shifted",
    peft_class="peft.GloraConfig",
    peft_defaults=(("r", 8),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="glora_",
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=autocast_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    merging=lambda base_bytes: 5 * base_bytes,
    learning_rate=5e-4,
    rate_source=PEFT_COMPARISON,
)
