"""Decoders with Mamba 2 in the place of some or all attentions: Granite 4, Bamba, Falcon-H1, …."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import (
    bare_router,
    causal_lm,
    mlp,
    moe,
    norms,
    softmax_attention,
)
from whichlora.families.decoder import PRE_NORM
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer, Linear, Moe, Norm

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
_HYBRID = (
    LLAMA | _MAMBA | {"vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8}
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": LLAMA
    | _MAMBA
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    "bamba": _HYBRID | {"max_position_embeddings": 262144, "partial_rotary_factor": 0.5},
    "falcon_h1": _HYBRID
    | {
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_rms_norm": False,
        "projectors_bias": False,
    },
    "mamba2": _MAMBA
    | {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "residual_in_fp32": True,
        "tie_word_embeddings": False,
    },
    "nemotron_h": _HYBRID
    | {
        "vocab_size": 131072,
        "intermediate_size": 21504,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "mamba_chunk_size": 128,
        "mamba_ssm_cache_dtype": "float32",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
}
SYNONYMS = {
    "mamba2": {
        "mamba_n_heads": ("num_heads",),
        "mamba_n_groups": ("n_groups",),
        "mamba_d_state": ("state_size",),
        "mamba_d_head": ("head_dim",),
        "mamba_d_conv": ("conv_kernel",),
        "mamba_expand": ("expand",),
        "mamba_chunk_size": ("chunk_size",),
        "mamba_conv_bias": ("use_conv_bias",),
        "mamba_proj_bias": ("use_bias",),
    },
    "nemotron_h": {
        "layers_block_type": ("layer_types",),
        "mamba_n_heads": ("mamba_num_heads",),
        "mamba_n_groups": ("n_groups",),
        "mamba_d_state": ("ssm_state_size",),
        "mamba_d_head": ("mamba_head_dim",),
        "mamba_d_conv": ("conv_kernel",),
        "mamba_chunk_size": ("chunk_size",),
        "mamba_conv_bias": ("use_conv_bias",),
        "mamba_proj_bias": ("use_bias",),
        "n_routed_experts": ("num_local_experts",),
    },
}


def mamba2(c: Fields, *, inner: int | None = None) -> Attention:
    """A state space whose decay is one number for each head and token.

    Args:
        inner: its width; without it, a multiple of the hidden state's.

    Source: Dao and Gu 2024, arXiv:2405.21060; names from `GraniteMoeHybridMambaLayer`.
    """
    hidden, heads = c.size("hidden_size"), c.size("mamba_n_heads")
    groups, state = c.size("mamba_n_groups"), c.size("mamba_d_state")
    inner = inner or c.size("mamba_expand") * hidden
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
        conv_kernel=kernel,
        recurrent_dtype=str(c.get("mamba_ssm_cache_dtype") or ""),
        chunk_size=c.size("mamba_chunk_size"),
        # convolution, and A, D and the bias of the steps
        other_params=mixed * (kernel + int(c.flag("mamba_conv_bias"))) + 3 * heads,
    )


def _attention(c: Fields, *, rotary_dim: int) -> Attention:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    head_dim, bias = c.size("head_dim", fallback=hidden // heads), c.flag("attention_bias")
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


def _bamba(c: Fields) -> ModelSpec:
    hidden, count = c.size("hidden_size"), c.layers()
    attending = c.indices("attn_layer_indices")
    rotary = int(hidden // c.size("num_attention_heads") * c.rotary_fraction)
    attention, mixer = _attention(c, rotary_dim=rotary), mamba2(c)
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        bias=c.flag("mlp_bias"),
    )
    layer_norms = norms(("input_layernorm", "pre_ff_layernorm"), width=hidden, kind="rms")
    layers = [
        Layer(attentions=(attention if i in attending else mixer,), mlp=block, norms=layer_norms)
        for i in range(count)
    ]
    return causal_lm(c, layers, final_norms=norms(("final_layernorm",), width=hidden, kind="rms"))


def _without_out_proj(mixer: Attention) -> Attention:
    """PEFT refuses this matrix, whose weight mamba-ssm's kernel is handed without its module.

    Source: peft 0.21.2 `_check_lora_target_modules_mamba`.
    """
    *into, out = mixer.linears
    return replace(mixer, linears=(*into, replace(out, is_refused=True)))


def _falcon_h1(c: Fields) -> ModelSpec:
    """Falcon-H1: state space and attention side by side in every layer, and factors everywhere."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    mixer = _without_out_proj(mamba2(c, inner=c.size_or_none("mamba_d_ssm")))
    into, out = mixer.linears
    out = replace(out, bias=c.flag("projectors_bias"))
    mixer = replace(mixer, linears=(into, out), projection="scaled")
    if c.flag("mamba_rms_norm"):
        raise ConfigError(f"{c.name}: mamba_rms_norm is true; falcon_h1 is predicted with false")
    mixer = replace(mixer, norms=())
    head_dim = c.size("head_dim", fallback=hidden // heads)
    attention = replace(_attention(c, rotary_dim=head_dim), projection="scaled_keys")
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        bias=c.flag("mlp_bias"),
    )
    layer = Layer(
        attentions=(mixer, attention),
        mlp=replace(block, is_scaled=True),
        norms=norms(("input_layernorm", "pre_ff_layernorm"), width=hidden, kind="rms"),
        side_by_side=True,
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("final_layernorm",), width=hidden, kind="rms"),
        scales_logits=True,
        embeds_in_steps=True,
    )


def _mamba2(c: Fields) -> ModelSpec:
    hidden = c.size("hidden_size")
    layer = Layer(
        attentions=(_without_out_proj(replace(mamba2(c), flash=False)),),
        norms=norms(("norm",), width=hidden, kind="rms"),
        wide_residual=c.flag("residual_in_fp32"),
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        embedding_name="embeddings",
        final_norms=norms(("norm_f",), width=hidden, kind="rms"),
        returns_wide_logits=True,
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


_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds_of_blocks(c: Fields) -> list[str]:
    """What each block of a Nemotron-H is: as listed, or as the letters of its pattern say.

    Raises:
        ConfigError: a kind that no block has.
    """
    listed, pattern = c.get("layers_block_type"), c.get("hybrid_override_pattern")
    if listed is None:
        listed = list(pattern) if isinstance(pattern, str) else list("ME*-")
    kinds = [_PATTERN.get(kind, _LEGACY.get(kind, kind)) for kind in map(str, listed)]
    for kind in kinds:
        if kind not in _PATTERN.values():
            raise ConfigError(
                f"{c.name}: {kind!r} is no kind of block of {c.text('model_type')}; accepted are "
                f"{', '.join(_PATTERN.values())}, or a pattern of {' '.join(_PATTERN)}"
            )
    return kinds


def _nemotron_experts(c: Fields) -> Moe:
    hidden, activation = c.size("hidden_size"), c.text("mlp_hidden_act")
    num_experts, bias = c.size("n_routed_experts"), c.flag("mlp_bias")
    latent = c.size_or_none("moe_latent_size")
    around: tuple[Linear, ...] = ()
    if latent:
        around = (
            Linear(
                name="fc1_latent_proj",
                in_features=hidden,
                out_features=latent,
                reads="mlp_in",
                bias=bias,
            ),
            Linear(
                name="fc2_latent_proj",
                in_features=latent,
                out_features=hidden,
                reads="latent_out",
                bias=bias,
            ),
        )
    routed = moe(
        hidden=latent or hidden,
        width=c.size("moe_intermediate_size"),
        activation=activation,
        num_experts=num_experts,
        experts_per_token=c.size("num_experts_per_tok"),
        shared=mlp(
            hidden=hidden,
            width=c.size("moe_shared_expert_intermediate_size"),
            activation=activation,
            names=("up_proj", "down_proj"),
            bias=bias,
            act="shared_act",
        ),
        router=bare_router(hidden, num_experts),
        routing="sigmoid",
        latent=around,
    )
    up, down = routed.expert.linears  # no gate: half of what others raise
    up = replace(up, name="up_proj", out_features=routed.expert.width)
    return replace(routed, expert=replace(routed.expert, gated=False, linears=(up, down)))


def _nemotron_h(c: Fields) -> ModelSpec:
    """Blocks with one norm each: a state space, an attention, an MLP or experts."""
    c = c.without("attention_bias", "mamba_proj_bias", "tie_word_embeddings")
    hidden, bias = c.size("hidden_size"), c.flag("mlp_bias")
    inner = c.size("mamba_n_heads") * c.size("mamba_d_head")
    kinds = _kinds_of_blocks(c)
    dense = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("mlp_hidden_act"),
        names=("up_proj", "down_proj"),
        bias=bias,
    )
    blocks: dict[str, dict[str, Any]] = {
        "linear_attention": {"attentions": (_without_out_proj(mamba2(c, inner=inner)),)},
        "full_attention": {"attentions": (_attention(c, rotary_dim=0),)},
        "mlp": {"attentions": (), "mlp": dense},
    }
    if "moe" in kinds:
        blocks["moe"] = {"attentions": (), "moe": _nemotron_experts(c)}
    # its weight is multiplied in fp32, as Gemma's is
    norm = norms(("norm",), width=hidden, kind="rms_wide")
    layers = [Layer(norms=norm, **blocks[kind]) for kind in kinds]
    final = norms(("norm_f",), width=hidden, kind="rms_wide")
    return causal_lm(c, layers, final_norms=final, embedding_name="embeddings")


BUILDERS = {
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
}
