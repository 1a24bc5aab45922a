"""VB-LoRA: LoRA's matrices are put together from vectors of one bank that all layers share.

Li et al. 2024, arXiv:2405.15179; peft 0.21.2 `tuners/vblora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    Method,
    SharedTensor,
    no_shapes,
)
from whichlora.methods.operators import counted, parameter, with_low_rank
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_VECTORS = Option(name="num_vectors", summary="vectors of the bank", default=256)
_LENGTH = Option(name="vector_length", summary="of each; it divides all widths", default=256)
_TOPK = Option(name="topk", summary="vectors that one part of a matrix is mixed of", default=2)
_OPTIONS = (
    _VECTORS,
    _LENGTH,
    _TOPK,
    Option(name="init_vector_bank_bound", summary="bound of the bank's first values", default=0.02),
    Option(name="init_logits_std", summary="deviation of the logits' first values", default=0.1),
)
_INDEX = 8


def adapter_shapes(
    linear: Linear, r: Count, *, vectors: int = 256, length: int = 256
) -> tuple[tuple[Count, Count], ...]:
    """A logit of each vector for each part of A and of B. Kind: exact."""
    return (
        (r * (linear.in_features // length), vectors),
        (r * (linear.out_features // length), vectors),
    )


def shared_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, vectors: int = 256, length: int = 256
) -> tuple[SharedTensor, ...]:
    """The bank. Kind: exact."""
    if not linears:
        return ()
    bank = SharedTensor(
        name="vblora_vector_bank",
        dims="num_vectors, vector_length",
        rows=vectors + 0 * r,
        width=length,
    )
    return (bank,)


def forward(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    vectors: int = 256,
    length: int = 256,
    topk: int = 2,
) -> Tensor:
    """The result plus B·A·x, both matrices being made anew.

    Source: peft 0.21.2 `vblora.Linear.forward`, `_get_low_rank_matrix`.
    """
    tape, what = ops.tape, linear.name
    result = ops.base(linear, x)
    bank = tape.shared_weight(
        "vblora_vector_bank", ops.constant(vectors * length), ops.dtypes.adapter_bytes
    )
    sizes: dict[str, Any] = {"vectors": vectors, "length": length, "topk": topk}
    a = _matrix(ops, bank, linear.in_features, f"{what}: A", **sizes)
    mixed = _matrix(ops, bank, linear.out_features, f"{what}: B", **sizes)
    b = tape.op([mixed], mixed.elements, mixed.size)  # laid out anew, [out_features, r]
    return with_low_rank(ops, linear, x, result, a, b)


def _matrix(
    ops: OpEmitter, bank: Tensor, width: int, what: str, *, vectors: int, length: int, topk: int
) -> Tensor:
    """Each part a sum of `topk` vectors, weighted by the softmax of their logits."""
    tape, parts = ops.tape, width // length
    logits = parameter(ops, ops.per_rank(parts * vectors))
    chosen = ops.per_rank(parts * topk)
    indices = ops.per_rank(parts * topk * _INDEX)
    largest = tape.op([logits], chosen, logits.size, keeps=[indices], what=f"{what}: indices")
    weights = ops.softmax(largest)
    gathered = tape.op([bank], ops.per_rank(topk * width), bank.size)
    of_gathered = ops.per_rank(topk * width * bank.size)
    # the sum's gradient is a view of all parts; each factor of the product gets one as large
    matrix = tape.op(
        [weights, gathered],
        ops.per_rank(width),
        bank.size,
        saves=[weights, gathered],
        inner=of_gathered,
        inner_backward=of_gathered,
        what=f"{what}: gathered vectors",
    )
    tape.hold(largest, weights)
    return matrix


def work(
    linear: Linear,
    dtypes: Dtypes,
    r: Count,
    *,
    vectors: int = 256,
    length: int = 256,
    topk: int = 2,
) -> AdapterWork:
    """LoRA's products, and both matrices as weighted sums of `topk` vectors in each forward."""
    both = linear.in_features + linear.out_features
    params = r * both // length * vectors
    return AdapterWork(
        **counted(linear, params, forward_flops=2 * r * both, backward_flops=4 * r * both),
        weight_flops=linear.count * 2 * topk * r * both,
        backward_weight_flops=linear.count * 4 * topk * r * both,
    )


def refuses(
    linear: Linear, quant: str, *, vectors: int = 256, length: int = 256, topk: int = 2
) -> str:
    """Source: peft 0.21.2 `VBLoRALayer.update_layer`; torch 2.13 `topk`."""
    for width in (linear.in_features, linear.out_features):
        if width % length:
            return f"vector_length must divide {width}, got {length}; use one that does"
    if topk > vectors:
        return f"topk is above num_vectors, {vectors}, got {topk}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    vectors, length, topk = (
        option.whole(run.method_options) for option in (_VECTORS, _LENGTH, _TOPK)
    )
    sizes: dict[str, Any] = {"vectors": vectors, "length": length}
    return {
        "adapter_shapes": partial(adapter_shapes, **sizes),
        "shared_tensors": partial(shared_tensors, **sizes),
        "forward": partial(forward, **sizes, topk=topk),
        "work": partial(work, **sizes, topk=topk),
        "refuses": partial(refuses, **sizes, topk=topk),
    }


# a file of the largest weights alone is smaller than what is trained
_FIELDS = PeftFields(
    r="r", dropout="vblora_dropout", options=_OPTIONS, plain={"save_only_topk_weights": (False,)}
)

METHOD = Method(
    name="vblora",
    summary="LoRA's matrices put together from a bank of vectors",
    peft_class="peft.VBLoRAConfig",
    peft_defaults=(("r", 4), ("vblora_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="vblora_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    shared_tensors=shared_tensors,
    forward=forward,
    work=work,
    learning_rate=5e-4,
    rate_source=PEFT_COMPARISON,
)
