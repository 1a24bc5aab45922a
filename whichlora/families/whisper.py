"""Whisper: a decoder of text that attends to an encoder of sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import causal_lm, norms
from whichlora.families.fields import Fields
from whichlora.families.towers import whisper
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Linear

DEFAULTS: dict[str, dict[str, Any]] = {
    "whisper": {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "hidden_size": 384,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "activation_function": "gelu",
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
    }
}
SYNONYMS = {
    "whisper": {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("decoder_layers",),
        "max_position_embeddings": ("max_target_positions",),
    }
}


def _whisper(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    tower = whisper.encoder(c)
    block = whisper.layer(
        c,
        "decoder",
        {
            "self_attn_layer_norm": whisper.attention(c, "decoder", cached=True),
            "encoder_attn_layer_norm": whisper.attention(
                c,
                "decoder",
                causal=False,
                cross=True,
                cached=True,
                memory_len=c.size("max_source_positions"),
            ),
        },
    )
    longest = c.size("max_target_positions")
    tables = (
        Embedding(name="embed_tokens", rows=vocab, width=hidden),
        Embedding(name="embed_positions", rows=longest, width=hidden),
    )
    drops = any(c.probability(f"{side}_layerdrop") for side in ("encoder", "decoder"))
    decoder = causal_lm(
        c,
        [block] * c.layers("decoder_layers"),
        embeddings=tables,
        head=Linear(name="proj_out", in_features=hidden, out_features=vocab, reads="head_in"),
        final_norms=norms(["layer_norm"], width=hidden, kind="layer", bias=True),
        embedding_dropouts=(hidden,) if c.probability("dropout") else (),
        max_position_embeddings=longest,
        other_params=tower.stack.num_params + tower.idle_params,
        idle_params=tower.idle_params,
        idle_linears=tower.linears,
        tower=tower,
        notes=("training skips layers by chance (layerdrop); counted with none skipped",)
        if drops
        else (),
    )
    return replace(decoder, task="seq2seq-lm")


BUILDERS = {"whisper": _whisper}
