"""Configs of small models of every family, without a library."""

from __future__ import annotations

from typing import Any

# Every width differs from every other, so that a formula cannot be right by accident.
VOCAB = 2048
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 128,
    "d_kv": 40,
    "d_ff": 448,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
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
    "deepseek_v32": _MHA
    | {
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,  # else the CPU has no fused kernel
        "first_k_dense_replace": 8,
        "index_n_heads": 6,
        "index_head_dim": 36,
        "index_topk": 20,
    },
    "jamba": _DECODER | {"num_experts": 4, "pad_token_id": 0},  # of so few layers none attends
    "gemma3n_text": _DECODER
    | {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
    },
    "t5": _T5,
    "longt5": _T5 | {"local_radius": 15},
    "led": {
        "vocab_size": VOCAB,
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 448,
        "decoder_ffn_dim": 448,
        "attention_window": 16,
    },
    "bert": _BERT,
    "roberta": _BERT,
}

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
_BLOCKS = {"hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 5}
_VISION = _BLOCKS | {"intermediate_size": 320, "image_size": 112, "patch_size": 14}
_QWEN_VISION = {"hidden_size": 160, "num_heads": 5, "depth": 3, "intermediate_size": 320}
_QWEN_VISION |= {"out_hidden_size": 128}
_ROTATED = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
_HALF_ROTATED = {"partial_rotary_factor": 0.5}
_HALF_ROTATED |= {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
MLLAMA: dict[str, Any] = {  # one of whose layers no text passes
    "text_config": _TEXT | {"cross_attention_layers": [1]},
    "vision_config": _BLOCKS
    | {"attention_heads": 5, "intermediate_size": 320, "image_size": 112, "num_global_layers": 2}
    | {"intermediate_layers_indices": [0, 2], "vision_output_dim": 480},
}
_IDS = {"image_token_id": 2000, "video_token_id": 2001}
_IDS |= {"vision_start_token_id": 2002, "vision_end_token_id": 2003}
IMAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _TEXT | _ROTATED,
        "vision_config": {"embed_dim": 160, "num_heads": 5, "depth": 3, "hidden_size": 128},
        **_IDS,
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | _ROTATED,
        "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [1]},
        **_IDS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | _ROTATED,
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": _TEXT
        | _ROTATED
        | {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2},
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
        **_IDS,
    },
    "qwen3_5": {
        "text_config": _TEXT
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        "vision_config": _QWEN_VISION,
        **_IDS,
    },
    "glm4v": {
        "text_config": _TEXT | _HALF_ROTATED,
        "vision_config": _QWEN_VISION,
        **_IDS,
    },
    "glm4v_moe": {
        "text_config": _TEXT
        | _HALF_ROTATED
        | {"moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "vision_config": _QWEN_VISION,
        **_IDS,
    },
    "gemma3": {
        "text_config": _TEXT | {"sliding_window": 512},
        "vision_config": _VISION | {"vision_use_head": False},
        "mm_tokens_per_image": 16,
        "image_token_index": 2000,
        "boi_token_index": 2001,
        "eoi_token_index": 2002,
    },
    "gemma4": {
        "text_config": _TEXT
        | {"sliding_window": 512, "global_head_dim": 48, "hidden_size_per_layer_input": 0}
        | {"use_bidirectional_attention": "vision"},
        "vision_config": _BLOCKS
        | {"num_key_value_heads": 5, "head_dim": 32, "intermediate_size": 320}
        | {"position_embedding_size": 64, "use_clipped_linears": True},
        "vision_soft_tokens_per_image": 70,
        "image_token_id": 2000,
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
        "image_token_index": 2000,
    },
    "llava_next": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
        "image_grid_pinpoints": [[112, 224], [224, 112], [224, 224]],
        "image_token_index": 2000,
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "image_size": 1540},
        "image_token_index": 2000,
    },
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION | {"model_type": "internvl_vision", "attention_bias": True},
        "image_token_id": 2000,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": _TEXT | {"intermediate_size_mlp": 448, "moe_layers": []},
        "vision_config": _VISION
        | {"intermediate_size": 640, "projector_input_dim": 96, "projector_output_dim": 96}
        | {"vision_output_dim": 96},
        "image_token_index": 2000,
    },
    "mllama": MLLAMA | {"image_token_index": 2000},
    "smolvlm": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"image_size": 72, "patch_size": 12},
        "scale_factor": 3,
        "image_token_id": 2000,
    },
    "idefics3": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"image_size": 64, "patch_size": 8},
        "scale_factor": 4,
        "image_token_id": 2000,
    },
}
"""Of models that see, whose towers have another width than their texts."""

# a model that hears: a clip of 4 s, of which 200 positions are made
SOUND_CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_source_positions": 200,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

# one that hears before it writes: clips of 4 s at most
AUDIO_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_audio",
    "text_config": _TEXT | {"model_type": "qwen2"},
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 128,
        "encoder_layers": 3,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "max_source_positions": 200,
    },
    "audio_token_index": 2000,
}
