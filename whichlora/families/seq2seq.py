"""Encoder-decoders with relative positions: T5 and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.families.blocks import encoder_decoder, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, Mlp

_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "hidden_size": 512,
    "d_kv": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "relative_attention_num_buckets": 32,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "dropout_rate": 0.1,
}
_MT5 = _T5 | {
    "vocab_size": 250112,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _MT5,
    "umt5": _MT5,
}
T5_KEYS = {
    "hidden_size": ("d_model",),
    "intermediate_size": ("d_ff",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
}
SYNONYMS = {
    "t5": T5_KEYS,
    "mt5": T5_KEYS,
    "umt5": T5_KEYS,
}


def t5_mlp(c: Fields, *, activation: str, gated: bool) -> Mlp:
    block = mlp(
        hidden=c.size("hidden_size"),
        width=c.size("intermediate_size"),
        activation=activation,
        names=("wi_0", "wi_1", "wo") if gated else ("wi", "wo"),
    )
    return replace(block, dropout=c.probability("dropout_rate") > 0)


def projected_feed_forward(c: Fields) -> Mlp:
    """The MLP that `feed_forward_proj` names."""
    feed_forward = c.text("feed_forward_proj")
    activation = feed_forward.removeprefix("gated-")
    return t5_mlp(
        c,
        activation="gelu_new" if feed_forward == "gated-gelu" else activation,
        gated=feed_forward.startswith("gated-"),
    )


def t5_attention(
    c: Fields, *, causal: bool = False, cross: bool = False, biased: bool = False, **overrides: Any
) -> Attention:
    """Attention with a bias for each distance.

    Args:
        biased: it owns the table of biases that all layers of its stack add.
        overrides: further fields of `Attention`.
    """
    heads = c.size("num_attention_heads")
    fields: dict[str, Any] = {
        "position": "relative",  # cross attention adds a bias of zeros
        "flash": False,
        "wide_softmax": False,
        "other_params": c.size("relative_attention_num_buckets") * heads if biased else 0,
        **overrides,
    }
    return softmax_attention(
        hidden=c.size("hidden_size"),
        heads=heads,
        head_dim=c.size("d_kv"),
        names=("q", "k", "v"),
        out_name="o",
        causal=causal,
        cross=cross,
        cached=causal or cross,
        dropout=c.probability("dropout_rate"),
        **fields,
    )


def t5_layer(c: Fields, *attentions: Attention, **feed_forward: Any) -> Layer:
    """One layer; `feed_forward` is its `mlp` or its `moe`."""
    hidden, names = c.size("hidden_size"), ["layer_norm"] * (len(attentions) + 1)
    return Layer(
        attentions=attentions,
        norms=norms(names, width=hidden, kind="rms_mixed"),
        dropouts=(hidden,) * len(names) if c.probability("dropout_rate") else (),
        **feed_forward,
    )


def t5_model(c: Fields, layer: Callable[[int, bool], Layer], **overrides: Any) -> ModelSpec:
    """Two stacks that read one table of tokens.

    Args:
        layer: the number of a layer, and whether it is one of the decoder -> the layer.
        overrides: further fields of `ModelSpec`.
    """
    hidden, num_encoder = c.size("hidden_size"), c.layers()
    num_decoder = c.layers("num_decoder_layers", fallback=num_encoder)
    dropouts = (hidden,) * 2 if c.probability("dropout_rate") else ()
    return encoder_decoder(
        c,
        [layer(number, False) for number in range(num_encoder)],
        [layer(number, True) for number in range(num_decoder)],
        tied=True,
        embeddings=(Embedding(name="shared", rows=c.size("vocab_size"), width=hidden),),
        final_norms=norms(["final_layer_norm"] * 2, width=hidden, kind="rms_mixed"),
        embedding_dropouts=dropouts,
        final_dropouts=dropouts,
        **overrides,
    )


def tied_head_notes(c: Fields) -> tuple[str, ...]:
    """What to say of a class whose head is tied whatever its config says."""
    if c.flag("tie_word_embeddings"):
        return ()
    return (
        f"counted with the head tied, as transformers builds it; a released checkpoint with "
        f"its own lm_head holds {c.size('vocab_size') * c.size('hidden_size')} more parameters",
    )


def _t5(c: Fields) -> ModelSpec:
    in_every_layer = c.text("model_type") == "umt5"
    block = projected_feed_forward(c)
    *into, out = block.linears
    out = replace(out, quantisable=False)  # T5PreTrainedModel keeps "wo" in fp32 in fp16 models
    block = replace(block, linears=(*into, out))

    def layer(number: int, decodes: bool) -> Layer:
        attention = partial(t5_attention, c, biases_each_layer=in_every_layer)
        own = attention(causal=decodes, biased=number == 0 or in_every_layer)
        blocks = (own, attention(cross=True)) if decodes else (own,)
        return t5_layer(c, *blocks, mlp=block)

    return t5_model(c, layer, notes=tied_head_notes(c))


BUILDERS = {"t5": _t5, "mt5": _t5, "umt5": _t5}
