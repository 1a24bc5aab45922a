"""PEANuT: a small network makes each update of the weight itself.

Zhong et al. 2024, arXiv:2410.01870; peft 0.21.2 `tuners/peanut`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import LORA_SETTINGS, AdapterWork, Method
from whichlora.methods.operators import counted, parameter, product, uncached
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.linear_form import LinearForm
    from whichlora.symbolic.operators import OpEmitter

# a whole number of `Option` is from 1 on, and 0 is what PEFT has where nobody says
_DEPTH = Option(name="depth", summary="hidden layers of each half; none if left out", default=None)
_ACTIVATION = Option(
    name="act_fn",
    summary="after each layer but the last",
    default="relu",
    choices=("relu", "tanh", "sigmoid", "gelu", "silu"),
)
_SCALING = Option(name="scaling", summary="what each update is multiplied with", default=1.0)
_OPTIONS = (_DEPTH, _ACTIVATION, _SCALING)
_KEEP_RESULT = ("relu", "tanh", "sigmoid")  # derivatives.yaml of torch 2.13; the others their input


def adapter_shapes(linear: Linear, r: Count, *, depth: int = 0) -> tuple[tuple[Count, Count], ...]:
    """A is [r, out_features], B is [out_features, r], each hidden layer [r, r]. Kind: exact."""
    return ((r, linear.out_features), *autocast_shapes(linear, r, depth=depth))


def autocast_shapes(linear: Linear, r: Count, *, depth: int = 0) -> tuple[tuple[Count, Count], ...]:
    """A's transpose is no leaf."""
    return ((linear.out_features, r), *[(r, r)] * (2 * depth))


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, r: int = 16, depth: int = 0, keeps: bool = True
) -> Tensor:
    """The result plus a product with what the network makes of the weight.

    Source: peft 0.21.2 `peanut.Linear.forward`, `_compute_delta_weight`.
    """
    tape, what = ops.tape, linear.name
    dense = ops.constant(linear.in_features * linear.out_features)
    rows, narrow_rows = ops.rows.of(linear.out_features), ops.per_rank(linear.in_features)
    base = ops.base(linear, x)
    size = base.size
    stored = ops.cast(tape.weight(dense, ops.dtypes.base_bytes), ops.dtypes.adapter_bytes)
    a = uncached(ops, parameter(ops, ops.per_rank(linear.out_features)))
    hidden = _activated(ops, _frozen_times(ops, stored, a, narrow_rows, what), keeps)
    skipped = []
    for _ in range(depth):
        skipped.append(hidden)
        hidden = _activated(ops, _layer(ops, hidden, r, what), keeps)
    for before in reversed(skipped):
        hidden = _activated(ops, _layer(ops, hidden, r, what), keeps)
        hidden = ops.add(hidden, before)
    b = parameter(ops, ops.per_rank(linear.out_features))
    matrix = ops.scale(product(ops, hidden, b, dense, f"{what}: update"))
    tape.hold(stored)
    argument = ops.cast(x, matrix.size, f"{what}: own copy of the input")
    added = product(ops, argument, matrix, rows, f"{what}: input times the update")
    result = ops.add(base, ops.cast(added, size), f"{what}: result")
    tape.hold(base, matrix, argument, added, x)
    return result


def _frozen_times(
    ops: OpEmitter, stored: Tensor, factor: Tensor, elements: LinearForm, what: str
) -> Tensor:
    """The weight times A, whose gradient reads the weight: a copy of it where that is cast."""
    narrow = ops.autocast(stored, f"{what}: weight, cast")
    return ops.tape.op(
        [narrow, factor],
        elements,
        max(narrow.size, factor.size),
        saves=[narrow],
        reshapes=True,
        what=f"{what}: weight times A",
    )


def _layer(ops: OpEmitter, x: Tensor, r: int, what: str) -> Tensor:
    return product(ops, x, parameter(ops, ops.constant(r * r)), x.elements, f"{what}: hidden layer")


def _activated(ops: OpEmitter, x: Tensor, keeps: bool) -> Tensor:
    return ops.tape.op(
        [x], x.elements, x.size, saves=[] if keeps else [x], saves_result=keeps, what="activation"
    )


def work(linear: Linear, dtypes: Dtypes, r: Count, *, depth: int = 0) -> AdapterWork:
    """A second dense product, whose weight the network makes in every forward.

    Kind: exact. Source: operators of `peanut.Linear.forward`.
    """
    num_weights = linear.in_features * linear.out_features
    hidden = 2 * depth * 2 * r * r * linear.in_features
    params = 2 * r * linear.out_features + 2 * depth * r * r
    return AdapterWork(
        **counted(linear, params, forward_flops=2 * num_weights, backward_flops=4 * num_weights),
        weight_flops=linear.count * (4 * r * num_weights + hidden),
        backward_weight_flops=linear.count * (6 * r * num_weights + 2 * hidden),
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `PeanutModel._create_new_module`, `_compute_delta_weight`."""
    if linear.is_stored_in(quant):
        return f"its network reads the stored weight, which is none in {quant}; use quant none"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    depth = _DEPTH.whole(run.method_options)
    keeps = _ACTIVATION.of(run.method_options) in _KEEP_RESULT
    return {
        "adapter_shapes": partial(adapter_shapes, depth=depth),
        "autocast_shapes": partial(autocast_shapes, depth=depth),
        "forward": partial(forward, r=run.r, depth=depth, keeps=keeps),
        "work": partial(work, depth=depth),
    }


_FIELDS = PeftFields(r="r", options=_OPTIONS)


def read_peft(config: Any) -> Mapping[str, Any]:
    settings = _FIELDS.read(config)
    pairs = settings["method_options"]
    settings["method_options"] = tuple(pair for pair in pairs if pair != (_DEPTH.name, 0))
    return settings


METHOD = Method(
    name="peanut",
    summary="a small network makes each update of the weight",
    peft_class="peft.PeanutConfig",
    peft_defaults=(("r", 32), ("depth", 0)),
    peft_config=_FIELDS.config,
    read_peft=read_peft,
    parameter_prefix="peanut_",
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=autocast_shapes,
    forward=forward,
    work=work,
    merging=lambda base_bytes: 8 + base_bytes + 4 * (base_bytes != 4),
)
