"""gpt-oss: sinks beside the scores, and experts with biases whose scores are softened last."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    yield from layer_tensors(layer, architecture)
    yield vector("attn_sinks", layer.attentions[0].num_attention_heads)


def _choice(model: ModelSpec) -> Choice:
    return Choice(gate="chosen", divided=False)


# Source: llama.cpp 0c1e570 src/models/openai-moe.cpp; the last layer passes all tokens, whose rows
# are chosen after it.
ARCHITECTURES = (
    Architecture(
        name="gpt-oss",
        model_types=("gpt_oss",),
        windows=True,
        norms={"post_attention_layernorm": "post_attention_norm"},
        tensors=_tensors,
        choice=_choice,
        keeps_rows=True,
    ),
)
