"""Layers of Mamba 2 between those that attend: Granite 4 and Nemotron-H.

Source: llama.cpp 0c1e570 src/models/mamba-base.cpp, granite-hybrid.cpp, nemotron-h.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.serving.ggml_backends import FP32
from whichlora.serving.ggml_graph import (
    Builder,
    dense,
    mixed,
    mixture,
    softmax_attention,
)
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture, convolved
from whichlora.serving.gguf_architectures.granite import FUSED
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer


def _is_recurrent(layer: Layer) -> bool:
    return any(attention.kind == "mamba2" for attention in layer.attentions)


def _state_tensors(attention: Attention) -> Iterator[Tensor]:
    """Beside its matrices and norm."""
    heads, channels = attention.num_attention_heads, attention.conv_channels
    yield vector("ssm_conv1d", attention.conv_kernel, channels)
    if attention.other_params > channels * attention.conv_kernel + 3 * heads:
        yield vector("ssm_conv1d", channels, suffix=".bias")
    yield vector("ssm_dt", heads, suffix=".bias")
    yield vector("ssm_a", 1, heads, suffix="")
    yield vector("ssm_d", 1, heads, suffix="")


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    for tensor in layer_tensors(layer, architecture):
        if _is_recurrent(layer) and tensor.num_rows == 1:
            attention = layer.attentions[0]
            groups = attention.num_key_value_heads
            if tensor.row == attention.out_width:
                tensor = replace(tensor, name="ssm_norm", row=tensor.row // groups, num_rows=groups)
        yield tensor
    if _is_recurrent(layer):
        yield from _state_tensors(layer.attentions[0])


def _attention(build: Builder, attention: Attention, read: int) -> int:
    if attention.kind == "mamba2":
        return _scan(build, attention, read)
    return softmax_attention(build, attention, read)


def _scan(build: Builder, attention: Attention, read: int) -> int:
    """Source: llama.cpp 0c1e570 `llm_build_mamba_base::build_mamba2_layer`."""
    graph, batch = build.graph, build.batch
    width, channels = attention.out_width, attention.conv_channels
    kept = FP32 * convolved(attention) * batch.sequences
    whose = build.given("whose state", 4 * batch.sequences)
    before = build.states.pop(build.number)
    projected = build.product("ssm_in", attention.linears[0].out_features, read)
    joined = graph.add(kept + FP32 * channels * batch.tokens, before, projected)
    graph.add(0, joined)
    inputs = build.wide(channels, joined)
    steps = build.wide(attention.num_attention_heads, projected)
    states = FP32 * attention.recurrent_elements * batch.sequences
    result = graph.add(FP32 * width * batch.tokens + states, inputs, steps, whose)
    graph.add(0, result)
    build.read_ahead()
    gate = build.wide(width, projected)
    skipped = build.wide(width, inputs)
    summed = build.wide(width, result, skipped, over=(skipped,))
    gated = build.wide(width, gate, summed)
    return build.wide(width, gated)


def _half_layer(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    """A layer that attends, or is fed, after one norm."""
    if layer.attentions:
        out = mixed(build, layer, stream)
    else:
        read = build.normed(stream, layer.norms[0].kind)
        if layer.moe is not None:
            out = mixture(build, layer.moe, read, rows=rows)
        else:
            assert layer.mlp is not None
            out = dense(build, layer.mlp, read, rows=rows)
    return build.wide(build.model.hidden_size, out, stream, over=(out, stream))


def _has_states(model: ModelSpec) -> bool:
    return any(_is_recurrent(layer) for layer, _ in model.layers())


def _has_experts(model: ModelSpec) -> bool:
    return model.has_experts


_NAMES = {"in_proj": ("ssm_in",), "out_proj": ("ssm_out",)}
_LATENTS = {"fc1_latent_proj": ("ffn_latent_down",), "fc2_latent_proj": ("ffn_latent_up",)}
_MOE = Architecture(
    name="nemotron_h_moe",
    model_types=("nemotron_h",),
    serves=_has_experts,
    names={**_NAMES, **_LATENTS},
    norms={"norm": "attn_norm"},
    tensors=_tensors,
    read_ahead=convolved,
    layer=_half_layer,
    attention=_attention,
    heads_by_layer=True,
    keeps_rows=True,
)
ARCHITECTURES = (
    Architecture(
        name="granitehybrid",
        model_types=("granitemoehybrid",),
        serves=_has_states,
        names={**_NAMES, **FUSED},
        norms={"norm": "ssm_norm"},
        tensors=_tensors,
        read_ahead=convolved,
        heads_by_layer=True,
        attention=_attention,
    ),
    _MOE,
    replace(_MOE, name="nemotron_h", serves=lambda model: not model.has_experts),
)
