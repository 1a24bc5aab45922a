"""Architectures that are made of the common blocks alone: a name, and whether windows are kept.

Source: llama.cpp 0c1e570 conversion/, and `load_arch_hparams` of src/models/.
"""

from __future__ import annotations

from whichlora.serving.gguf_architectures.base import Architecture

ARCHITECTURES = (
    Architecture(name="llama", model_types=("llama", "mistral", "mixtral", "internlm3")),
    Architecture(name="qwen2", model_types=("qwen2",)),
    Architecture(name="qwen3", model_types=("qwen3",)),
    Architecture(name="qwen3moe", model_types=("qwen3_moe",)),
    Architecture(name="gemma", model_types=("gemma",)),
    Architecture(name="gemma2", model_types=("gemma2",), windows=True),
    Architecture(name="gemma3", model_types=("gemma3", "gemma3_text"), windows=True),
    Architecture(name="phi3", model_types=("phi3",)),
    Architecture(name="starcoder2", model_types=("starcoder2",)),
    Architecture(name="smollm3", model_types=("smollm3",)),
    Architecture(name="olmo2", model_types=("olmo2",)),
    Architecture(name="olmo2", model_types=("olmo3",), windows=True),
    Architecture(name="olmoe", model_types=("olmoe",)),
    Architecture(name="qwen2moe", model_types=("qwen2_moe",)),
    Architecture(name="minimax-m2", model_types=("minimax_m2",)),
    Architecture(name="ernie4_5", model_types=("ernie4_5",)),
    Architecture(name="exaone4", model_types=("exaone4",), windows=True),
    Architecture(
        name="seed_oss",
        model_types=("seed_oss",),
        norms={"post_attention_layernorm": "post_attention_norm"},
    ),
)
