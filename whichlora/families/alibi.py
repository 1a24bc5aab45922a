"""BLOOM, Falcon and MPT: fused projections, ALiBi or rotary positions, multi-query variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.families.blocks import causal_lm, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, Linear

DEFAULTS: dict[str, dict[str, Any]] = {
    "bloom": {
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "activation": "gelu",
        "tie_word_embeddings": True,
    },
    "mpt": {
        "vocab_size": 50368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
}
SYNONYMS = {
    "bloom": {
        "hidden_size": ("n_embed",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("seq_length",),
    },
    "falcon": {"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",)},
    "mpt": {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "max_position_embeddings": ("max_seq_len",),
    },
}
_HIDDEN_NORMS = ("input_layernorm", "post_attention_layernorm")
_MLP_NAMES = ("dense_h_to_4h", "dense_4h_to_h")


def _bloom(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        names=("query_key_value",),
        out_name="dense",
        qkv_bias=True,
        out_bias=True,
        position="alibi",
        sdpa="eager",
        flash=False,
        eager="named",
        dropout=c.probability("attention_dropout"),
    )
    block = mlp(
        hidden=hidden, width=4 * hidden, activation="bloom_gelu", names=_MLP_NAMES, bias=True
    )
    layer = Layer(
        attentions=(attention,),
        mlp=block,
        norms=norms(_HIDDEN_NORMS, width=hidden, kind="layer", bias=True),
        returns_probabilities=True,
        dropouts=(hidden,) * 2 if c.probability("hidden_dropout") else (),
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("ln_f",), width=hidden, kind="layer", bias=True),
        embedding_name="word_embeddings",
        embedding_norms=norms(
            ("word_embeddings_layernorm",), width=hidden, kind="layer", bias=True
        ),
    )


def _falcon(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    head_dim, bias = hidden // heads, c.flag("bias")
    new = c.flag("new_decoder_architecture")
    parallel = new or c.flag("parallel_attn")
    # `multi_query` counts in the first architecture only; transformers fills num_kv_heads with
    # the number of heads there and ignores it.
    if new:
        kv_heads = c.size("num_kv_heads", fallback=heads)
    else:
        kv_heads = 1 if c.flag("multi_query") else heads
    position: Literal["alibi", "rope"] = "alibi" if c.flag("alibi") else "rope"
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        names=("query_key_value",),
        out_name="dense",
        qkv_bias=bias,
        out_bias=bias,
        position=position,
        rotary_dim=head_dim if position == "rope" else 0,
        # FalconAttention copies grouped keys and values to every head before it caches them.
        cache_elements=2 * hidden if new else 2 * kv_heads * head_dim,
        projection="copied" if new else "copied_keys" if kv_heads < heads else "plain",
        flash=position != "alibi",
        always_masked=True,
        # The old architecture hands SDPA one key head to broadcast: no fused kernel takes that.
        sdpa="math" if not new and kv_heads < heads else "fused",
        dropout=c.probability("attention_dropout"),
        wide_softmax=False,
        eager="beside_sum",
    )
    two_norms = new and c.get("num_ln_in_parallel_attn") in (None, 2)
    if two_norms:
        names: tuple[str, ...] = ("ln_attn", "ln_mlp")
    else:
        names = ("input_layernorm",) if parallel else _HIDDEN_NORMS
    block = mlp(
        hidden=hidden,
        width=c.size("ffn_hidden_size", fallback=4 * hidden),
        activation=c.text("activation"),
        names=_MLP_NAMES,
        bias=bias,
        reads="attn_in" if len(names) == 1 else "mlp_in",
    )
    layer = Layer(
        attentions=(replace(attention, linears=_of_falcon(attention.linears)),),
        mlp=replace(block, linears=_of_falcon(block.linears)),
        norms=norms(names, width=hidden, kind="layer", bias=True),
        parallel=parallel,
        dropouts=(hidden,) * (1 if parallel else 2) if c.probability("hidden_dropout") else (),
        returns_probabilities=True,
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("ln_f",), width=hidden, kind="layer", bias=True),
        embedding_name="word_embeddings",
    )


def _of_falcon(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Falcon's own `FalconLinear`."""
    return tuple(replace(linear, is_subclass=True) for linear in linears)


def _mpt(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kind = c.part("attn_config", defaults={"attn_type": "multihead_attention"}).get("attn_type")
    if kind != "multihead_attention":
        raise ConfigError(f"{c.name}: attn_type is {kind!r}; MPT has multihead_attention only")
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        names=("Wqkv",),
        out_name="out_proj",
        position="alibi",
        sdpa="eager",
        flash=False,
    )
    block = mlp(
        hidden=hidden,
        width=4 * hidden,  # whatever its expansion_ratio: transformers `MptMLP`
        activation="gelu",
        names=("up_proj", "down_proj"),
    )
    layer = Layer(
        attentions=(attention,),
        mlp=block,
        norms=norms(("norm_1", "norm_2"), width=hidden, kind="layer"),
        returns_probabilities=True,
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("norm_f",), width=hidden, kind="layer"),
        embedding_name="wte",
    )


DROPOUT_MODULES = {"bloom": ("attention_dropout",), "falcon": ("attention_dropout",)}
BUILDERS = {"bloom": _bloom, "falcon": _falcon, "mpt": _mpt}
