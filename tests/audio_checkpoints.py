"""Small checkpoints of Whisper and Qwen2-Audio, of random weights, with real processors."""

from __future__ import annotations

from pathlib import Path

import torch
from oracle_tokenizer import byte_tokenizer
from tokenizers import pre_tokenizers
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
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


def write_listener(folder: Path) -> Path:
    """A checkpoint of Qwen2-Audio in `folder`, with the chat template of its class."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    special = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tower = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 50 * WINDOW_S,
    }
    text = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
    }
    place = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    config = Qwen2AudioConfig(audio_config=tower, text_config=text, audio_token_index=place)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S)
    Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder
