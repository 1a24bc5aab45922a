"""Gemma 1 to 4 (text): scaled embeddings, norms around each block, sliding and full layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import causal_lm, mlp, moe, norms, softmax_attention
from whichlora.families.decoder import FULL, Style, decoder, every_nth_full
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, LayerInput, Linear, Norm

SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA2: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": GEMMA2
    | _NO_CAPS
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "sliding_window": None,
    },
    "gemma2": GEMMA2,
    "vaultgemma": GEMMA2,
    "gemma3_text": GEMMA2
    | _NO_CAPS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
    },
    "gemma4_text": GEMMA2
    | _NO_CAPS
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "global_head_dim": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
    },
}


def _style(c: Fields, **overrides: Any) -> Style:
    bias = c.flag("attention_bias")
    usual = {"norm_kind": "rms_offset", "activation": "hidden_activation"}
    return Style(qkv_bias=bias, out_bias=bias, **(usual | overrides))


def _gemma(c: Fields) -> ModelSpec:
    return decoder(c, _style(c, activation="hidden_act"))


def _gemma2(c: Fields) -> ModelSpec:
    spec = decoder(c, _style(c, layer_norms=SANDWICH), layer_types=every_nth_full(c, 2))
    return spec.with_attentions(_in_eager)


def _in_eager(attention: Attention) -> Attention:
    """That of classes which leave no SDPA to torch, even without a soft cap of scores.

    Source: transformers 5.23 `Gemma2PreTrainedModel._supports_sdpa`, also of VaultGemma.
    """
    return replace(attention, sdpa="eager")


def without_caps(spec: ModelSpec, *, always_masked: bool) -> ModelSpec:
    """Gemma 2 as releases run it whose SDPA leaves out the soft cap of its scores."""
    return (
        spec
        if spec.model_type != "gemma2"
        else spec.with_layers(partial(_without_caps, always_masked=always_masked))
    )


def _without_caps(layer: Layer, *, always_masked: bool) -> Layer:
    attentions = (
        replace(attention, softcap=None, sdpa="fused", always_masked=always_masked)
        for attention in layer.attentions
    )
    return replace(layer, attentions=tuple(attentions))


def _vaultgemma(c: Fields) -> ModelSpec:
    style = _style(c, layer_norms=("input_layernorm", "pre_feedforward_layernorm"))
    spec = decoder(c, style, layer_types=every_nth_full(c, 2))
    return spec.with_attentions(_in_eager)


def _gemma3(c: Fields) -> ModelSpec:
    spec = decoder(
        c,
        _style(c, layer_norms=SANDWICH, qk_norm="head"),
        layer_types=every_nth_full(c, c.size("sliding_window_pattern")),
        rotates_each_kind=True,
    )
    return spec.with_attentions(_both_ways) if c.flag("use_bidirectional_attention") else spec


def _both_ways(attention: Attention) -> Attention:
    """That of EmbeddingGemma: a token sees those after it, too.

    The window of its config is whole, half of it to each side. A mask is made whatever the batch.
    Source: transformers 5.23 `Gemma3TextConfig.__post_init__`, `Gemma3TextModel.forward`: its
    `or_mask_function` keeps `create_causal_mask` from leaving the mask to SDPA.
    """
    return replace(attention, causal=False, always_masked=True)


def _gemma4_layer(c: Fields, kind: str, *, sharing: str) -> Layer:
    """One block of Gemma 4.

    Args:
        sharing: "reuse": keys and values of an earlier layer; "store": later layers read its own.
    """
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    full = kind == FULL
    head_dim = c.size("global_head_dim") if full else c.size("head_dim")
    kv_heads = c.size("num_key_value_heads")
    keys_are_values = full and c.flag("attention_k_eq_v")
    if keys_are_values:
        kv_heads = c.size("num_global_key_value_heads", fallback=kv_heads)
    bias = c.flag("attention_bias")
    reuses = sharing == "reuse"

    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        cached=not reuses,
        rotary_dim=head_dim,  # where only a part of the angles is not zero, all are still there
        sliding_window=None if full else c.size("sliding_window"),
        projection="borrowed"
        if reuses
        else ("one_by_one_shared" if keys_are_values else "one_by_one"),
        keeps_keys=sharing == "store",
        skips_prompt=reuses,
    )
    missing = {"v_proj"} if keys_are_values else set()
    qk_norms = [Norm(name="q_norm", kind="rms_power", width=head_dim, rows=heads)]
    if reuses:
        missing = {"k_proj", "v_proj"}
    else:
        key: dict[str, Any] = {"kind": "rms_power", "width": head_dim, "rows": kv_heads}
        qk_norms += [Norm(name="k_norm", **key), Norm(name="v_norm", weight=False, **key)]
    attention = replace(
        attention,
        linears=tuple(x for x in attention.linears if x.name not in missing),
        norms=tuple(qk_norms),
    )

    wide = reuses and c.flag("use_double_wide_mlp")
    activation = c.text("hidden_activation")
    experts = None
    names: tuple[str, ...] = SANDWICH
    if c.flag("enable_moe_block"):
        num_experts = c.size("num_experts")
        experts = moe(
            hidden=hidden,
            width=c.size("moe_intermediate_size"),
            activation=activation,
            num_experts=num_experts,
            experts_per_token=c.size("top_k_experts"),
            router=Linear(
                name="proj", in_features=hidden, out_features=num_experts, reads="router_in"
            ),
            other_params=hidden + num_experts,  # scales of the router's input and of each expert
            routing="scaled",
        )
        names += (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        )
    return Layer(
        attentions=(attention,),
        mlp=mlp(
            hidden=hidden,
            width=c.size("intermediate_size") * (2 if wide else 1),
            activation=activation,
        ),
        moe=experts,
        norms=norms(names, width=hidden, kind="rms_power"),
        layer_input=layer_input(c),
        scales_result=True,
    )


def layer_input(c: Fields) -> LayerInput | None:
    """This layer's part of a second embedding; None where the model has none."""
    hidden, width = c.size("hidden_size"), c.size_or_none("hidden_size_per_layer_input")
    if not width:
        return None
    gate, back = ("per_layer_input_gate", "per_layer_projection")
    return LayerInput(
        num_parts=c.layers(),
        gate=Linear(name=gate, in_features=hidden, out_features=width, reads="per_layer_in"),
        projection=Linear(name=back, in_features=width, out_features=hidden, reads="per_layer_act"),
        activation=c.text("hidden_activation"),
        norm=Norm(name="post_per_layer_input_norm", kind="rms_power", width=hidden),
    )


def kv_sharing(c: Fields, types: list[str]) -> list[str]:
    """Per layer: "reuse" in the last ones that share, "store" in those they read, else nothing.

    Source: transformers 5.23 `Gemma4TextConfig.kv_sharing_modes`.

    Raises:
        ConfigError: no layer is left whose keys they could read.
    """
    num_shared = c.count("num_kv_shared_layers")
    first = len(types) - num_shared
    if first <= 0:
        raise ConfigError(
            f"{c.name}: num_kv_shared_layers is {num_shared} of {len(types)} layers, which leaves "
            "none whose keys they could read"
        )
    stores = {kind: number for number, kind in enumerate(types[:first])} if num_shared else {}
    roles = ["store" if number in stores.values() else "" for number in range(first)]
    return roles + ["reuse"] * num_shared


def _gemma4(c: Fields) -> ModelSpec:
    hidden, count = c.size("hidden_size"), c.layers()
    types = every_nth_full(c, 6)
    types[-1] = FULL  # whatever the config says
    sharing = kv_sharing(c, types)
    layers = [
        _gemma4_layer(c, kind, sharing=mode) for kind, mode in zip(types, sharing, strict=True)
    ]
    embeddings: tuple[Embedding, ...] = (
        Embedding(name="embed_tokens", rows=c.size("vocab_size"), width=hidden),
    )
    around: tuple[Linear, ...] = ()
    layer_input_norm = None
    per_layer = c.size_or_none("hidden_size_per_layer_input")
    if per_layer:
        packed = count * per_layer
        embeddings += (
            Embedding(
                name="embed_tokens_per_layer",
                rows=c.size("vocab_size_per_layer_input"),
                width=packed,
            ),
        )
        around = (
            Linear(
                name="per_layer_model_projection",
                in_features=hidden,
                out_features=packed,
                reads="embedding",
            ),
        )
        layer_input_norm = Norm(
            name="per_layer_projection_norm", kind="rms_power", width=per_layer, rows=count
        )
    return causal_lm(
        c,
        layers,
        final_norms=norms(("norm",), width=hidden, kind="rms_power"),
        embeddings=embeddings,
        layer_input_norm=layer_input_norm,
        head_linears=around,
        rotates_each_kind=True,
        logit_softcap=c.number_or_none("final_logit_softcapping"),
    )


BUILDERS = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "vaultgemma": _vaultgemma,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
}
