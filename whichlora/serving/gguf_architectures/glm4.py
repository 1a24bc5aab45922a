"""GLM-4, and its mixtures with dense first layers and a shared expert."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.serving.ggml_graph import Choice
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture, text_config
from whichlora.spec.architecture import Layer, ModelSpec


def _mixture_tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    yield from layer_tensors(layer, architecture)
    if layer.moe is not None:
        yield vector("exp_probs_b", layer.moe.num_experts, suffix=".bias")


def _choice(model: ModelSpec) -> Choice:
    """Source: llama.cpp 0c1e570 conversion/glm.py `Glm4MoeModel.set_gguf_parameters`."""
    config = text_config(model)
    return Choice(
        gate="sigmoid",
        biased=True,
        divided=bool(config.get("norm_topk_prob", True)),
        scaled=config.get("routed_scaling_factor", 1.0) != 1.0,
    )


# Source: llama.cpp 0c1e570 src/models/glm4.cpp, glm4-moe.cpp.
ARCHITECTURES = (
    Architecture(
        name="glm4",
        model_types=("glm4",),
        norms={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    Architecture(
        name="glm4moe",
        model_types=("glm4_moe",),
        norms={"post_attention_layernorm": "post_attention_norm"},
        tensors=_mixture_tensors,
        choice=_choice,
    ),
)
