"""A small checkpoint of Whisper, of random weights, with a real processor."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

WINDOW_S = 2  # that its processor keeps of a clip
_SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|zh|>", "<|translate|>"),
    *("<|transcribe|>", "<|notimestamps|>"),
)


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint in `folder` that `from_pretrained` loads, with what cuts sound and texts."""
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(
        vocab={symbol: number for number, symbol in enumerate([*letters, *_SPECIAL])},
        merges=[],
        pad_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    tokenizer.set_prefix_tokens()
    start, end = tokenizer.prefix_tokens[0], tokenizer.eos_token_id
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_source_positions=50 * WINDOW_S,
            max_target_positions=64,
            pad_token_id=end,
            bos_token_id=end,
            eos_token_id=end,
            decoder_start_token_id=start,
        )
    )
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder
