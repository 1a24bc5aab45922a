"""Mixtures of experts that join parts of other families: dots.llm1, EXAONE, ERNIE, MiniMax, …."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import mlp
from whichlora.families.decoder import FULL, SLIDING, Style, decoder
from whichlora.families.fields import Fields
from whichlora.families.layernorm import COHERE
from whichlora.families.llama import LLAMA, exaone_windows
from whichlora.families.moe import (
    deepseek_experts,
    deepseek_feed_forward,
    dense_layers,
    experts_in_every_layer,
    routed_experts,
    sparse_or_dense,
)
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Linear, Mlp, Moe

DEFAULTS: dict[str, dict[str, Any]] = {
    "dots1": LLAMA
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
    },
    "exaone_moe": LLAMA
    | {
        "num_experts_per_tok": 8,
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_shared_experts": 1,
    },
    "solar_open": LLAMA
    | {
        "vocab_size": 196608,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    },
    "mellum": LLAMA
    | {
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "ernie4_5_moe": LLAMA
    | {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    "minimax_m2": LLAMA
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    "hunyuan_v1_moe": LLAMA | {"vocab_size": 290943, "num_experts": 1, "moe_topk": 1},
    "flex_olmo": LLAMA
    | {
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
    "hy_v3": LLAMA
    | {
        "num_experts_per_tok": 8,
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "enable_moe_fp32_combine": True,
    },
    "cohere2_moe": COHERE
    | {
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1,
    },
}
SYNONYMS = {
    "dots1": {"n_routed_experts": ("num_local_experts",)},
    "solar_open": {"n_routed_experts": ("num_local_experts",)},
    "mellum": {"num_experts": ("num_local_experts",)},
    "exaone_moe": {"num_experts": ("num_local_experts",)},
    "minimax_m2": {"num_local_experts": ("num_experts",)},
    "ernie4_5_moe": {
        "moe_num_experts": ("num_experts",),
        "moe_k": ("num_experts_per_tok",),
    },
    "hunyuan_v1_moe": {"num_experts": ("num_local_experts",)},
    "flex_olmo": {"num_experts": ("num_local_experts",)},
    "cohere2_moe": {"num_experts": ("num_local_experts",)},
    "hy_v3": {"num_experts": ("num_local_experts",)},
}


def _dots1(c: Fields) -> ModelSpec:
    count, bias = c.layers(), c.flag("attention_bias")
    types = c.items("layer_types", length=count)
    if types is None:
        first = c.count("max_window_layers")
        windowed = c.size_or_none("sliding_window") is not None
        types = [SLIDING if windowed and number >= first else FULL for number in range(count)]
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, qk_norm="head"),
        layer_types=types,
        feed_forward=deepseek_feed_forward(c),
    )


def _exaone_moe(c: Fields) -> ModelSpec:
    sparse = routed_experts(
        c,
        width=c.size("moe_intermediate_size"),
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        num_shared=c.count("num_shared_experts"),
        routing="sigmoid",
    )
    feed_forward = sparse_or_dense(c, sparse, dense_layers(c, c.count("first_k_dense_replace")))
    style = Style(qk_norm="head")
    return decoder(c, style, feed_forward=feed_forward, **exaone_windows(c))


def _hy_v3(c: Fields) -> ModelSpec:
    sparse = routed_experts(
        c,
        width=c.size("moe_intermediate_size"),
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        num_shared=c.size("num_shared_experts"),
        routing="sigmoid_divided",
        shared_bias=c.flag("mlp_bias"),
        sums_wide=c.flag("enable_moe_fp32_combine"),
    )
    is_dense = dense_layers(c, c.count("first_k_dense_replace"))
    feed_forward = sparse_or_dense(c, sparse, is_dense, bias=c.flag("mlp_bias"))
    bias = c.flag("attention_bias")
    style = Style(qkv_bias=bias, out_bias=bias, qk_norm="head")
    return decoder(c, style, feed_forward=feed_forward)


def _solar_open(c: Fields) -> ModelSpec:
    """Experts in every layer: `SolarOpenDecoderLayer` reads no `first_k_dense_replace`."""
    experts = deepseek_experts(c)
    style = Style(qkv_bias=c.flag("attention_bias"))
    return decoder(c, style, feed_forward=lambda _: (None, experts))


def _mellum(c: Fields) -> ModelSpec:
    count, bias = c.layers(), c.flag("attention_bias")
    sparse = routed_experts(
        c,
        width=c.size("moe_intermediate_size"),
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        routing="softmax",
    )
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, qk_norm="head"),
        layer_types=c.items("layer_types", length=count) or [FULL] * count,
        feed_forward=sparse_or_dense(c, sparse, dense_layers(c, 0)),
        rotates_each_kind=True,
    )


def _ernie_moe(c: Fields) -> ModelSpec:
    bias, count = c.flag("use_bias"), c.layers()
    hidden, num_experts = c.size("hidden_size"), c.size("moe_num_experts")
    sparse = routed_experts(
        c,
        width=c.size("moe_intermediate_size"),
        num_experts=num_experts,
        experts_per_token=c.size("moe_k"),
        num_shared=c.count("moe_num_shared_experts"),
        routing="softmax_exact",
        shared_first=True,
        other_params=num_experts,  # added to the scores before some are chosen
    )
    if sparse.shared is not None and bias:
        linears = tuple(replace(linear, bias=True) for linear in sparse.shared.linears)
        sparse = replace(sparse, shared=replace(sparse.shared, linears=linears))
    dense = mlp(
        hidden=hidden, width=c.size("intermediate_size"), activation=c.text("hidden_act"), bias=bias
    )
    first, every = c.count("moe_layer_start_index"), c.size("moe_layer_interval")
    end = c.get("moe_layer_end_index")
    last = count - 1 if end in (None, -1) else c.count("moe_layer_end_index")

    def choose(number: int) -> tuple[Mlp | None, Moe | None]:
        is_sparse = (number + 1) % every == 0 and first <= number <= last
        return (None, sparse) if is_sparse else (dense, None)

    style = Style(qkv_bias=bias, out_bias=bias, head_bias=bias, wide_rotation="inline")
    return decoder(c, style, feed_forward=choose)


def _minimax_m2(c: Fields) -> ModelSpec:
    rotated = c.size_or_none("rotary_dim")
    if rotated is not None:  # the hub's files count elements, transformers a fraction of the head
        fraction = rotated / c.size("head_dim")
        c = replace(c, defaults={**c.defaults, "partial_rotary_factor": fraction})
    sparse = experts_in_every_layer(c, routing="sigmoid_wide")
    return decoder(c, Style(qk_norm="width"), feed_forward=sparse)


def _hunyuan_moe(c: Fields) -> ModelSpec:
    bias, hidden = c.flag("attention_bias"), c.size("hidden_size")
    num_experts, count = c.size("num_experts"), c.layers()
    chosen = c.items("moe_topk", length=count) if isinstance(c.get("moe_topk"), list) else None

    def experts(number: int) -> tuple[Mlp | None, Moe | None]:
        sparse = routed_experts(
            c,
            width=c.size("intermediate_size"),
            num_experts=num_experts,
            experts_per_token=c.size("moe_topk") if chosen is None else int(chosen[number]),
            num_shared=1,
            routing="softmax",
            shared_first=True,
            router=Linear(
                name="wg", in_features=hidden, out_features=num_experts, reads="router_in"
            ),
        )
        return None, sparse

    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    )
    return decoder(c, style, feed_forward=experts)


def _flex_olmo(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="width",
        post_norm=True,
        norm_kind="rms_wide",
        tables="fp32_narrowed",
        layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    return decoder(c, style, feed_forward=experts_in_every_layer(c))


def _cohere2_moe(c: Fields) -> ModelSpec:
    bias, count = c.flag("attention_bias"), c.layers()
    first = c.count("first_k_dense_replace")
    types = c.items("layer_types", length=count)
    if types is None:  # the dense layers alternate by a number of their own
        numbers = (c.size("prefix_dense_sliding_window_pattern"), c.size("sliding_window_pattern"))
        places = [(numbers[0], i) if i < first else (numbers[1], i - first) for i in range(count)]
        types = [SLIDING if (place + 1) % every else FULL for every, place in places]
    dense = dense_layers(c, first)
    rotates_dense = c.size("prefix_dense_sliding_window_pattern") == 1
    sparse = routed_experts(
        c,
        width=c.size("intermediate_size"),
        num_experts=c.size("num_experts"),
        experts_per_token=c.size("num_experts_per_tok"),
        num_shared=c.count("num_shared_experts"),
        routing="chosen",
    )
    is_rms = c.number_or_none("rms_norm_eps") is not None
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        norm_kind="rms" if is_rms else "layer_steps",
        layer_norms=("input_layernorm",),
        parallel=True,
        wide_rotation="named",
    )
    kind = types
    return decoder(
        c,
        style,
        layer_types=kind,
        has_rope=lambda i: kind[i] == SLIDING or (dense[i] and rotates_dense),
        feed_forward=sparse_or_dense(c, sparse, dense, width_key="prefix_dense_intermediate_size"),
        scales_logits=True,
    )


BUILDERS = {
    "dots1": _dots1,
    "exaone_moe": _exaone_moe,
    "hy_v3": _hy_v3,
    "solar_open": _solar_open,
    "mellum": _mellum,
    "ernie4_5_moe": _ernie_moe,
    "minimax_m2": _minimax_m2,
    "hunyuan_v1_moe": _hunyuan_moe,
    "flex_olmo": _flex_olmo,
    "cohere2_moe": _cohere2_moe,
}
