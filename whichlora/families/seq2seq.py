"""Encoder-decoders: T5 and its variants, BART and mBART."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.architecture import Attention, Embedding, Layer, Linear, Mlp, ModelSpec
from whichlora.families.blocks import group, mlp, norms, softmax_attention
from whichlora.families.fields import Fields

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
_BART: dict[str, Any] = {
    "vocab_size": 50265,
    "hidden_size": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "dropout": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _MT5,
    "umt5": _MT5,
    "bart": _BART,
    "mbart": _BART,
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
    "bart": {"hidden_size": ("d_model",)},
    "mbart": {"hidden_size": ("d_model",)},
}
POSITION_OFFSET = 2  # BartLearnedPositionalEmbedding keeps two rows for padding


def _model(
    c: Fields, encoder: list[Layer], decoder: list[Layer], *, tied: bool, **rest: Any
) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    return ModelSpec(
        name=c.name,
        model_type=c.text("model_type"),
        task="seq2seq-lm",
        hidden_size=hidden,
        vocab_size=vocab,
        groups=group(encoder, stack="encoder") + group(decoder, stack="decoder"),
        head=Linear(name="lm_head", in_features=hidden, out_features=vocab, reads="head_in"),
        head_tied=tied,
        dtype=c.dtype,
        config=c.values,
        **rest,
    )


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
            kv_heads=heads,
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
    return _model(
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


def _bart(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")

    def feed_forward(side: str) -> Mlp:
        return mlp(
            hidden=hidden,
            width=c.size(f"{side}_ffn_dim"),
            activation=c.text("activation_function"),
            names=("fc1", "fc2"),
            bias=True,
        )

    def attention(side: str, *, cross: bool = False) -> Attention:
        heads, decodes = c.size(f"{side}_attention_heads"), side == "decoder"
        return softmax_attention(
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            out_name="out_proj",
            qkv_bias=True,
            out_bias=True,
            position="none",
            causal=decodes and not cross,
            cross=cross,
            cached=decodes,
            dropout=c.probability("attention_dropout"),
            wide_softmax=False,
        )

    def layer(side: str) -> Layer:
        blocks, names = [attention(side)], ["self_attn_layer_norm"]
        if side == "decoder":
            blocks.append(attention(side, cross=True))
            names.append("encoder_attn_layer_norm")
        return Layer(
            attentions=tuple(blocks),
            mlp=feed_forward(side),
            norms=norms((*names, "final_layer_norm"), width=hidden, kind="layer", bias=True),
            post_norm=c.text("model_type") == "bart",
            dropouts=(hidden,) * (len(names) + 1) if c.probability("dropout") else (),
        )

    positions = c.size("max_position_embeddings")
    rows = positions + POSITION_OFFSET
    both = norms(["layernorm_embedding"] * 2, width=hidden, kind="layer", bias=True)
    spec = _model(
        c,
        [layer("encoder")] * c.layers("encoder_layers"),
        [layer("decoder")] * c.layers("decoder_layers"),
        tied=c.flag("tie_word_embeddings"),
        embeddings=(
            Embedding(name="shared", rows=vocab, width=hidden),
            Embedding(name="embed_positions", rows=rows, width=hidden),
            Embedding(name="embed_positions", rows=rows, width=hidden),
        ),
        embedding_norms=both,
        embedding_dropouts=(hidden,) * 2 if c.probability("dropout") else (),
        max_position_embeddings=positions,
    )
    if c.text("model_type") == "mbart":  # pre-norm, so each stack ends with a norm
        last = norms(["layer_norm"] * 2, width=hidden, kind="layer", bias=True)
        spec = replace(spec, final_norms=last)
    return spec


BUILDERS = {"t5": _t5, "mt5": _t5, "umt5": _t5, "bart": _bart, "mbart": _bart}
