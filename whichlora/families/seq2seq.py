"""Encoder-decoders with relative positions: T5 and its variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import encoder_decoder, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Attention, Embedding, Layer, ModelSpec

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
_T5_KEYS = {
    "hidden_size": ("d_model",),
    "intermediate_size": ("d_ff",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
}
SYNONYMS = {
    "t5": _T5_KEYS,
    "mt5": _T5_KEYS,
    "umt5": _T5_KEYS,
}


def _t5(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    heads, head_dim = c.size("num_attention_heads"), c.size("d_kv")
    buckets = c.size("relative_attention_num_buckets")
    in_every_layer = c.text("model_type") == "umt5"
    dropout = c.probability("dropout_rate")

    feed_forward = c.text("feed_forward_proj")
    gated = feed_forward.startswith("gated-")
    activation = feed_forward.removeprefix("gated-")
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation="gelu_new" if feed_forward == "gated-gelu" else activation,
        names=("wi_0", "wi_1", "wo") if gated else ("wi", "wo"),
    )
    *into, out = block.linears
    out = replace(out, quantisable=False)  # T5PreTrainedModel keeps "wo" in fp32 in fp16 models
    block = replace(block, dropout=dropout > 0, linears=(*into, out))

    def attention(*, causal: bool, biased: bool = False, cross: bool = False) -> Attention:
        return softmax_attention(
            hidden=hidden,
            heads=heads,
            head_dim=head_dim,
            names=("q", "k", "v"),
            out_name="o",
            position="relative",  # cross attention adds a bias of zeros
            biases_each_layer=in_every_layer,
            flash=False,
            wide_softmax=False,
            causal=causal,
            cross=cross,
            cached=causal or cross,
            # the first layer of a stack owns the bias table that all of its layers add
            other_params=buckets * heads if biased else 0,
            dropout=dropout,
        )

    def layer(number: int, *, causal: bool) -> Layer:
        blocks = [attention(causal=causal, biased=number == 0 or in_every_layer)]
        if causal:
            blocks.append(attention(causal=False, cross=True))
        names = ["layer_norm"] * (len(blocks) + 1)
        return Layer(
            attentions=tuple(blocks),
            mlp=block,
            norms=norms(names, width=hidden, kind="rms_mixed"),
            dropouts=(hidden,) * len(names) if dropout else (),
        )

    num_encoder = c.layers()
    num_decoder = c.layers("num_decoder_layers", fallback=num_encoder)
    notes: tuple[str, ...] = ()
    if not c.flag("tie_word_embeddings"):
        notes = (
            f"counted with the head tied, as transformers builds it; a released checkpoint with "
            f"its own lm_head holds {vocab * hidden} more parameters",
        )
    return encoder_decoder(
        c,
        [layer(i, causal=False) for i in range(num_encoder)],
        [layer(i, causal=True) for i in range(num_decoder)],
        tied=True,
        embeddings=(Embedding(name="shared", rows=vocab, width=hidden),),
        final_norms=norms(["final_layer_norm"] * 2, width=hidden, kind="rms_mixed"),
        embedding_dropouts=(hidden,) * 2 if dropout else (),
        final_dropouts=(hidden,) * 2 if dropout else (),
        notes=notes,
    )


BUILDERS = {"t5": _t5, "mt5": _t5, "umt5": _t5}
