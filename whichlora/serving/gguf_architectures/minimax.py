"""MiniMax M2, whose experts are chosen by scores with a bias."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import Layer, ModelSpec


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    yield from layer_tensors(layer, architecture)
    assert layer.moe is not None
    yield vector("exp_probs_b", layer.moe.num_experts, suffix=".bias")


def _choice(model: ModelSpec) -> Choice:
    return Choice(gate="sigmoid", biased=True)


# Source: llama.cpp 0c1e570 src/models/minimax-m2.cpp.
ARCHITECTURES = (
    Architecture(name="minimax-m2", model_types=("minimax_m2",), tensors=_tensors, choice=_choice),
)
