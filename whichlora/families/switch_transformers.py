"""Switch Transformers: T5 whose every few layers have experts, one of them for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.seq2seq import T5_KEYS, t5_attention, t5_layer, t5_mlp, t5_model
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, Linear, Moe

DEFAULTS: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        "vocab_size": 32128,
        "hidden_size": 768,
        "d_kv": 64,
        "intermediate_size": 2048,
        "expert_capacity": 64,
        "num_hidden_layers": 12,
        "num_decoder_layers": 12,
        "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 3,
        "num_attention_heads": 12,
        "num_experts": 8,
        "router_jitter_noise": 0.01,
        "relative_attention_num_buckets": 32,
        "dense_act_fn": "relu",
        "tie_word_embeddings": True,
        "dropout_rate": 0.1,
    }
}
SYNONYMS = {"switch_transformers": T5_KEYS}


def _has_experts(number: int, num_layers: int, num_sparse: int) -> bool:
    """Whether layer `number` of a stack has them.

    Source: transformers 5.23 `SwitchTransformersStack.__init__`; `__post_init__` of the config,
    where none of several layers makes one.
    """
    step = num_layers // num_sparse if num_sparse else num_layers
    return step == 1 or (step > 0 and number % step == 1)


def _switch(c: Fields) -> ModelSpec:
    hidden, num_experts = c.size("hidden_size"), c.size("num_experts")
    if not c.flag("tie_word_embeddings"):
        raise ConfigError(
            f"{c.name}: tie_word_embeddings is false, so each stack has a table of tokens that "
            "nobody predicts; use --engine trace"
        )
    dense = t5_mlp(c, activation=c.text("dense_act_fn"), gated=False)
    into, out = dense.linears
    dense = replace(dense, linears=(into, replace(out, casts_input=True)))
    each = (replace(linear, count=num_experts) for linear in dense.linears)
    experts = Moe(
        num_experts=num_experts,
        experts_per_token=1,
        expert=replace(dense, linears=tuple(each)),
        router=Linear(
            name="classifier",
            in_features=hidden,
            out_features=num_experts,
            reads="mlp_in",
            bias=c.flag("router_bias"),
        ),
        routing="largest",
        one_by_one=True,
        capacity=c.size("expert_capacity"),
        jitters=(c.number_or_none("router_jitter_noise") or 0) > 0,
    )
    num_encoder = c.layers()
    num_decoder = c.layers("num_decoder_layers", fallback=num_encoder)

    def layer(number: int, decodes: bool) -> Layer:
        own = t5_attention(
            c, causal=decodes, biased=number == 0, sdpa="eager", masks_keys=not decodes
        )
        blocks = (own, t5_attention(c, cross=True, sdpa="eager")) if decodes else (own,)
        sparse = (
            (num_decoder, c.count("num_sparse_decoder_layers"))
            if decodes
            else (num_encoder, c.count("num_sparse_encoder_layers"))
        )
        if _has_experts(number, *sparse):
            return t5_layer(c, *blocks, moe=experts)
        return t5_layer(c, *blocks, mlp=dense)

    return t5_model(c, layer)


BUILDERS = {"switch_transformers": _switch}
