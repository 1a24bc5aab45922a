"""GraLoRA: LoRA over a grid of blocks, each with its own share of the rank.

Jung et al. 2025, arXiv:2505.20355; peft 0.21.2 `tuners/gralora`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import LORA_SETTINGS, Method, no_shapes
from whichlora.methods.operators import dropped, parameter, product, uncached, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_BLOCKS = Option(name="gralora_k", summary="blocks along inputs and outputs", default=2)
_OPTIONS = (_BLOCKS,)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A and B of all blocks: as many parameters as LoRA. Kind: exact."""
    return (linear.in_features, r), (r, linear.out_features)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, blocks: int = 2) -> Tensor:
    """The result, to which products of blocks are added in place.

    Source: peft 0.21.2 `gralora.Linear.forward`; torch 2.13 `einsum`, which runs `bmm`.
    """
    tape, what = ops.tape, linear.name
    result = ops.base(linear, x)
    # `bmm` within `einsum` reads views of the parameters, whose casts nobody caches
    a, b = (
        uncached(ops, parameter(ops, ops.per_rank(width)))
        for width in (linear.in_features, linear.out_features)
    )
    wide = widened(ops, linear, x)
    inputs = dropped(ops, wide)
    inner = product(ops, inputs, a, ops.rows.of_rank(blocks), f"{what}: A·x")
    arranged = tape.op([inner], ops.rows.of_rank(blocks), inner.size)
    update = product(ops, arranged, b, ops.rows.of(linear.out_features), f"{what}: B·A·x")
    laid_out = tape.op([update], update.elements, update.size)
    added = ops.scale(ops.cast(laid_out, result.size))
    tape.hold(laid_out)
    result = tape.in_place(result, added)
    tape.hold(x)
    return ops.cast(result, x.size)


def refuses(linear: Linear, quant: str, *, rank: int = 16, blocks: int = 2) -> str:
    """Source: peft 0.21.2 `GraloraLayer.update_layer`, `GraloraModel._create_new_module`."""
    for width in (linear.in_features, linear.out_features):
        if width % blocks:
            return f"gralora_k must divide {width}, got {blocks}"
    if rank % blocks:
        return f"gralora_k must divide r, {rank}, got {blocks}"
    if linear.is_stored_in(quant):
        return f"its update is predicted beside weights that are not quantised, not {quant}"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    blocks = _BLOCKS.whole(run.method_options)
    return {
        "forward": partial(forward, blocks=blocks),
        "refuses": partial(refuses, rank=run.r, blocks=blocks),
    }


_FIELDS = PeftFields(
    r="r", alpha="alpha", dropout="gralora_dropout", options=_OPTIONS, plain={"hybrid_r": (0,)}
)

METHOD = Method(
    name="gralora",
    summary="LoRA over a grid of blocks",
    peft_class="peft.GraloraConfig",
    peft_defaults=(("r", 32), ("alpha", 64), ("gralora_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="gralora_",
    ignores=LORA_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
)
