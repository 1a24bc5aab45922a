"""LFM2: most layers are short convolutions, which keep their last tokens.

Source: llama.cpp 0c1e570 src/models/lfm2.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.serving.ggml_backends import FP32
from whichlora.serving.ggml_graph import Builder, fed, mixed, softmax_attention
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture, convolved
from whichlora.spec.layer import Attention, Layer


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    attention = layer.attentions[0]
    for tensor in layer_tensors(layer, architecture):
        if attention.kind == "softmax" and tensor.name == "shortconv.out_proj":
            tensor = replace(tensor, name="attn_output")
        yield tensor
    if attention.kind == "conv":
        yield vector("shortconv.conv", attention.conv_kernel, attention.conv_channels)


def _layer(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    is_view = layer.attentions[0].kind == "conv"
    out = mixed(build, layer, stream)
    return fed(build, layer, out, stream, rows, is_view=is_view, stream_first=True)


def _attention(build: Builder, attention: Attention, read: int) -> int:
    if attention.kind == "softmax":
        return softmax_attention(build, attention, read)
    graph, batch = build.graph, build.batch
    width = attention.conv_channels
    kept = FP32 * convolved(attention) * batch.sequences
    before = build.states.pop(build.number)
    parts = build.product("shortconv.in_proj", 3 * width, read)
    product = build.wide(width, parts)
    joined = graph.add(kept + FP32 * width * batch.tokens, before, product)
    graph.add(0, joined)
    build.read_ahead()
    mixed_in_time = build.wide(width, joined)
    return build.wide(width, parts, mixed_in_time, over=(mixed_in_time,))


ARCHITECTURES = (
    Architecture(
        name="lfm2",
        model_types=("lfm2",),
        names={
            "in_proj": ("shortconv.in_proj",),
            "out_proj": ("shortconv.out_proj",),
            "w1": ("ffn_gate",),
            "w3": ("ffn_up",),
            "w2": ("ffn_down",),
        },
        norms={
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "q_layernorm": "attn_q_norm",
            "k_layernorm": "attn_k_norm",
        },
        output_norm="token_embd_norm",
        tensors=_tensors,
        read_ahead=convolved,
        heads_by_layer=True,
        layer=_layer,
        attention=_attention,
    ),
)
