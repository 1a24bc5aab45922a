"""Encoder-decoders with absolute positions: BART and its kin, translators and chat models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.families.blocks import encoder_decoder, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec, PositionKind
from whichlora.spec.layer import Attention, Layer, Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How a type differs from BART.

    Args:
        post_norm: norms follow the sums; else each stack ends with a norm.
        embedding_norms: looked-up rows are normalised.
        positions: "learned", or sines in a "frozen" parameter or in a "buffer".
        offset: rows that a table of positions has beside the positions themselves.
        per_sequence: they are looked up for every sequence, not once for all.
        own_attention: written out in the class, which has neither SDPA nor flash-attention.
        biases_logits: `final_logits_bias`.
    """

    post_norm: bool = True
    embedding_norms: bool = True
    positions: PositionKind = "learned"
    offset: int = 2
    per_sequence: bool = True
    own_attention: bool = False
    biases_logits: bool = True


_KINDS = {
    "bart": _Kind(),
    "mbart": _Kind(post_norm=False),
    "plbart": _Kind(),
    "mvp": _Kind(own_attention=True),
    "m2m_100": _Kind(
        post_norm=False, embedding_norms=False, positions="buffer", biases_logits=False
    ),
    "pegasus": _Kind(
        post_norm=False, embedding_norms=False, positions="frozen", offset=0, per_sequence=False
    ),
    "marian": _Kind(embedding_norms=False, positions="frozen", offset=0, per_sequence=False),
    "blenderbot": _Kind(post_norm=False, embedding_norms=False, offset=0, per_sequence=False),
    "blenderbot-small": _Kind(offset=0, per_sequence=False),
}

BART: dict[str, Any] = {
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


def _sizes(
    *, hidden: int, layers: tuple[int, int], width: int, heads: int, **overrides: Any
) -> dict[str, Any]:
    """Defaults of a type whose stacks are alike but for their depth."""
    sizes: dict[str, Any] = {"hidden_size": hidden}
    for side, count in zip(("encoder", "decoder"), layers, strict=True):
        sizes |= {
            f"{side}_layers": count,
            f"{side}_ffn_dim": width,
            f"{side}_attention_heads": heads,
        }
    return BART | sizes | overrides


DEFAULTS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "mbart": BART,
    "plbart": _sizes(
        hidden=768, layers=(6, 6), width=3072, heads=12, vocab_size=50005, attention_dropout=0.1
    ),
    "mvp": BART | {"vocab_size": 50267},
    "m2m_100": BART
    | {
        "vocab_size": 128112,
        "activation_function": "relu",
        "attention_dropout": 0.1,
        "encoder_layerdrop": 0.05,
        "decoder_layerdrop": 0.05,
    },
    "pegasus": BART,
    "marian": BART | {"vocab_size": 58101, "share_encoder_decoder_embeddings": True},
    "blenderbot": _sizes(
        hidden=2560,
        layers=(2, 24),
        width=10240,
        heads=32,
        vocab_size=8008,
        max_position_embeddings=128,
    ),
    "blenderbot-small": _sizes(
        hidden=512, layers=(8, 8), width=2048, heads=16, max_position_embeddings=512
    ),
}
SYNONYMS = {name: {"hidden_size": ("d_model",)} for name in _KINDS}

_Side = Literal["encoder", "decoder"]


def feed_forward(c: Fields, side: _Side) -> Mlp:
    return mlp(
        hidden=c.size("hidden_size"),
        width=c.size(f"{side}_ffn_dim"),
        activation=c.text("activation_function"),
        names=("fc1", "fc2"),
        bias=True,
        dropout=c.probability("activation_dropout") > 0,
    )


def _attention(c: Fields, kind: _Kind, side: _Side, *, cross: bool = False) -> Attention:
    hidden, heads = c.size("hidden_size"), c.size(f"{side}_attention_heads")
    decodes = side == "decoder"
    functions: dict[str, Any] = {}
    if kind.own_attention:
        functions = {"sdpa": "eager", "flash": False}
        functions |= {"eager": "scaled_queries", "returns_probabilities": False}
    return softmax_attention(
        hidden=hidden,
        heads=heads,
        out_name="out_proj",
        qkv_bias=True,
        out_bias=True,
        position="none",
        causal=decodes and not cross,
        cross=cross,
        cached=decodes,
        dropout=c.probability("attention_dropout"),
        wide_softmax=False,
        **functions,
    )


def mvp_decoder_layer(c: Fields, **cross: Any) -> Layer:
    """That of MVP, and of LED; `cross` are further fields of its cross attention."""
    layer = _layer(c, _KINDS["mvp"], "decoder")
    first, second = layer.attentions
    return replace(layer, attentions=(first, replace(second, **cross)))


def _layer(c: Fields, kind: _Kind, side: _Side) -> Layer:
    hidden = c.size("hidden_size")
    blocks, names = [_attention(c, kind, side)], ["self_attn_layer_norm"]
    if side == "decoder":
        blocks.append(_attention(c, kind, side, cross=True))
        names.append("encoder_attn_layer_norm")
    return Layer(
        attentions=tuple(blocks),
        mlp=feed_forward(c, side),
        norms=norms((*names, "final_layer_norm"), width=hidden, kind="layer", bias=True),
        post_norm=kind.post_norm,
        dropouts=(hidden,) * (len(names) + 1) if c.probability("dropout") else (),
    )


def _bart(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    kind = _KINDS[c.text("model_type")]
    if c.flag("use_prompt"):
        raise ConfigError(f"{c.name}: use_prompt is true; only MVP without prompts is described")
    if c.get("share_encoder_decoder_embeddings") is False:
        raise ConfigError(
            f"{c.name}: share_encoder_decoder_embeddings is false; only Marian with one table for "
            "both languages is described"
        )
    positions = c.size("max_position_embeddings")
    table = Embedding(
        name="embed_positions",
        rows=positions + kind.offset,
        width=hidden,
        kind=kind.positions,
        per_sequence=kind.per_sequence,
    )
    drops = any(c.probability(f"{side}_layerdrop") for side in ("encoder", "decoder"))
    each = norms(["layernorm_embedding"] * 2, width=hidden, kind="layer", bias=True)
    last = norms(["layer_norm"] * 2, width=hidden, kind="layer", bias=True)
    return encoder_decoder(
        c,
        [_layer(c, kind, "encoder")] * c.layers("encoder_layers"),
        [_layer(c, kind, "decoder")] * c.layers("decoder_layers"),
        tied=c.flag("tie_word_embeddings"),
        embeddings=(Embedding(name="shared", rows=vocab, width=hidden), table, table),
        embedding_norms=each if kind.embedding_norms else (),
        final_norms=() if kind.post_norm else last,
        biases_logits=kind.biases_logits,
        embedding_dropouts=(hidden,) * 2 if c.probability("dropout") else (),
        max_position_embeddings=positions,
        notes=("training skips layers by chance (layerdrop); counted with none skipped",)
        if drops
        else (),
    )


BUILDERS = dict.fromkeys(_KINDS, _bart)
