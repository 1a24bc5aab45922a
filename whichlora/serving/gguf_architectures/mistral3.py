"""Mistral Small 3 and Ministral 3, whose queries are multiplied by a number for each position."""

from __future__ import annotations

from whichlora.serving.gguf_architectures.base import Architecture, text_config
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention


def _scales(model: ModelSpec, attention: Attention) -> bool:
    """Source: llama.cpp 0c1e570 conversion/mistral3.py `set_gguf_parameters`."""
    model_type: str = text_config(model)["model_type"]
    return model_type == "ministral3"


# Source: llama.cpp 0c1e570 src/models/mistral3.cpp.
ARCHITECTURES = (
    Architecture(name="mistral3", model_types=("mistral3", "ministral3"), scales_queries=_scales),
)
