"""GLM-4, and its mixtures with dense first layers and a shared expert."""

from __future__ import annotations

from whichlora.serving.gguf_architectures.base import Architecture

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
    ),
)
