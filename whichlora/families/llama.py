"""Llama and the dense decoders that follow its shape, each by what differs from Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.decoder import (
    FULL,
    PRE_NORM,
    SLIDING,
    Style,
    decoder,
    every_nth_full,
    late_sliding,
)
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, Norm

_PLAIN = ("up_proj", "down_proj")
_POST_NORM = ("post_attention_layernorm", "post_feedforward_layernorm")

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2_VL = QWEN2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}
GLM = LLAMA | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
DEFAULTS = {
    "llama": LLAMA,
    "internlm3": LLAMA | {"vocab_size": 128512, "max_position_embeddings": 32768},
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "ministral3": MISTRAL
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": None,
    },
    "qwen2": QWEN2,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": QWEN2 | {"head_dim": 128},
    "qwen3_vl_text": QWEN2 | {"head_dim": 128, "max_position_embeddings": 128000},
    "granite": LLAMA,
    "smollm3": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "olmo": LLAMA | {"vocab_size": 50304},
    "olmo2": LLAMA | {"vocab_size": 50304},
    "olmo3": LLAMA | {"vocab_size": 50304, "sliding_window": 4096},
    "glm": GLM,
    "glm4": GLM,
    "glm4v_text": LLAMA
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "attention_bias": True,
    },
    "phi3": LLAMA
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
    },
    "helium": LLAMA
    | {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "arcee": LLAMA
    | {
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
    },
    "apertus": LLAMA
    | {
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
    },
    "exaone4": LLAMA
    | {
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "ernie4_5": LLAMA
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "seed_oss": LLAMA
    | {
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
    "hunyuan_v1_dense": LLAMA | {"vocab_size": 290943},
    "iquestcoder": LLAMA
    | {
        "vocab_size": 76800,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    "hyperclovax": LLAMA | {"use_post_norm": True},
    "nanochat": LLAMA
    | {
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    },
    "bitnet": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "hidden_act": "relu2",
    },
    "cwm": LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
    },
}


GRANITE: dict[str, Any] = {
    "scales_logits": True,
    "embeds_in_steps": True,
    "layer_fields": {"scales_sums": True},
}


def _llama(c: Fields, **spec: Any) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias"))
    return decoder(c, style, **spec)


def _granite(c: Fields) -> ModelSpec:
    return _llama(c, **GRANITE)


def _internlm3(c: Fields) -> ModelSpec:
    bias = c.flag("bias")
    return decoder(c, Style(qkv_bias=c.flag("qkv_bias"), out_bias=bias, mlp_bias=bias))


def _mistral(c: Fields) -> ModelSpec:
    return decoder(c)


def _ministral3(c: Fields) -> ModelSpec:
    return decoder(c, Style(has_temperature=True))


def _ministral(c: Fields) -> ModelSpec:
    listed = c.items("layer_types", length=c.layers())
    return decoder(c, layer_types=listed)


def _qwen2(c: Fields) -> ModelSpec:
    return decoder(c, Style(qkv_bias=True), layer_types=late_sliding(c))


def _qwen3(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(qkv_bias=bias, out_bias=bias, qk_norm="head")
    return decoder(c, style, layer_types=late_sliding(c))


def _smollm3(c: Fields) -> ModelSpec:
    count, bias = c.layers(), c.flag("attention_bias")
    rope = c.items("no_rope_layers", length=count)  # 1 means "with rope", the name notwithstanding
    if rope is None:
        interval = c.size("no_rope_layer_interval")
        rope = [(i + 1) % interval != 0 for i in range(count)]
    sliding = c.items("layer_types", length=count)
    if sliding is None:
        sliding = [SLIDING if c.flag("use_sliding_window") and not x else FULL for x in rope]
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias")),
        layer_types=sliding,
        has_rope=lambda i: bool(rope[i]),
    )


def _olmo(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(
        qkv_bias=bias, out_bias=bias, norm_kind="layer", norm_weight=False, tables="fp32_narrowed"
    )
    return decoder(c, style)


def _olmo2_style(c: Fields) -> Style:
    bias = c.flag("attention_bias")
    return Style(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="width",
        post_norm=True,
        norm_kind="rms_wide",
        layer_norms=_POST_NORM,
        tables="fp32_narrowed",
    )


def _olmo2(c: Fields) -> ModelSpec:
    return decoder(c, _olmo2_style(c))


def _olmo3(c: Fields) -> ModelSpec:
    types = every_nth_full(c, 4)
    return decoder(c, _olmo2_style(c), layer_types=types, rotates_each_kind=True)


def _glm_style(c: Fields) -> Style:
    return Style(
        qkv_bias=c.flag("attention_bias"),
        mlp_names=("gate_up_proj", "down_proj"),
        fused_gate_up=True,
    )


def _glm(c: Fields) -> ModelSpec:
    return decoder(c, _glm_style(c))


def _glm4(c: Fields) -> ModelSpec:
    layer_norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    return decoder(c, replace(_glm_style(c), layer_norms=layer_norms))


def _phi3(c: Fields) -> ModelSpec:
    style = Style(
        qkv_names=("qkv_proj",),
        mlp_names=("gate_up_proj", "down_proj"),
        fused_gate_up=True,
        joins_rotation=True,
    )
    return decoder(c, style)


def _helium(c: Fields) -> ModelSpec:
    style = Style(
        qkv_bias=c.flag("attention_bias"), mlp_bias=c.flag("mlp_bias"), norm_kind="rms_wide"
    )
    return decoder(c, style)


def _arcee(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    return decoder(
        c,
        Style(qkv_bias=bias, out_bias=bias, mlp_names=_PLAIN, mlp_bias=c.flag("mlp_bias")),
    )


def _apertus(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_names=_PLAIN,
        qk_norm="head",
        layer_norms=("attention_layernorm", "feedforward_layernorm"),
    )
    xielu = 2 if c.text("hidden_act") == "xielu" else 0  # alpha_p and alpha_n of the activation
    return decoder(c, style, layer_fields={"other_params": xielu})


def exaone_windows(c: Fields) -> dict[str, Any]:
    """Of `decoder`: with a window, only the sliding layers rotate positions."""
    if c.size_or_none("sliding_window") is None:
        return {}
    types = c.items("layer_types", length=c.layers())
    if types is None:  # beside them the pattern may be a text, "LLLG" in EXAONE-4.0-32B
        types = every_nth_full(c, c.count("sliding_window_pattern"))
    return {"layer_types": types, "has_rope": lambda number: types[number] == SLIDING}


def _exaone4(c: Fields) -> ModelSpec:
    style = Style(qk_norm="head", layer_norms=_POST_NORM, post_norm=True)
    return decoder(c, style, **exaone_windows(c))


def _ernie(c: Fields) -> ModelSpec:
    bias = c.flag("use_bias")
    return decoder(c, Style(qkv_bias=bias, out_bias=bias, mlp_bias=bias))


def _seed_oss(c: Fields) -> ModelSpec:
    return decoder(
        c,
        Style(
            qkv_bias=c.flag("attention_bias"),
            out_bias=c.flag("attention_out_bias"),
            mlp_bias=c.flag("mlp_bias"),
        ),
    )


def _hunyuan(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    return decoder(
        c,
        Style(
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            qk_norm_names=("query_layernorm", "key_layernorm"),
        ),
    )


def _hyperclovax(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    names = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.flag("mlp_bias"),
        layer_norms=names if c.flag("use_post_norm") else PRE_NORM,
    )
    return decoder(c, style, **GRANITE)


def _nanochat(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_names=("fc1", "fc2"),
        norm_kind="rms_wide",
        norm_weight=False,
        qk_norm="head",
    )
    spec = decoder(c, style)
    return replace(spec, embedding_norms=spec.final_norms)  # the same before the layers


def _cwm(c: Fields) -> ModelSpec:
    count = c.layers()
    listed = c.items("layer_types", length=count)
    layer_types = listed or [SLIDING if i % 4 else FULL for i in range(count)]
    return decoder(c, Style(mlp_bias=c.flag("mlp_bias")), layer_types=layer_types)


def _bitnet(c: Fields) -> ModelSpec:
    """A norm before each of the two output projections."""
    bias = c.flag("attention_bias")
    spec = decoder(c, Style(qkv_bias=bias, out_bias=bias))
    out_norm = Norm(name="attn_sub_norm", kind="rms", width=c.size("hidden_size"))
    inner = Norm(name="ffn_sub_norm", kind="rms", width=c.size("intermediate_size"))

    def with_norms(layer: Layer) -> Layer:
        (attention,), block = layer.attentions, layer.mlp
        assert block is not None
        return replace(
            layer,
            attentions=(replace(attention, out_norm=out_norm),),
            mlp=replace(block, norms=(inner,)),
        )

    return spec.with_layers(with_norms)


DROPOUT_MODULES = {"phi3": ("resid_pdrop",)}
BUILDERS = {
    "llama": _llama,
    "internlm3": _internlm3,
    "mistral": _mistral,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen3": _qwen3,
    "qwen3_vl_text": _qwen3,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "glm": _glm,
    "glm4": _glm4,
    "glm4v_text": _glm4,
    "phi3": _phi3,
    "helium": _helium,
    "arcee": _arcee,
    "apertus": _apertus,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "hunyuan_v1_dense": _hunyuan,
    "bitnet": _bitnet,
    "cwm": _cwm,
    "iquestcoder": _llama,
    "hyperclovax": _hyperclovax,
    "nanochat": _nanochat,
}
