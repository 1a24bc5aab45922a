"""TinyLoRA: a few trained numbers choose a small matrix between a weight's singular vectors.

arXiv:2602.04118; peft 0.21.2 `tuners/tinylora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    FrozenTensor,
    Method,
    SharedTensor,
    no_shapes,
)
from whichlora.methods.operators import counted, dropped, parameter, product, uncached
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, ceil_div, smallest
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.linear_form import LinearForm
    from whichlora.symbolic.operators import OpEmitter

_NUMBERS = Option(name="u", summary="trained numbers of each group of layers", default=64)
_TYING = Option(
    name="weight_tying",
    summary="0: each layer has its own numbers, 1: all have the same",
    default=0.0,
)
_OPTIONS = (_NUMBERS, _TYING)
_FP32 = 4


def _rank(linear: Linear, r: Count) -> Count:
    """Source: peft 0.21.2 `TinyLoraLayer._init_svd`."""
    return smallest(r, linear.in_features, linear.out_features)


def _groups(number: int, tying: float) -> int:
    """Groups of `number` targets in a row that have one vector.

    Kind: exact. Source: peft 0.21.2 `TinyLoraModel._create_and_replace`.
    """
    asked = max(1, round(number * (1.0 - tying)))
    return min(asked, int(ceil_div(number, max(1, number // asked))))


def adapter_shapes(
    linear: Linear, r: Count, *, numbers: int = 64, tying: float = 0.0
) -> tuple[tuple[Count, Count], ...]:
    """One vector, unless layers share it. Kind: exact."""
    return () if tying else ((1 + 0 * r, numbers),)


def shared_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, numbers: int = 64, tying: float = 0.0
) -> tuple[SharedTensor, ...]:
    """A vector for each group of targets. Kind: exact."""
    number = sum(count * linear.count for linear, count in linears)
    if not tying or not number:
        return ()
    vector = SharedTensor(
        name="tinylora_v", dims="u", rows=1 + 0 * r, width=numbers, count=_groups(number, tying)
    )
    return (vector,)


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, numbers: int = 64
) -> tuple[FrozenTensor, ...]:
    """Scaled singular vectors, and a random matrix for each trained number. Kind: exact."""
    tensors = []
    for linear, count in linears:
        rank, name = _rank(linear, r), linear.name
        for part, dims, rows, width in (
            ("A", "r, in_features", rank, linear.in_features),
            ("B", "out_features, r", linear.out_features, rank),
            ("P", "u, r, r", numbers * rank, rank),
        ):
            tensors.append(
                FrozenTensor(
                    name=f"{name}: tinylora_{part}",
                    dims=dims,
                    rows=rows,
                    width=width,
                    count=count * linear.count,
                )
            )
    return tuple(tensors)


def forward(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    r: int = 16,
    numbers: int = 64,
    tying: float = 0.0,
) -> Tensor:
    """The result plus B·R·A·x, R being the sum of random matrices times the trained numbers.

    Source: peft 0.21.2 `tinylora.Linear.forward`, `_compute_R`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    rank = int(_rank(linear, r))
    result = ops.base(linear, x)
    elements = ops.constant(numbers)
    if tying:
        stored = tape.shared_weight("tinylora_v", elements, dtypes.adapter_bytes)
    else:
        stored = parameter(ops, elements)
    # `bmm` within `einsum` reads views of both, whose casts nobody caches
    matrices = _frozen(ops, ops.constant(numbers * rank * rank))
    mixed = product(ops, uncached(ops, stored), matrices, ops.constant(rank * rank), f"{what}: R")
    inputs = dropped(ops, x)
    wide = ops.cast(inputs, dtypes.adapter_bytes, f"{what}: own copy of the input")
    narrow = ops.rows.of(rank)
    a, b = (
        # a product with the rank for a side is bound by the bytes that it reads
        _frozen(ops, ops.per_rank(n) if rank == r else ops.constant(rank * n))
        for n in (linear.in_features, linear.out_features)
    )
    inner = product(ops, wide, a, narrow, f"{what}: A·x")
    turned = product(ops, inner, mixed, narrow, f"{what}: R·A·x")
    delta = product(ops, turned, b, ops.rows.of(linear.out_features), f"{what}: update")
    result = ops.add(result, delta, f"{what}: result")
    tape.hold(mixed, wide, turned, delta, x)
    return ops.cast(result, x.size)


def _frozen(ops: OpEmitter, elements: LinearForm) -> Tensor:
    return parameter(ops, elements, trained=False)


def start_bytes(linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count) -> int:
    """The fp32 weight, its singular vectors, and what LAPACK overwrites: one target after another.

    Kind: lower bound: workspaces of cuSOLVER are left out. Source: `TinyLoraLayer._init_svd`.
    """
    return max((_decomposed_bytes(linear) for linear, _ in linears), default=0)


def _decomposed_bytes(linear: Linear) -> int:
    widths = linear.in_features, linear.out_features
    return _FP32 * (2 * widths[0] * widths[1] + min(widths) * sum(widths))


def work(
    linear: Linear,
    dtypes: Dtypes,
    r: Count,
    *,
    numbers: int = 64,
    tying: float = 0.0,
) -> AdapterWork:
    """LoRA's products and a small one, without gradients of A and B, and one that mixes R."""
    rank = _rank(linear, r)
    both = linear.in_features + linear.out_features
    per_token = 2 * rank * (both + rank)
    own = 0 * r if tying else numbers + 0 * r
    return AdapterWork(
        **counted(
            linear,
            own,
            forward_flops=per_token,
            backward_flops=per_token + 2 * rank * rank,
        ),
        weight_flops=linear.count * 2 * numbers * rank * rank,
        backward_weight_flops=linear.count * 2 * numbers * rank * rank,
    )


def refuses(linear: Linear, quant: str, *, tying: float = 0.0) -> str:
    """Source: peft 0.21.2 `TinyLoraLayer._init_svd`, which reads the weight as it is stored."""
    if not 0 <= tying <= 1:
        return f"weight_tying is from 0 to 1, got {tying:g}"
    if linear.is_stored_in(quant):
        return f"its singular vectors are those of weights that are not quantised, not {quant}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    numbers = _NUMBERS.whole(run.method_options)
    tying = _TYING.number(run.method_options)
    sizes: dict[str, Any] = {"numbers": numbers, "tying": tying}
    return {
        "adapter_shapes": partial(adapter_shapes, **sizes),
        "shared_tensors": partial(shared_tensors, **sizes),
        "frozen_tensors": partial(frozen_tensors, numbers=numbers),
        "forward": partial(forward, r=run.r, **sizes),
        "work": partial(work, **sizes),
        "refuses": partial(refuses, tying=tying),
    }


_FIELDS = PeftFields(r="r", dropout="tinylora_dropout", options=_OPTIONS)

METHOD = Method(
    name="tinylora",
    summary="a few numbers between each weight's singular vectors",
    peft_class="peft.TinyLoraConfig",
    peft_defaults=(("r", 2), ("tinylora_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="tinylora_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    shared_tensors=shared_tensors,
    forward=forward,
    work=work,
    start_bytes=start_bytes,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
