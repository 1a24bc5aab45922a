"""Super-Tuning: the largest elements of each weight are trained, with `r` LoRA beside them (Supra).

Source: peft 0.21.2 `tuners/supertuning`, which names arXiv:2607.09287.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    adapted_modules,
    read_options,
    stated_options,
)
from whichlora.methods.operators import counted, dropped, parameter, product
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_SPARSITY = Option(name="sparsity", summary="share of elements that stay frozen", default=0.99)
_SUPRA = Option(
    name="r", summary="rank of LoRA beside the elements; none if left out", default=None
)
_OPTIONS = (_SPARSITY, _SUPRA)
_INDEX = 8  # bytes of one index as `scatter_add` reads it; stored it has 4


def _chosen(linear: Linear, sparsity: float) -> int:
    """Trained elements of one weight. Source: `SupertuningLayer._num_trainable`."""
    return int(linear.in_features * linear.out_features * (1 - sparsity))


def adapter_shapes(
    linear: Linear, r: Count, *, sparsity: float = 0.99, rank: int = 0
) -> tuple[tuple[Count, Count], ...]:
    """One vector; of Supra A and B, too. Kind: exact."""
    chosen = ((1 + 0 * r, _chosen(linear, sparsity)),)
    return chosen + autocast_shapes(linear, r, rank=rank)


def autocast_shapes(linear: Linear, r: Count, *, rank: int = 0) -> tuple[tuple[Count, Count], ...]:
    """A and B of Supra. The elements are cast as no leaf is."""
    return ((rank + 0 * r, linear.in_features), (linear.out_features, rank)) if rank else ()


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, sparsity: float = 0.99
) -> tuple[FrozenTensor, ...]:
    """Where the elements are: one 32-bit index of each. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: indices",
            dims="(1 - sparsity) in_features out_features",
            rows=1 + 0 * r,
            width=_chosen(linear, sparsity),
            count=count * linear.count,
            element_bytes=4,
        )
        for linear, count in linears
    )


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, sparsity: float = 0.99, rank: int = 0
) -> Tensor:
    """A product with a copy of the weight to which the elements are added, in place of the base's.

    Source: peft 0.21.2 `supertuning.Linear.forward`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    rows, chosen = ops.rows.of(linear.out_features), ops.constant(_chosen(linear, sparsity))
    dense = ops.constant(linear.in_features * linear.out_features)
    stored = parameter(ops, chosen)
    values = ops.cast(stored, dtypes.base_bytes)
    indices = tape.op([], chosen, _INDEX, what=f"{what}: indices")
    weight = tape.op(
        [values, indices],
        dense,
        dtypes.base_bytes,
        saves=[indices],
        what=f"{what}: where the elements are",
    )
    result = product(ops, x, weight, rows, f"{what}: changed weight")
    held = [values, indices, weight, x]
    if rank:
        a, b = (
            parameter(ops, ops.constant(rank * width))
            for width in (linear.in_features, linear.out_features)
        )
        inputs = ops.cast(dropped(ops, x), dtypes.adapter_bytes)
        inner = product(ops, inputs, a, ops.rows.of(rank), f"{what}: A·x")
        outer = product(ops, inner, b, rows, f"{what}: B·A·x")
        update = ops.cast(ops.scale(outer), result.size)
        result = ops.add(result, update, f"{what}: result")
        held += [inputs, outer]
    tape.hold(*held)
    return result


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, sparsity: float = 0.99, rank: int = 0
) -> AdapterWork:
    """The gradient of the changed weight, and two narrow products where there are A and B."""
    wide, tall = linear.in_features, linear.out_features
    num_weights, chosen = wide * tall, _chosen(linear, sparsity)
    low_rank = 2 * rank * (wide + tall)
    return AdapterWork(
        wide=False,
        **counted(
            linear,
            chosen + rank * (wide + tall),
            forward_flops=low_rank,
            backward_flops=2 * num_weights + 2 * low_rank,
        ),
    )


def start_bytes(
    linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count, *, sparsity: float = 0.99
) -> Count:
    """Magnitudes of the largest weight, and the largest of them with their 64-bit places.

    Source: `SupertuningLayer.update_layer`; what `topk` sorts in is left out.
    """
    return max(
        (
            linear.in_features * linear.out_features * dtypes.base_bytes
            + _chosen(linear, sparsity) * (dtypes.base_bytes + _INDEX)
            for linear, _ in linears
        ),
        default=0,
    )


def refuses(linear: Linear, quant: str, *, sparsity: float = 0.99) -> str:
    """Source: peft 0.21.2 `SupertuningModel._create_new_module`, `update_layer`."""
    if linear.is_stored_in(quant):
        return f"PEFT adds to the stored weight, which is none in {quant}; use quant none"
    if not 0 <= sparsity < 1 or not _chosen(linear, sparsity):
        return f"sparsity must be from 0 on and leave an element to train, got {sparsity}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    sparsity = _SPARSITY.number(run.method_options)
    rank = _SUPRA.whole(run.method_options)
    shape: dict[str, Any] = {"sparsity": sparsity, "rank": rank}
    fields: dict[str, Any] = {
        "adapter_shapes": partial(adapter_shapes, **shape),
        "autocast_shapes": partial(autocast_shapes, rank=rank),
        "frozen_tensors": partial(frozen_tensors, sparsity=sparsity),
        "forward": partial(forward, **shape),
        "work": partial(work, **shape),
        "start_bytes": partial(start_bytes, sparsity=sparsity),
        "refuses": partial(refuses, sparsity=sparsity),
    }
    return fields | ({"merging": lambda base_bytes: 8} if rank else {})


def peft_config(run: RunConfig) -> dict[str, Any]:
    own = stated_options(run, _OPTIONS)
    if _SUPRA.name in own:
        own |= {"lora_alpha": run.lora_alpha, "lora_dropout": run.lora_dropout}
    return own | adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    settings = read_options(config, _OPTIONS)
    if config.r is None:
        return settings
    own = {"lora_alpha": max(1, round(config.lora_alpha))}
    return own | {"lora_dropout": float(config.lora_dropout), **settings}


METHOD = Method(
    name="supertuning",
    summary="the largest elements of each weight",
    peft_class="peft.SupertuningConfig",
    peft_defaults=(("lora_dropout", 0.0),),
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="supertuning_",
    ignores=LORA_SETTINGS | {"r"},
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=autocast_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    start_bytes=start_bytes,
    merging=lambda base_bytes: 1,
)
