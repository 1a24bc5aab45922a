"""Decoders of Llama's shape with LayerNorm: StarCoder 2, StableLM, Nemotron, Cohere, Phi, …."""

from __future__ import annotations

from whichlora.families.decoder import SLIDING, Style, decoder, every_nth_full
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import ModelSpec

COHERE = LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "use_qk_norm": False,
}
DEFAULTS = {
    "starcoder2": LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    "stablelm": LLAMA
    | {
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
    },
    "nemotron": LLAMA
    | {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
    },
    "jais2": LLAMA
    | {
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "head_dim": 128,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "cohere": COHERE,
    "cohere2": COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
    "phi": LLAMA
    | {
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    "persimmon": LLAMA
    | {
        "vocab_size": 262144,
        "intermediate_size": 16384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "hidden_act": "relu2",
        "max_position_embeddings": 16384,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    },
}


def _starcoder2(c: Fields) -> ModelSpec:
    bias = c.flag("use_bias")
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        mlp_names=("c_fc", "c_proj"),
        norm_kind="layer",
        norm_bias=True,
    )
    return decoder(c, style)


def _stablelm(c: Fields) -> ModelSpec:
    c = c.without("head_dim")
    parallel = c.flag("use_parallel_residual")
    style = Style(
        qkv_bias=c.flag("use_qkv_bias"),
        norm_kind="layer",
        norm_bias=True,
        layer_norms=("input_layernorm",)
        if parallel
        else ("input_layernorm", "post_attention_layernorm"),
        qk_norm="per_head" if c.flag("qk_layernorm") else "none",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        names_parts=True,
        parallel=parallel,
    )
    # the code of its blocks gives neither another name
    return decoder(c, style, layer_fields={"names_norm": True, "names_attention": True})


def _nemotron(c: Fields) -> ModelSpec:
    bias = c.flag("attention_bias")
    is_jais = c.text("model_type") == "jais2"
    style = Style(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.flag("mlp_bias"),
        mlp_names=("up_proj", "down_proj"),
        norm_kind="layer" if is_jais else "layer_narrow",
        norm_bias=True,
    )
    return decoder(c, style)


def _cohere_style(c: Fields) -> Style:
    bias = c.flag("attention_bias")
    return Style(
        qkv_bias=bias,
        out_bias=bias,
        norm_kind="layer_steps",  # CohereLayerNorm is no nn.LayerNorm: steps in fp32, no bias
        layer_norms=("input_layernorm",),
        qk_norm="per_head" if c.flag("use_qk_norm") else "none",
        parallel=True,
        wide_rotation="named",
    )


def _cohere(c: Fields) -> ModelSpec:
    return decoder(c, _cohere_style(c), scales_logits=True)


def _cohere2(c: Fields) -> ModelSpec:
    types = every_nth_full(c, c.size("sliding_window_pattern"))
    return decoder(
        c,
        _cohere_style(c),
        layer_types=types,
        has_rope=lambda i: types[i] == SLIDING,
        scales_logits=True,
    )


def _phi(c: Fields) -> ModelSpec:
    style = Style(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        out_name="dense",
        mlp_names=("fc1", "fc2"),
        norm_kind="layer",
        norm_bias=True,
        layer_norms=("input_layernorm",),
        final_norm="final_layernorm",
        qk_norm="head" if c.flag("qk_layernorm") else "none",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        names_parts=True,
        qk_norm_bias=True,
        parallel=True,
    )
    return decoder(c, style)


def _persimmon(c: Fields) -> ModelSpec:
    c = c.without("head_dim", "num_key_value_heads")
    style = Style(
        qkv_names=("query_key_value",),
        out_name="dense",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_kind="layer",
        norm_bias=True,
        final_norm="final_layernorm",
        qk_norm="head" if c.flag("qk_layernorm") else "none",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        names_parts=True,
        qk_norm_bias=True,
    )
    return decoder(c, style)


DROPOUT_MODULES = {
    "stablelm": ("hidden_dropout",),
    "phi": ("resid_pdrop", "embd_pdrop"),
    "persimmon": ("hidden_dropout", "attention_dropout"),
}
BUILDERS = {
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "jais2": _nemotron,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "phi": _phi,
    "persimmon": _persimmon,
}
