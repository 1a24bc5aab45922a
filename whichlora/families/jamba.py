"""Jamba: state spaces of Mamba 1 with an attention in every so many layers, and experts in some."""

from __future__ import annotations

from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import (
    causal_lm,
    mlp,
    moe,
    norms,
    numbered_layers,
    softmax_attention,
)
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Linear, Moe, Norm
from whichlora.spec.numeric import ceil_div

DEFAULTS: dict[str, dict[str, Any]] = {
    "jamba": LLAMA
    | {
        "vocab_size": 65536,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "num_experts": 16,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "use_mambapy": False,
    }
}
SYNONYMS = {"jamba": {"num_experts": ("num_local_experts",)}}


def _every(c: Fields, kind: str) -> set[int]:
    """Numbers of the layers that `kind` ("attn", "expert") names by period and offset.

    Source: transformers 5.23 `JambaConfig.layers_block_type`, `layers_num_experts`.
    """
    period, offset = c.size(f"{kind}_layer_period"), c.count(f"{kind}_layer_offset")
    if offset >= period:
        raise ConfigError(
            f"{c.name}: {kind}_layer_offset is {offset}, must be smaller than "
            f"{kind}_layer_period, {period}"
        )
    return {number for number in range(c.layers()) if number % period == offset}


def _mamba(c: Fields) -> Attention:
    """A state space whose decay is a vector for each channel, with norms on what makes a step.

    Each channel is a head with one value; all read the same keys and queries.
    Source: transformers 5.23 `JambaMambaMixer`; Gu and Dao 2023, arXiv:2312.00752.
    """
    hidden, state = c.size("hidden_size"), c.size("mamba_d_state")
    inner, kernel = c.size("mamba_expand") * hidden, c.size("mamba_d_conv")
    auto = c.get("mamba_dt_rank") == "auto"
    rank = ceil_div(hidden, 16) if auto else c.size("mamba_dt_rank")
    bias = c.flag("mamba_proj_bias")
    shapes = (
        ("in_proj", hidden, 2 * inner, "attn_in", bias),
        ("x_proj", inner, rank + 2 * state, "scan_in", False),
        ("dt_proj", rank, inner, "steps_in", True),
        ("out_proj", inner, hidden, "attn_out", bias),
    )
    return Attention(
        kind="mamba1",
        num_attention_heads=inner,
        num_key_value_heads=1,
        head_dim=state,
        v_head_dim=1,
        linears=tuple(
            Linear(
                name=name,
                in_features=in_features,
                out_features=out_features,
                reads=reads,
                bias=has_bias,
                weight_only=name == "dt_proj",
            )
            for name, in_features, out_features, reads, has_bias in shapes
        ),
        norms=(
            Norm(name="dt_layernorm", kind="rms", width=rank),
            Norm(name="b_layernorm", kind="rms", width=state),
            Norm(name="c_layernorm", kind="rms", width=state),
        ),
        position="none",
        state_elements=inner * kernel,
        recurrent_elements=inner * state,
        conv_kernel=kernel,
        # convolution, A and D
        other_params=inner * (kernel + int(c.flag("mamba_conv_bias")) + state + 1),
    )


def _experts(c: Fields) -> Moe:
    hidden, num_experts = c.size("hidden_size"), c.size("num_experts")
    return moe(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        num_experts=num_experts,
        experts_per_token=c.size("num_experts_per_tok"),
        routing="softmax_exact",
    )


def _jamba(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    if c.flag("use_mambapy"):
        raise ConfigError(
            f"{c.name}: use_mambapy is true; jamba is predicted with false, as transformers sets it"
        )
    attending, mixing = _every(c, "attn"), _every(c, "expert")
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=c.size("num_key_value_heads", fallback=heads),
        head_dim=c.size("head_dim", fallback=hidden // heads),
        position="none",
        dropout=c.probability("attention_dropout"),
    )
    mixer = _mamba(c)
    dense = mlp(hidden=hidden, width=c.size("intermediate_size"), activation=c.text("hidden_act"))
    experts = _experts(c) if c.size("num_experts") > 1 else None
    layers = numbered_layers(
        c,
        lambda number: attention if number in attending else mixer,
        lambda number: (None, experts) if experts and number in mixing else (dense, None),
        norms=norms(("input_layernorm", "pre_ff_layernorm"), width=hidden, kind="rms"),
    )
    return causal_lm(c, layers, final_norms=norms(("final_layernorm",), width=hidden, kind="rms"))


BUILDERS = {"jamba": _jamba}
