"""Qwen's first mixtures, with a shared expert behind a gate."""

from __future__ import annotations

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec


def _choice(model: ModelSpec) -> Choice:
    return Choice(divided=False)


# Source: llama.cpp 0c1e570 src/models/qwen2moe.cpp.
ARCHITECTURES = (Architecture(name="qwen2moe", model_types=("qwen2_moe",), choice=_choice),)
