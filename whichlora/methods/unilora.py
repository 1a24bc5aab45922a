"""Uni-LoRA: all entries of LoRA's matrices are read from one short trained vector.

Li et al. 2025, arXiv:2506.00799; peft 0.21.2 `tuners/unilora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    SharedTensor,
    no_shapes,
)
from whichlora.methods.operators import counted, with_low_rank
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_LENGTH = Option(name="theta_d_length", summary="numbers that are trained", default=256)
_OPTIONS = (
    _LENGTH,
    Option(name="init_theta_d_bound", summary="bound of their first values", default=0.02),
)
_INDEX = 8


def shared_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, length: int = 256
) -> tuple[SharedTensor, ...]:
    """The vector: all that is trained. Kind: exact."""
    if not linears:
        return ()
    name = "unilora_theta_d"
    return (SharedTensor(name=name, dims="theta_d_length", rows=1 + 0 * r, width=length),)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """An index and a factor of each entry of A and B.

    Kind: exact. Source: peft 0.21.2 `UniLoraLayer.reset_unilora_parameters`, `update_scaling`.
    """
    tensors = []
    for linear, count in linears:
        sides = {"A": linear.in_features, "B": linear.out_features}
        for side, width in sides.items():
            for kind, element_bytes in (("indices", _INDEX), ("scales", None)):
                tensors.append(
                    FrozenTensor(
                        name=f"{linear.name}: {kind}_{side}",
                        dims="r, width",
                        rows=r,
                        width=width,
                        count=count * linear.count,
                        element_bytes=element_bytes,
                    )
                )
    return tuple(tensors)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, length: int = 256) -> Tensor:
    """The result plus B·A·x, both matrices being looked up and scaled anew.

    Source: peft 0.21.2 `unilora.Linear.forward`, `_get_lora_matrices`.
    """
    result = ops.base(linear, x)
    theta = ops.tape.shared_weight(
        "unilora_theta_d", ops.constant(length), ops.dtypes.adapter_bytes
    )
    a = _matrix(ops, theta, linear.in_features)
    b = _matrix(ops, theta, linear.out_features)
    return with_low_rank(ops, linear, x, result, a, b)


def _matrix(ops: OpEmitter, theta: Tensor, width: int) -> Tensor:
    elements = ops.per_rank(width)
    looked_up = ops.tape.op([theta], elements, theta.size)
    return ops.tape.op([looked_up], elements, theta.size)  # times frozen factors


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """LoRA's products, and one operation for each number of both matrices, which is scaled."""
    both = linear.in_features + linear.out_features
    return AdapterWork(
        **counted(linear, 0 * r, forward_flops=2 * r * both, backward_flops=4 * r * both),
        weight_flops=linear.count * r * both,
        backward_weight_flops=linear.count * 2 * r * both,
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `UniLoraLayer.update_scaling`: factors take the base's dtype."""
    if linear.is_stored_in(quant):
        return f"its factors take the dtype of the weight, which {quant} makes whole numbers"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    length = _LENGTH.whole(run.method_options)
    return {
        "shared_tensors": partial(shared_tensors, length=length),
        "forward": partial(forward, length=length),
    }


_FIELDS = PeftFields(r="r", dropout="unilora_dropout", options=_OPTIONS)

METHOD = Method(
    name="unilora",
    summary="LoRA's matrices looked up in one trained vector",
    peft_class="peft.UniLoraConfig",
    peft_defaults=(("r", 4), ("unilora_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="unilora_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    shared_tensors=shared_tensors,
    forward=forward,
    work=work,
)
