"""KaSA: LoRA with a trained factor per rank, on weights without their smallest directions.

Wang et al. 2024, arXiv:2412.06071; peft 0.21.2 `KasaLinearVariant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods import lora
from whichlora.methods.operators import decomposed_bytes
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A and B of LoRA, and one number per rank. Kind: exact."""
    return (*lora.low_rank_shapes(linear, r), (1 + 0 * r, r))


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """LoRA's, with A·x scaled by rank. Source: peft 0.21.2 `KasaLinearVariant.forward`."""
    return lora.around(ops, linear, x, partial(lora.added, between=_scaled))


def _scaled(ops: OpEmitter, inner: Tensor) -> Tensor:
    factors = ops.tape.weight(ops.per_rank(1), ops.dtypes.adapter_bytes, trained=True)
    return ops.multiply_rows(inner, factors, row_last=True)


def start_bytes(linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count) -> Count:
    """The largest weight decomposed, and what is made of its larger directions.

    Source: peft 0.21.2 `KasaLinearVariant._truncate_base_weight`: U times S, and the new weight.
    """
    return max((_truncated_bytes(linear, dtypes) for linear, _ in linears), default=0)


def _truncated_bytes(linear: Linear, dtypes: Dtypes) -> int:
    smaller = min(linear.in_features, linear.out_features)
    made = linear.out_features * (smaller + linear.in_features)
    return decomposed_bytes(linear, dtypes) + 4 * made


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `KasaLinearVariant.init`; `lora.bnb` has no such variant."""
    if linear.is_stored_in(quant):
        return f"PEFT's KaSA is for weights that are not quantised, not {quant}; use method qlora"
    if not linear.is_module:
        return "PEFT's KaSA is for linear layers, and for no experts in one parameter"
    return ""


def peft_config(run: RunConfig) -> dict[str, Any]:
    return lora.peft_config(run) | {"kasa_config": {}}


def read_peft(config: Any) -> Mapping[str, Any] | None:
    if config.use_dora or getattr(config, "kasa_config", None) is None:
        return None
    return lora.read_lora(config)


METHOD = replace(
    lora.METHOD,
    adapts_table=False,
    name="kasa",
    summary="LoRA with a factor per rank, on weights without their smallest directions",
    peft_config=peft_config,
    read_peft=read_peft,
    options=(),
    with_options=lambda run: {},
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=lora.low_rank_shapes,
    forward=forward,
    folded=None,
    start_bytes=start_bytes,
)
