"""GPT-2 and its relatives: GPT-BigCode, GPT-Neo, GPT-J, CodeGen, GPT-NeoX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import causal_lm, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Layer, Linear, Mlp

_GPT2 = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "intermediate_size": None,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
}
_GPTJ = _GPT2 | {
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2 | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_neo": _GPT2
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "window_size": 256,
        "attention_types": [[["global", "local"], 12]],
    },
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
    },
}
_GPT2_KEYS = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "intermediate_size": ("n_inner",),
}
SYNONYMS = {
    "gpt2": _GPT2_KEYS,
    "gpt_bigcode": _GPT2_KEYS,
    "gptj": _GPT2_KEYS,
    "codegen": _GPT2_KEYS,
    "gpt_neo": {"num_hidden_layers": ("num_layers",), "num_attention_heads": ("num_heads",)},
    "gpt_neox": {"partial_rotary_factor": ("rotary_pct",)},
}


# Keys of dropouts that are `nn.Dropout` modules, which a trainer may turn off; the others are
# numbers that the forward reads. Source: transformers 5.23, the families' modeling files.
DROPOUT_MODULES = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_bigcode": ("resid_pdrop", "embd_pdrop"),
    "gptj": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "codegen": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("hidden_dropout",),
}


def _transposed(linears: Sequence[Linear]) -> tuple[Linear, ...]:
    """As `Conv1D` holds them; GPT-BigCode has plain matrices."""
    return tuple(replace(linear, transposed=True) for linear in linears)


def _gpt2(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    one_kv_head = c.flag("multi_query")  # gpt_bigcode only
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=1 if one_kv_head else heads,
        names=("c_attn",),
        out_name="c_proj",
        qkv_bias=True,
        out_bias=True,
        position="none",
        dropout=c.probability("attn_pdrop"),
    )
    block = _mlp(c, names=("c_fc", "c_proj"))
    if c.text("model_type") == "gpt2":
        linears = _transposed(attention.linears)
        attention = replace(attention, linears=linears, wide_softmax=False)
        block = replace(block, linears=_transposed(block.linears))
    layer = Layer(
        attentions=(attention,),
        mlp=block,
        norms=_layer_norms(("ln_1", "ln_2"), hidden),
        dropouts=(hidden,) * 2 if c.probability("resid_pdrop") else (),
        names_attention=True,
    )
    if c.text("model_type") == "gpt2":
        return _absolute(c, [layer] * c.layers(), older_buffers=_masks(c, until="5.2"))
    return _absolute(
        c,
        [layer] * c.layers(),
        buffer_bytes=c.size("max_position_embeddings") ** 2,  # a boolean causal mask
        caches_checkpointed_before="4.53",
    )


def _gpt_neo(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    block = _mlp(c, names=("c_fc", "c_proj"))
    kinds = _attention_kinds(c)
    layers = []
    for number in range(c.layers()):
        attention = softmax_attention(
            hidden=hidden,
            heads=heads,
            out_name="out_proj",
            out_bias=True,
            position="none",
            sdpa="eager",
            eager="fp32",
            sliding_window=c.size("window_size") if kinds[number] == "local" else None,
        )
        layers.append(
            Layer(
                attentions=(attention,),
                mlp=block,
                norms=_layer_norms(("ln_1", "ln_2"), hidden),
                names_attention=True,
                returns_probabilities=True,
            )
        )
    note = "transformers masks the local layers but caches them at full length"
    mask_bytes = c.size("max_position_embeddings") ** 2  # boolean, in every layer
    return _absolute(c, layers, notes=(note,), buffer_bytes=mask_bytes * len(layers))


def _attention_kinds(c: Fields) -> list[str]:
    """The kind of each layer, global or local, from `[[["global", "local"], 12]]`."""
    count, value = c.layers(), c.get("attention_types")
    try:
        kinds = [str(kind) for kinds, times in value for kind in list(kinds) * int(times)]
    except (TypeError, ValueError, OverflowError, MemoryError):
        kinds = []
    if len(kinds) < count:
        raise ConfigError(
            f"{c.name}: attention_types is {value!r}, not kinds and how often they repeat, "
            f"such as [[['global', 'local'], {count // 2}]]"
        )
    return kinds[:count]


def _gptj(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    fused = c.text("model_type") == "codegen"
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        names=("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj"),
        out_name="out_proj",
        rotary_dim=c.size("rotary_dim", fallback=hidden // heads),
        sdpa="eager",
        flash=not fused,  # GPT-J does, CodeGen does not
        projection="copied" if fused else "plain",
        tables="fp32" if fused else "stream",
        names_parts=True,
        eager="fp32",
        dropout=c.probability("attn_pdrop"),
    )
    block = _mlp(c, names=("fc_in", "fc_out"), reads="attn_in")  # one norm feeds both
    layer = Layer(
        attentions=(attention,),
        mlp=block,
        norms=_layer_norms(("ln_1",), hidden),
        parallel=True,
        returns_probabilities=True,
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=_layer_norms(("ln_f",), hidden),
        embedding_name="wte",
        head_bias=True,
        older_buffers=_masks(c, until="4.45"),
    )


def _gpt_neox(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    bias = c.flag("attention_bias")
    rotated = int(hidden // heads * c.rotary_fraction)
    # cosines and sines of each attention were fp32, whatever the model was
    tables = 2 * 4 * c.size("max_position_embeddings") * rotated * c.layers()
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        names=("query_key_value",),
        out_name="dense",
        qkv_bias=bias,
        out_bias=bias,
        rotary_dim=rotated,
        dropout=c.probability("attention_dropout"),
        joins_rotation=True,
    )
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        names=("dense_h_to_4h", "dense_4h_to_h"),
        bias=True,
    )
    layer = Layer(
        attentions=(attention,),
        mlp=block,
        norms=_layer_norms(("input_layernorm", "post_attention_layernorm"), hidden),
        parallel=c.flag("use_parallel_residual"),
        dropouts=(hidden,) * 2 if c.probability("hidden_dropout") else (),
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=_layer_norms(("final_layer_norm",), hidden),
        embedding_name="embed_in",
        rotary_tables_before="0",
        older_buffers=(*_masks(c, until="4.49"), ("4.45", tables)),
    )


def _masks(c: Fields, *, until: str) -> tuple[tuple[str, int], ...]:
    """A boolean causal mask in each attention, before a release of transformers."""
    return ((until, c.size("max_position_embeddings") ** 2 * c.layers()),)


def _mlp(c: Fields, *, names: Sequence[str], reads: str = "mlp_in") -> Mlp:
    """The MLP of OpenAI's GPT: four times as wide as the hidden state unless the config says."""
    hidden = c.size("hidden_size")
    return mlp(
        hidden=hidden,
        width=c.size("intermediate_size", fallback=4 * hidden),
        activation=c.text("activation_function"),
        names=names,
        bias=True,
        reads=reads,
    )


def _layer_norms(names: Sequence[str], hidden: int) -> Any:
    return norms(names, width=hidden, kind="layer", bias=True)


def _absolute(c: Fields, layers: Sequence[Layer], **spec: Any) -> ModelSpec:
    """A decoder with learned absolute positions."""
    hidden = c.size("hidden_size")
    return causal_lm(
        c,
        layers,
        final_norms=_layer_norms(("ln_f",), hidden),
        embeddings=(
            Embedding(name="wte", rows=c.size("vocab_size"), width=hidden),
            Embedding(name="wpe", rows=c.size("max_position_embeddings"), width=hidden),
        ),
        embedding_dropouts=(hidden,) if c.probability("embd_pdrop") else (),
        **spec,
    )


BUILDERS = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "codegen": _gptj,
    "gpt_neox": _gpt_neox,
}
