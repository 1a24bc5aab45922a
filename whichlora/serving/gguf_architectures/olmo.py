"""OLMo 2 and 3, and the mixture before them."""

from __future__ import annotations

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.architecture import ModelSpec


def _choice(model: ModelSpec) -> Choice:
    return Choice(divided=False)


# Source: llama.cpp 0c1e570 src/models/olmo2.cpp, olmoe.cpp.
ARCHITECTURES = (
    Architecture(name="olmo2", model_types=("olmo2",)),
    Architecture(name="olmo2", model_types=("olmo3",), windows=True),
    Architecture(name="olmoe", model_types=("olmoe",), choice=_choice),
)
