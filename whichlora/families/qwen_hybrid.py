"""Qwen3-Next and Qwen3.5: three gated delta nets, then one gated softmax attention."""

from __future__ import annotations

from typing import Any

from whichlora.families.blocks import causal_lm, mlp_in_every_layer, norms, numbered_layers
from whichlora.families.decoder import PRE_NORM
from whichlora.families.fields import Fields
from whichlora.families.moe import qwen_feed_forward
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Linear, Norm

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "full_attention_interval": 4,
}
_EXPERTS = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": _COMMON
    | _EXPERTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": _COMMON
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": _COMMON
    | _EXPERTS
    | {
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}


def _delta_net(c: Fields, *, fused: bool) -> Attention:
    """A gated delta net; as the kernel sees it, queries and keys are copied to every value head.

    Source: Yang et al. 2024, arXiv:2412.06464; names from `Qwen3NextGatedDeltaNet` (fused) and
    `Qwen3_5GatedDeltaNet`.
    """
    hidden, kernel = c.size("hidden_size"), c.size("linear_conv_kernel_dim")
    v_heads, v_dim = c.size("linear_num_value_heads"), c.size("linear_value_head_dim")
    k_heads, k_dim = c.size("linear_num_key_heads"), c.size("linear_key_head_dim")
    keys, values = k_heads * k_dim, v_heads * v_dim
    widths = (
        {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * v_heads}
        if fused
        else {
            "in_proj_qkv": 2 * keys + values,
            "in_proj_z": values,
            "in_proj_b": v_heads,
            "in_proj_a": v_heads,
        }
    )
    mixed = 2 * keys + values  # channels of the depthwise convolution
    return Attention(
        kind="linear",
        num_attention_heads=v_heads,
        num_key_value_heads=v_heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        linears=(
            *(
                Linear(name=name, in_features=hidden, out_features=width, reads="attn_in")
                for name, width in widths.items()
            ),
            Linear(name="out_proj", in_features=values, out_features=hidden, reads="attn_out"),
        ),
        norms=(Norm(name="norm", kind="rms", width=v_dim, rows=v_heads),),
        position="none",
        state_elements=mixed * kernel,
        recurrent_elements=v_heads * k_dim * v_dim,
        conv_kernel=kernel,
        recurrent_dtype=str(c.get("mamba_ssm_dtype") or ""),
        other_params=mixed * kernel + 2 * v_heads,  # convolution, dt_bias, A_log
    )


def _gated_attention(c: Fields) -> Attention:
    """Softmax attention whose query projection also yields a gate on the output."""
    hidden, heads, head_dim = (
        c.size("hidden_size"),
        c.size("num_attention_heads"),
        c.size("head_dim"),
    )
    kv_heads, bias = c.size("num_key_value_heads", fallback=heads), c.flag("attention_bias")
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        linears=(
            *(
                Linear(
                    name=name, in_features=hidden, out_features=width, reads="attn_in", bias=bias
                )
                for name, width in (
                    ("q_proj", 2 * q_width),
                    ("k_proj", kv_width),
                    ("v_proj", kv_width),
                )
            ),
            Linear(
                name="o_proj",
                in_features=q_width,
                out_features=hidden,
                reads="attn_out",
                bias=bias,
            ),
        ),
        norms=(
            Norm(name="q_norm", kind="rms_offset", width=head_dim, rows=heads),
            Norm(name="k_norm", kind="rms_offset", width=head_dim, rows=kv_heads),
        ),
        rotary_dim=int(head_dim * c.rotary_fraction),
        projection="gated",
        joins_rotation=True,
        cache_elements=2 * kv_width,
    )


def _hybrid(c: Fields, *, fused: bool, experts: bool) -> ModelSpec:
    hidden, count = c.size("hidden_size"), c.layers()
    every = c.size("full_attention_interval")
    types = c.items("layer_types", length=count) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    full, linear = _gated_attention(c), _delta_net(c, fused=fused)
    layers = numbered_layers(
        c,
        lambda number: full if types[number] == "full_attention" else linear,
        qwen_feed_forward(c, shared_expert=True) if experts else mlp_in_every_layer(c),
        norms=norms(PRE_NORM, width=hidden, kind="rms_offset"),
    )
    return causal_lm(c, layers, final_norms=norms(("norm",), width=hidden, kind="rms_offset"))


BUILDERS = {
    "qwen3_next": lambda c: _hybrid(c, fused=True, experts=True),
    "qwen3_5_text": lambda c: _hybrid(c, fused=False, experts=False),
    "qwen3_5_moe_text": lambda c: _hybrid(c, fused=False, experts=True),
}
