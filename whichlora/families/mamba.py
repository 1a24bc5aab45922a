"""Decoders with Mamba 2 in the place of most attentions: Granite 4."""

from __future__ import annotations

from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import causal_lm, mlp, moe, norms, softmax_attention
from whichlora.families.decoder import PRE_NORM
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import Attention, Layer, Linear, ModelSpec, Norm

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": LLAMA
    | _MAMBA
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
}


def mamba2(c: Fields) -> Attention:
    """A state space whose decay is one number for each head and token.

    Source: Dao and Gu 2024, arXiv:2405.21060; names from `GraniteMoeHybridMambaLayer`.
    """
    hidden, heads = c.size("hidden_size"), c.size("mamba_n_heads")
    groups, state = c.size("mamba_n_groups"), c.size("mamba_d_state")
    inner = c.size("mamba_expand") * hidden
    head_dim = inner // heads if c.get("mamba_d_head") == "auto" else c.size("mamba_d_head")
    if head_dim * heads != inner:
        raise ConfigError(
            f"{c.name}: mamba_n_heads {heads} times mamba_d_head {head_dim} is not mamba_expand "
            f"times hidden_size, {inner}"
        )
    kernel, bias = c.size("mamba_d_conv"), c.flag("mamba_proj_bias")
    mixed = inner + 2 * groups * state  # channels of the depthwise convolution
    return Attention(
        kind="mamba2",
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=state,
        v_head_dim=head_dim,
        linears=(
            Linear(
                name="in_proj",
                in_features=hidden,
                out_features=inner + mixed + heads,
                reads="attn_in",
                bias=bias,
            ),
            Linear(
                name="out_proj", in_features=inner, out_features=hidden, reads="attn_out", bias=bias
            ),
        ),
        norms=(Norm(name="norm", kind="rms", width=inner),),
        position="none",
        state_elements=mixed * kernel,
        recurrent_elements=inner * state,
        chunk_size=c.size("mamba_chunk_size"),
        # convolution, and A, D and the bias of the steps
        other_params=mixed * (kernel + int(c.flag("mamba_conv_bias"))) + 3 * heads,
    )


def _attention(c: Fields, *, rotary_dim: int) -> Attention:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    head_dim, bias = hidden // heads, c.flag("attention_bias")
    return softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=c.size("num_key_value_heads", fallback=heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        position="rope" if rotary_dim else "none",
        rotary_dim=rotary_dim,
        joins_rotation=0 < rotary_dim < head_dim,
        dropout=c.probability("attention_dropout"),
    )


def _granite(c: Fields) -> ModelSpec:
    """Granite 4: an MLP that all tokens pass, beside experts where there are any."""
    hidden, heads, count = c.size("hidden_size"), c.size("num_attention_heads"), c.layers()
    kinds = c.items("layer_types", length=count) or ["mamba"] * count
    rotated = hidden // heads if c.get("position_embedding_type") == "rope" else 0
    attention, mixer = _attention(c, rotary_dim=rotated), mamba2(c)
    shared = mlp(
        hidden=hidden,
        width=c.size("shared_intermediate_size"),
        activation=c.text("hidden_act"),
        names=("input_linear", "output_linear"),
        fused=True,
        act="shared_act",
    )
    experts = None
    if c.count("num_local_experts"):
        experts = moe(
            hidden=hidden,
            width=c.size("intermediate_size"),
            activation=c.text("hidden_act"),
            num_experts=c.size("num_local_experts"),
            experts_per_token=c.size("num_experts_per_tok"),
            shared=shared,
            routing="chosen",
        )
    layers = [
        Layer(
            attentions=(attention if kind in ("attention", "full_attention") else mixer,),
            mlp=None if experts else shared,
            moe=experts,
            norms=norms(PRE_NORM, width=hidden, kind="rms"),
            scales_sums=True,
        )
        for kind in kinds
    ]
    final = norms(("norm",), width=hidden, kind="rms")
    return causal_lm(c, layers, final_norms=final, scales_logits=True, embeds_in_steps=True)


BUILDERS = {"granitemoehybrid": _granite}
