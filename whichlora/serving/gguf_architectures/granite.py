"""Granite, its mixtures, and those of Granite 4 whose layers all attend."""

from __future__ import annotations

from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec

FUSED = {"input_linear": ("ffn_gate", "ffn_up"), "output_linear": ("ffn_down",)}


def _attends(model: ModelSpec) -> bool:
    """Source: llama.cpp 0c1e570 conversion/granite.py `GraniteHybridModel.__init__`."""
    return all(each.kind == "softmax" for layer, _ in model.layers() for each in layer.attentions)


def _dense(model: ModelSpec) -> bool:
    return _attends(model) and not model.has_experts


# Source: llama.cpp 0c1e570 src/models/granite.cpp, granite-moe.cpp.
ARCHITECTURES = (
    Architecture(name="granite", model_types=("granite",)),
    Architecture(name="granitemoe", model_types=("granitemoe", "granitemoeshared"), names=FUSED),
    Architecture(name="granite", model_types=("granitemoehybrid",), serves=_dense, names=FUSED),
)
