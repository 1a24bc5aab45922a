"""Llama 4: chunks in place of windows, and experts that read their input times its weight."""

from __future__ import annotations

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention


def _choice(model: ModelSpec) -> Choice:
    return Choice(gate="sigmoid", divided=False, by_logits=True, weighs_input=True)


def _scales(model: ModelSpec, attention: Attention) -> bool:
    return attention.position != "rope"


# Source: llama.cpp 0c1e570 src/models/llama4.cpp.
ARCHITECTURES = (
    Architecture(
        name="llama4",
        model_types=("llama4", "llama4_text"),
        windows=True,
        names={"router": ("ffn_gate_inp",)},
        choice=_choice,
        scales_queries=_scales,
    ),
)
