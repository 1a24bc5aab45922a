"""LongT5: T5 whose encoder attends to neighbouring blocks, and to sums of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import norms
from whichlora.families.fields import Fields
from whichlora.families.seq2seq import (
    DEFAULTS as T5_DEFAULTS,
)
from whichlora.families.seq2seq import (
    T5_KEYS,
    projected_feed_forward,
    t5_attention,
    t5_layer,
    t5_model,
    tied_head_notes,
)
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer

DEFAULTS: dict[str, dict[str, Any]] = {
    "longt5": T5_DEFAULTS["t5"]
    | {"local_radius": 127, "global_block_size": 16, "encoder_attention_type": "local"}
}
SYNONYMS = {"longt5": T5_KEYS}


def _longt5(c: Fields) -> ModelSpec:
    hidden, kind = c.size("hidden_size"), c.text("encoder_attention_type")
    if kind not in ("local", "transient-global"):
        raise ConfigError(
            f"{c.name}: encoder_attention_type is {kind!r}, neither local nor transient-global"
        )
    block = projected_feed_forward(c)
    if not block.gated:
        *into, out = block.linears
        block = replace(block, linears=(*into, replace(out, casts_input=True)))
    in_blocks: dict[str, Any] = {"chunk_size": c.size("local_radius") + 1, "in_blocks": True}
    tables = c.size("relative_attention_num_buckets") * c.size("num_attention_heads")
    if kind == "transient-global":
        in_blocks["summed_tokens"] = c.size("global_block_size")
        in_blocks["norms"] = norms(("global_input_layer_norm",), width=hidden, kind="rms_mixed")
        tables *= 2

    def layer(number: int, decodes: bool) -> Layer:
        attention = partial(t5_attention, c, sdpa="eager")
        if not decodes:
            own = attention(other_params=0 if number else tables, **in_blocks)
            return t5_layer(c, own, mlp=block)
        own = attention(causal=True, biased=number == 0, keeps_probabilities=True)
        cross = attention(cross=True, keeps_probabilities=True)
        return replace(t5_layer(c, own, cross, mlp=block), returns_probabilities=True)

    return t5_model(c, layer, notes=tied_head_notes(c), hands_on_use_cache=True)


BUILDERS = {"longt5": _longt5}
