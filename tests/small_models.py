"""Configs of small models of every family, without a library."""

from __future__ import annotations

from typing import Any

# Every width differs from every other, so that a formula cannot be right by accident.
VOCAB = 2048
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MHA = _DECODER | {"num_key_value_heads": 4}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 128,
    "n_inner": 448,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
_BERT = {key: value for key, value in _MHA.items() if key != "tie_word_embeddings"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "mistral": _DECODER | {"sliding_window": None},
    "qwen2": _DECODER,
    "qwen3": _DECODER | {"head_dim": 40},
    "gemma": _DECODER | {"head_dim": 40, "tie_word_embeddings": True},
    "gemma2": _DECODER | {"head_dim": 40, "tie_word_embeddings": True, "sliding_window": 128},
    "gemma3_text": _DECODER | {"head_dim": 40, "tie_word_embeddings": True, "sliding_window": 128},
    "phi3": _DECODER,
    "phi": _MHA | {"partial_rotary_factor": 0.5},
    "gpt2": _GPT2,
    "gpt_neox": _MHA | {"rotary_pct": 0.25},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "ffn_dim": 448,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 128,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mpt": {
        "vocab_size": VOCAB,
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
        "expansion_ratio": 4,
    },
    "gpt_bigcode": _GPT2,
    "starcoder2": _DECODER | {"use_bias": True},
    "stablelm": _MHA | {"partial_rotary_factor": 0.25},
    "olmo2": _DECODER,
    "cohere": _DECODER | {"tie_word_embeddings": True},
    "glm": _DECODER | {"head_dim": 32, "partial_rotary_factor": 0.5},
    "mixtral": _MOE,
    "qwen2_moe": _DECODER
    | {
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 176,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmoe": _DECODER | {"num_experts": 4, "num_experts_per_tok": 2},
    "t5": {
        "vocab_size": VOCAB,
        "d_model": 128,
        "d_kv": 40,
        "d_ff": 448,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "bert": _BERT,
    "roberta": _BERT,
}
