"""The text of Qwen's models of images, whose tokens stand at three places at once.

Qwen3-VL adds what its tower made in between to the first layers; room for it is there without
images, too.
"""

from __future__ import annotations

from whichlora.serving.ggml_graph import Builder, block
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer


def _deep(model: ModelSpec) -> int:
    """Layers that read states of the tower."""
    return len(model.config["vision_config"]["deepstack_visual_indexes"])


def _embeddings(model: ModelSpec) -> int:
    return 1 + _deep(model)


def _layer(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    """Source: llama.cpp 0c1e570 src/models/qwen3vl.cpp `graph`."""
    stream = block(build, layer, stream, rows)
    if build.first + build.number >= _deep(build.model):
        return stream
    return build.wide(build.model.hidden_size, stream, build.embedded, over=(stream,))


# Source: llama.cpp 0c1e570 src/models/qwen2vl.cpp, qwen3vl.cpp, qwen3vlmoe.cpp.
ARCHITECTURES = (
    Architecture(name="qwen2vl", model_types=("qwen2_vl", "qwen2_5_vl"), positions=4),
    Architecture(
        name="qwen3vl",
        model_types=("qwen3_vl",),
        positions=4,
        embeddings=_embeddings,
        layer=_layer,
    ),
    Architecture(
        name="qwen3vlmoe",
        model_types=("qwen3_vl_moe",),
        positions=4,
        embeddings=_embeddings,
        layer=_layer,
    ),
)
