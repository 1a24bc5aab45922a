"""LFM2: short convolutions with an attention layer now and then, also with experts."""

from __future__ import annotations

from typing import Any

from whichlora.families.blocks import (
    FeedForward,
    causal_lm,
    mlp,
    moe,
    norms,
    numbered_layers,
    softmax_attention,
)
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Linear, Norm
from whichlora.spec.numeric import round_up

DEFAULTS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}
SYNONYMS = {
    "lfm2": {
        "intermediate_size": ("block_ff_dim",),
        "tie_word_embeddings": ("tie_embedding",),
    },
    "lfm2_moe": {"tie_word_embeddings": ("tie_embedding",)},
}


def _width(c: Fields) -> int:
    """The MLP's width; as in `Lfm2MLP`, the number in the file may be one to be adjusted."""
    width = c.size("intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim"):
        return width
    multiple = c.size("block_multiple_of")
    width = int((c.number_or_none("block_ffn_dim_multiplier") or 1.0) * (2 * width // 3))
    return int(round_up(width, multiple))


def _convolution(c: Fields) -> Attention:
    hidden, kernel, bias = c.size("hidden_size"), c.size("conv_L_cache"), c.flag("conv_bias")
    return Attention(
        kind="conv",
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=hidden,
        v_head_dim=hidden,
        linears=(
            Linear(
                name="in_proj",
                in_features=hidden,
                out_features=3 * hidden,
                reads="attn_in",
                bias=bias,
            ),
            Linear(
                name="out_proj",
                in_features=hidden,
                out_features=hidden,
                reads="attn_out",
                bias=bias,
            ),
        ),
        position="none",
        state_elements=hidden * kernel,
        conv_kernel=kernel,
        other_params=hidden * (kernel + int(bias)),  # the depthwise kernel
    )


def _feed_forward(c: Fields) -> FeedForward:
    """One MLP everywhere; with experts, only in the first `num_dense_layers`."""
    hidden, names = c.size("hidden_size"), ("w1", "w3", "w2")
    if c.text("model_type") == "lfm2":
        block = mlp(hidden=hidden, width=_width(c), activation="silu", names=names)
        return lambda _: (block, None)
    dense = mlp(hidden=hidden, width=c.size("intermediate_size"), activation="silu", names=names)
    sparse = moe(
        hidden=hidden,
        width=c.size("moe_intermediate_size"),
        activation="silu",
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        routing="sigmoid_narrow",
    )
    first = c.count("num_dense_layers")
    return lambda number: (dense, None) if number < first else (None, sparse)


def _lfm2(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", fallback=heads)
    head_dim = c.size("head_dim", fallback=hidden // heads)
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        out_name="out_proj",
        norms=(
            Norm(name="q_layernorm", kind="rms", width=head_dim, rows=heads),
            Norm(name="k_layernorm", kind="rms", width=head_dim, rows=kv_heads),
        ),
        rotary_dim=head_dim,
    )
    convolution = _convolution(c)
    count = c.layers()
    types = c.items("layer_types", length=count)
    if types is None:
        full = c.indices("full_attn_idxs") if c.get("full_attn_idxs") is not None else range(count)
        types = ["full_attention" if i in full else "conv" for i in range(count)]
    layers = numbered_layers(
        c,
        lambda number: attention if types[number] == "full_attention" else convolution,
        _feed_forward(c),
        norms=norms(("operator_norm", "ffn_norm"), width=hidden, kind="rms"),
    )
    return causal_lm(c, layers, final_norms=norms(("embedding_norm",), width=hidden, kind="rms"))


BUILDERS = {"lfm2": _lfm2, "lfm2_moe": _lfm2}
