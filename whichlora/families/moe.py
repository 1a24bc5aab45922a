"""Mixtures of experts around a Llama-like attention: Mixtral, Qwen, OLMoE, Granite, gpt-oss, …."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import FeedForward, mlp, moe
from whichlora.families.decoder import Style, decoder, every_nth_full, late_sliding
from whichlora.families.fields import Fields
from whichlora.families.llama import GRANITE, LLAMA, MISTRAL, QWEN2
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Linear, Mlp, Moe, Routing

QWEN_MOE = QWEN2 | {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
GRANITE_MOE = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
DEFAULTS = {
    "mixtral": MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": QWEN_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    "qwen3_moe": QWEN_MOE
    | {
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3_vl_moe_text": QWEN_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "olmoe": LLAMA
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE | {"shared_intermediate_size": 0},
    "phimoe": LLAMA
    | {
        "vocab_size": 32064,
        "intermediate_size": 6400,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": LLAMA
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "glm4_moe": LLAMA
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    "glm4v_moe_text": LLAMA
    | {
        "vocab_size": 151424,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65536,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
}
# transformers writes the field of the class; the hub keeps what the authors wrote.
SYNONYMS = {
    "qwen3_moe": {"num_experts": ("num_local_experts",)},
    "gpt_oss": {
        "num_local_experts": ("num_experts",),
        "num_experts_per_tok": ("experts_per_token",),
    },
}


def experts_in_every_layer(
    c: Fields,
    *,
    bias: bool = False,
    shared: Mlp | None = None,
    router: Linear | None = None,
    routing: Routing = "softmax",
    clamped: bool = False,
) -> FeedForward:
    block = moe(
        hidden=c.size("hidden_size"),
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        num_experts=c.size("num_experts" if c.get("num_experts") else "num_local_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        bias=bias,
        shared=shared,
        router=router,
        routing=routing,
        clamped=clamped,
    )
    return lambda _: (None, block)


def qwen_feed_forward(c: Fields, *, shared_expert: bool) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer, a wide MLP in the rest."""
    hidden, activation = c.size("hidden_size"), c.text("hidden_act")
    shared = None
    if shared_expert:
        gate = Linear(name="shared_expert_gate", in_features=hidden, out_features=1, reads="mlp_in")
        shared = mlp(
            hidden=hidden,
            width=c.size("shared_expert_intermediate_size"),
            activation=activation,
            act="shared_act",
            extra=(gate,),
        )
    sparse = moe(
        hidden=hidden,
        width=c.size("moe_intermediate_size"),
        activation=activation,
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        shared=shared,
        routing="softmax",
        shared_first=True,
    )
    step = c.size("decoder_sparse_step", fallback=1)
    only_dense = c.indices("mlp_only_layers")
    if step == 1 and not only_dense:
        return lambda _: (None, sparse)
    dense = mlp(hidden=hidden, width=c.size("intermediate_size"), activation=activation)

    def choose(number: int) -> tuple[Mlp | None, Moe | None]:
        if number in only_dense or (number + 1) % step:
            return dense, None
        return None, sparse

    return choose


def routed_experts(
    c: Fields,
    *,
    width: int,
    num_experts: int,
    experts_per_token: int,
    num_shared: int = 0,
    routing: Routing,
    shared_bias: bool = False,
    **overrides: Any,
) -> Moe:
    """Routed experts, and shared ones as one MLP of their widths together."""
    hidden, activation = c.size("hidden_size"), c.text("hidden_act")
    shared = None
    if num_shared:
        shared = mlp(
            hidden=hidden,
            width=num_shared * width,
            activation=activation,
            bias=shared_bias,
            act="shared_act",
        )
    return moe(
        hidden=hidden,
        width=width,
        activation=activation,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        shared=shared,
        routing=routing,
        **overrides,
    )


def dense_layers(c: Fields, first: int) -> list[bool]:
    """Whether each layer has no experts: as `mlp_layer_types` says, else the first `first`."""
    count = c.layers()
    kinds = c.items("mlp_layer_types", length=count)
    return [i < first if kinds is None else kinds[i] == "dense" for i in range(count)]


def sparse_or_dense(
    c: Fields,
    sparse: Moe,
    is_dense: list[bool],
    *,
    width_key: str = "intermediate_size",
    bias: bool = False,
) -> FeedForward:
    """`sparse`, and where a layer `is_dense` an MLP of the width that `width_key` holds."""
    dense = None
    if any(is_dense):
        dense = mlp(
            hidden=c.size("hidden_size"),
            width=c.size(width_key),
            activation=c.text("hidden_act"),
            bias=bias,
        )
    return lambda number: (dense, None) if is_dense[number] else (None, sparse)


def deepseek_experts(c: Fields, routing: Routing = "sigmoid", **overrides: Any) -> Moe:
    """Routed experts beside shared ones."""
    return routed_experts(
        c,
        width=c.size("moe_intermediate_size"),
        num_experts=c.size("n_routed_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        num_shared=c.size_or_none("n_shared_experts") or 0,
        routing=routing,
        **overrides,
    )


def deepseek_feed_forward(
    c: Fields, routing: Routing = "sigmoid", *, bias: bool = False, **overrides: Any
) -> FeedForward:
    """`deepseek_experts`, but in the first `first_k_dense_replace` layers.

    Args:
        bias: the first MLPs and the shared experts have biases.
    """
    sparse = deepseek_experts(c, routing, shared_bias=bias, **overrides)
    is_dense = dense_layers(c, c.count("first_k_dense_replace"))
    return sparse_or_dense(c, sparse, is_dense, bias=bias)


def _mixtral(c: Fields) -> ModelSpec:
    spec = decoder(c, feed_forward=experts_in_every_layer(c, routing="softmax_wide"))
    return replace(spec, rotary_tables_before="4.48")


def _qwen2_moe(c: Fields) -> ModelSpec:
    return decoder(
        c,
        Style(qkv_bias=c.flag("qkv_bias")),
        layer_types=late_sliding(c),
        feed_forward=qwen_feed_forward(c, shared_expert=True),
    )


def _qwen3_moe(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, qk_norm="head"),
        layer_types=late_sliding(c),
        feed_forward=qwen_feed_forward(c, shared_expert=False),
    )


def _olmoe(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(qkv_bias=bias, out_bias=bias, qk_norm="width")
    return decoder(c, style, feed_forward=experts_in_every_layer(c))


def _granitemoe(c: Fields) -> ModelSpec:
    bias, shared = c.flag("attention_bias"), None
    width = c.size_or_none("shared_intermediate_size")
    if width:
        shared = mlp(
            hidden=c.size("hidden_size"),
            width=width,
            activation=c.text("hidden_act"),
            names=("input_linear", "output_linear"),
            fused=True,
            act="shared_act",
        )
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias),
        feed_forward=experts_in_every_layer(c, shared=shared, routing="chosen"),
        **GRANITE,
    )


def _phimoe(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        head_bias=c.flag("lm_head_bias"),
        norm_kind="layer",
        norm_bias=True,
    )
    router = Linear(  # PhimoeTopKRouter is an nn.Linear
        name="router",
        in_features=c.size("hidden_size"),
        out_features=c.size("num_local_experts"),
        reads="mlp_in",
    )
    return decoder(
        c, style, feed_forward=experts_in_every_layer(c, router=router, routing="sparse_mixer")
    )


def _gpt_oss(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, norm_kind="rms_wide"),  # scales in fp32
        layer_types=every_nth_full(c, 2),
        feed_forward=experts_in_every_layer(c, bias=True, routing="chosen", clamped=True),
        sinks=True,
    )


def _glm4_moe(c: Fields) -> ModelSpec:
    style = Style(
        qkv_bias=c.flag("attention_bias"), qk_norm="head" if c.flag("use_qk_norm") else "none"
    )
    return decoder(c, style, feed_forward=deepseek_feed_forward(c))


BUILDERS = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "phimoe": _phimoe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "glm4v_moe_text": _glm4_moe,
}
