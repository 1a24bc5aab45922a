"""Architectures of llama.cpp: each module states what is special about its own."""

from __future__ import annotations

from whichlora.serving.gguf_architectures import (
    deepseek,
    glm4,
    gpt_oss,
    granite,
    lfm2,
    llama4,
    mamba,
    mistral3,
    parallel,
    plain,
    qwen_hybrid,
    qwen_vl,
)
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec

_MODULES = (
    plain,
    gpt_oss,
    mistral3,
    glm4,
    qwen_hybrid,
    qwen_vl,
    llama4,
    deepseek,
    parallel,
    granite,
    mamba,
    lfm2,
)
ARCHITECTURES: tuple[Architecture, ...] = tuple(
    architecture for module in _MODULES for architecture in module.ARCHITECTURES
)
MODEL_TYPES = tuple(
    dict.fromkeys(model_type for each in ARCHITECTURES for model_type in each.model_types)
)


def known_architecture(model: ModelSpec) -> Architecture | None:
    """The one that llama.cpp runs `model` with; None where it is not described."""
    return next(
        (
            each
            for each in ARCHITECTURES
            if model.model_type in each.model_types and each.serves(model)
        ),
        None,
    )


def architecture_of(model: ModelSpec) -> Architecture:
    """So of a model that an engine has accepted."""
    architecture = known_architecture(model)
    assert architecture is not None
    return architecture


__all__ = ["ARCHITECTURES", "MODEL_TYPES", "Architecture", "architecture_of", "known_architecture"]
