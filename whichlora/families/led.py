"""LED: BART whose encoder attends in windows, as Longformer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.bart import BART, feed_forward, mvp_decoder_layer
from whichlora.families.blocks import encoder_decoder, norms, qkv_linears, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, Windows

DEFAULTS: dict[str, dict[str, Any]] = {
    "led": BART
    | {
        "max_encoder_position_embeddings": 16384,
        "max_decoder_position_embeddings": 1024,
        "attention_window": 512,
    }
}
SYNONYMS = {
    "led": {
        "hidden_size": ("d_model",),
        "encoder_layers": ("num_hidden_layers",),
        "encoder_attention_heads": ("num_attention_heads",),
        "attention_dropout": ("attention_probs_dropout_prob",),
    }
}
_PROJECTIONS = ("query", "key", "value")


def _windows(c: Fields) -> list[int]:
    """The window of each encoder layer.

    Raises:
        ConfigError: not even, or sequences padded to the largest are no multiple of another.
    """
    count = c.layers("encoder_layers")
    each = c.items("attention_window", length=count) if _is_list(c) else None
    windows = [c.size("attention_window")] * count if each is None else each
    for window in windows:
        if type(window) is not int or window < 2 or window % 2 or max(windows) % window:
            raise ConfigError(
                f"{c.name}: attention_window is {c.get('attention_window')!r}; each must be an "
                "even number that divides the largest"
            )
    return windows


def _is_list(c: Fields) -> bool:
    return isinstance(c.get("attention_window"), list)


def _attention(c: Fields, window: int, longest: int) -> Attention:
    """Three more projections make what tokens with global attention read.

    No token has it unless the data have a `global_attention_mask`, so that nothing passes them.
    Source: transformers 5.23 `LEDEncoderSelfAttention`, `LEDEncoderAttention`.
    """
    hidden, heads = c.size("hidden_size"), c.size("encoder_attention_heads")
    plain = softmax_attention(
        hidden=hidden,
        heads=heads,
        names=_PROJECTIONS,
        out_name="output",
        qkv_bias=True,
        out_bias=True,
        position="none",
        causal=False,
        cached=False,
        dropout=c.probability("attention_dropout"),
        sdpa="eager",
        flash=False,
        always_masked=True,
        returns_probabilities=False,
        windows=Windows(one_sided=window // 2, padded_to=longest),
    )
    idle = qkv_linears(
        hidden=hidden,
        q_width=hidden,
        kv_width=hidden,
        names=[f"{name}_global" for name in _PROJECTIONS],
        bias=True,
    )
    *inputs, out = plain.linears
    never = (replace(linear, active=0) for linear in idle)
    return replace(plain, linears=(*inputs, *never, out))


def _encoder_layer(c: Fields, attention: Attention) -> Layer:
    hidden = c.size("hidden_size")
    return Layer(
        attentions=(attention,),
        mlp=feed_forward(c, "encoder"),
        norms=norms(
            ("self_attn_layer_norm", "final_layer_norm"), width=hidden, kind="layer", bias=True
        ),
        post_norm=True,
        dropouts=(hidden,) * 2 if c.probability("dropout") else (),
    )


def _led(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    windows = _windows(c)
    positions = [c.size(f"max_{side}_position_embeddings") for side in ("encoder", "decoder")]
    tables = (
        Embedding(name="embed_positions", rows=rows, width=hidden, per_sequence=False)
        for rows in positions
    )
    drops = any(c.probability(f"{side}_layerdrop") for side in ("encoder", "decoder"))
    notes = ["no token has global attention: the data have no global_attention_mask"]
    if drops:
        notes.append("training skips layers by chance (layerdrop); counted with none skipped")
    return encoder_decoder(
        c,
        [_encoder_layer(c, _attention(c, window, max(windows))) for window in windows],
        [mvp_decoder_layer(c, cut_from=max(windows))] * c.layers("decoder_layers"),
        tied=c.flag("tie_word_embeddings"),
        embeddings=(Embedding(name="shared", rows=vocab, width=hidden), *tables),
        embedding_norms=norms(["layernorm_embedding"] * 2, width=hidden, kind="layer", bias=True),
        biases_logits=True,
        embedding_dropouts=(hidden,) * 2 if c.probability("dropout") else (),
        max_position_embeddings=min(positions),
        max_prompt_positions=positions[0],
        notes=tuple(notes),
    )


BUILDERS = {"led": _led}
