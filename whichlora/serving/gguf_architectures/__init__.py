"""Architectures of llama.cpp: each module states what is special about its own."""

from __future__ import annotations

from whichlora.serving.gguf_architectures import (
    deepseek,
    glm4,
    gpt_oss,
    llama4,
    mistral3,
    plain,
    qwen_hybrid,
    qwen_moe,
)
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec

_MODULES = (plain, gpt_oss, mistral3, glm4, qwen_moe, llama4, deepseek, qwen_hybrid)
ARCHITECTURES: dict[str, Architecture] = {
    model_type: architecture
    for module in _MODULES
    for architecture in module.ARCHITECTURES
    for model_type in architecture.model_types
}


def architecture_of(model: ModelSpec) -> Architecture:
    """The one that llama.cpp runs `model` with.

    Raises:
        KeyError: none is known of its type.
    """
    return ARCHITECTURES[model.model_type]


__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]
