"""T5Gemma: two stacks of Gemma 2 layers, the decoder's with cross attention between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import encoder_decoder, mlp, norms, softmax_attention
from whichlora.families.decoder import FULL, every_nth_full
from whichlora.families.fields import Fields
from whichlora.families.gemma import GEMMA2
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, Linear

DEFAULTS: dict[str, dict[str, Any]] = {
    "t5gemma": {"vocab_size": 256000, "tie_word_embeddings": True, "dropout_rate": 0.0}
}


def _attention(c: Fields, *, dropout: float, window: int | None, side: str) -> Attention:
    """`side`: "encoder", "decoder" or "cross"."""
    crosses, head_dim, bias = side == "cross", c.size("head_dim"), c.flag("attention_bias")
    rotation: dict[str, Any] = {"position": "rope", "rotary_dim": head_dim}
    return softmax_attention(
        hidden=c.size("hidden_size"),
        heads=c.size("num_attention_heads"),
        kv_heads=c.size("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        causal=side == "decoder",
        cross=crosses,
        cached=side != "encoder",
        dropout=dropout,
        sliding_window=window,
        softcap=c.number_or_none("attn_logit_softcapping"),
        sdpa="eager",  # the class has no SDPA, soft cap or not
        **({"position": "none"} if crosses else rotation),
    )


def _layers(c: Fields, side: str, *, dropout: float, attention_dropout: float) -> list[Layer]:
    hidden = c.size("hidden_size")
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_activation"),
        dropout=dropout > 0,
    )
    names = ["self_attn", "feedforward"]
    if side == "decoder":
        names.insert(1, "cross_attn")
    both = [f"{place}_{name}_layernorm" for name in names for place in ("pre", "post")]

    def layer(kind: str) -> Layer:
        window = None if kind == FULL else c.size("sliding_window")
        attentions = [_attention(c, dropout=attention_dropout, window=window, side=side)]
        if side == "decoder":
            attentions.append(_attention(c, dropout=attention_dropout, window=None, side="cross"))
        return Layer(
            attentions=tuple(attentions),
            mlp=block,
            norms=norms(both, width=hidden, kind="rms_offset"),
            dropouts=(hidden,) * len(names) if dropout else (),
        )

    return [layer(kind) for kind in every_nth_full(c, 2)]


def _t5gemma(c: Fields) -> ModelSpec:
    encoder, decoder = (c.part(side, defaults=GEMMA2) for side in ("encoder", "decoder"))
    hidden, vocab = decoder.size("hidden_size"), decoder.size("vocab_size")
    if encoder.size("hidden_size") != hidden:
        raise ConfigError(
            f"{c.name}: the encoder is {encoder.size('hidden_size')} wide and the decoder "
            f"{hidden}; only T5Gemma with stacks of one width is described"
        )
    dropout, of_attention = c.probability("dropout_rate"), c.probability("attention_dropout")
    stacks = [
        _layers(side_config, side, dropout=dropout, attention_dropout=of_attention)
        for side_config, side in ((encoder, "encoder"), (decoder, "decoder"))
    ]
    spec = encoder_decoder(
        replace(c, values={**c.values, "hidden_size": hidden, "vocab_size": vocab}),
        *stacks,
        tied=c.flag("tie_word_embeddings"),
        embeddings=(
            Embedding(name="embed_tokens", rows=vocab, width=hidden),
            Embedding(name="embed_tokens", rows=encoder.size("vocab_size"), width=hidden),
        ),
        head=Linear(name="out_proj", in_features=hidden, out_features=vocab, reads="head_in"),
        final_norms=norms(["norm"] * 2, width=hidden, kind="rms_offset"),
        embedding_dropouts=(hidden,) * 2 if dropout else (),
        final_dropouts=(hidden,) * 2 if dropout else (),
        logit_softcap=decoder.number_or_none("final_logit_softcapping"),
        max_position_embeddings=decoder.size("max_position_embeddings"),
        splits_embeddings=True,
        embeds_in_steps=True,
        widens_logits=True,
    )
    return replace(spec, config=c.values)


BUILDERS = {"t5gemma": _t5gemma}
