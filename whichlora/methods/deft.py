"""DEFT: a trained subspace of each result is removed, and injected anew from the input.

Source: peft 0.21.2 `tuners/deft`; with `para` it is PaRa (Chen et al. 2024, arXiv:2405.15743).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import LORA_SETTINGS, AdapterWork, Method, no_shapes
from whichlora.methods.operators import counted, dropped, parameter, product, uncached
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_PROJECTOR = Option(
    name="decomposition_method",
    summary="what projects: P·relu(P).T, or Q·Q.T of its QR decomposition",
    default="relu",
    choices=("relu", "qr"),
)
_PARA = Option(name="para", summary="the subspace is removed, and nothing injected", default=False)
_OPTIONS = (_PROJECTOR, _PARA)
_FP32 = 4  # all of the update


def adapter_shapes(
    linear: Linear, r: Count, *, injects: bool = True
) -> tuple[tuple[Count, Count], ...]:
    """P is [out_features, r], R is [r, in_features]. Kind: exact."""
    injection = ((r, linear.in_features),) if injects else ()
    return ((linear.out_features, r), *injection)


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, injects: bool = True, by_qr: bool = False
) -> Tensor:
    """The result in fp32, less its part in the subspace, plus what R injects there.

    Source: peft 0.21.2 `DeftLinear.forward`, `_project`.
    """
    tape, what = ops.tape, linear.name
    of_rank, rows = ops.rows.of_rank(1), ops.rows.of(linear.out_features)
    base = ops.base(linear, x)
    result = bare = ops.cast(base, _FP32, f"{what}: fp32 result")
    if linear.bias:
        bare = tape.op([result], rows, _FP32, passes=True)
    wide = ops.cast(x, _FP32, f"{what}: own copy of the input")
    directions = ops.per_rank(linear.out_features)
    projected = right = ops.cast(parameter(ops, directions), _FP32)
    if by_qr:
        copies = [ops.per_rank(_FP32 * linear.out_features)] * 3
        right = projected = tape.op(
            [right], directions, _FP32, saves_result=True, inner_backward=copies, what=f"{what}: Q"
        )
    else:
        right = tape.op([right], directions, _FP32, saves_result=True, what=f"{what}: relu(P)")
    within = product(ops, bare, right, of_rank, f"{what}: result·relu(P)")
    removed = product(ops, within, uncached(ops, projected), rows, f"{what}: removed")
    result = _less(ops, result, removed)
    held = [base, bare, wide, right, projected, removed, x]
    if injects:
        stored = ops.cast(parameter(ops, ops.per_rank(linear.in_features)), _FP32)
        injection = ops.scale(stored)
        inputs = dropped(ops, wide)
        inner = product(ops, inputs, injection, of_rank, f"{what}: R·x")
        update = product(ops, inner, uncached(ops, projected), rows, f"{what}: P·R·x")
        result = ops.add(result, update, f"{what}: result")
        held += [stored, injection, inputs]
    result = ops.cast(result, x.size)
    tape.hold(*held)
    return result


def _less(ops: OpEmitter, x: Tensor, y: Tensor) -> Tensor:
    """`x - y`: the gradient of `y` is made negative in the width of `x` first."""
    if y.size == x.size:
        return ops.add(x, ops.tape.view(y, copies_gradient=True))
    return ops.tape.op([x, y], x.elements, x.size, passes=True, inner_backward=[x.form])


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, injects: bool = True, by_qr: bool = False
) -> AdapterWork:
    """Two narrow products of the result, and two of the input.

    Kind: exact; the QR decomposition takes about 2 out_features r^2 operations.
    Source: operators of `DeftLinear.forward`.
    """
    wide, tall = linear.in_features, linear.out_features
    products = 2 * r * (2 * tall + injects * (wide + tall))
    params = r * (tall + wide * injects)
    return AdapterWork(
        **counted(linear, params, forward_flops=products, backward_flops=2 * products),
        weight_flops=linear.count * by_qr * 2 * tall * r * r,
        backward_weight_flops=linear.count * by_qr * 4 * tall * r * r,
    )


def refuses(linear: Linear, quant: str, *, r: int = 1) -> str:
    """Source: peft 0.21.2 `DeftLayer.update_layer`, `reset_deft_parameters`."""
    if linear.is_stored_in(quant):
        return f"PEFT starts R from the stored weight, which is none in {quant}; use quant none"
    if r > linear.out_features:
        return f"r must not be above out_features, {linear.out_features}, got {r}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    injects = not _PARA.of(run.method_options)
    by_qr = _PROJECTOR.of(run.method_options) == "qr"
    return {
        "adapter_shapes": partial(adapter_shapes, injects=injects),
        "forward": partial(forward, injects=injects, by_qr=by_qr),
        "work": partial(work, injects=injects, by_qr=by_qr),
        "refuses": partial(refuses, r=run.r),
    }


_FIELDS = PeftFields(r="r", dropout="deft_dropout", options=_OPTIONS)

METHOD = Method(
    name="deft",
    summary="a trained subspace of each result, removed and injected anew",
    peft_class="peft.DeftConfig",
    peft_defaults=(("r", 8), ("deft_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="deft_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
    merging=lambda base_bytes: 4 + base_bytes,
)
