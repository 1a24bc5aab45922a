"""Qwen3-Next and Qwen3.5: most layers keep a state of fixed size, the others gate their attention.

Source: llama.cpp 0c1e570 src/models/qwen3next.cpp, qwen35.cpp, delta-net-base.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.serving.ggml_backends import FP32
from whichlora.serving.ggml_graph import Builder, attend, fed, mixed, rotations, turned_back
from whichlora.serving.gguf import Tensor, layer_tensors, vector
from whichlora.serving.gguf_architectures.base import Architecture, convolved
from whichlora.spec.layer import Attention, Layer


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    attention = layer.attentions[0]
    values = attention.out_width
    for tensor in layer_tensors(layer, architecture):
        if tensor.name != "ssm_in":
            yield tensor
            continue
        yield replace(tensor, name="attn_qkv", num_rows=attention.conv_channels)
        yield replace(tensor, name="attn_gate", num_rows=values)
    if attention.kind == "linear":
        heads = attention.num_attention_heads
        yield vector("ssm_conv1d", attention.conv_kernel, attention.conv_channels)
        yield vector("ssm_dt", heads, suffix=".bias")
        yield vector("ssm_a", heads, suffix="")


def _layer(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    is_view = layer.attentions[0].kind == "linear"
    return fed(build, layer, mixed(build, layer, stream), stream, rows, is_view=is_view)


def _attention(build: Builder, attention: Attention, read: int) -> int:
    if attention.kind == "linear":
        return _delta_net(build, attention, read)
    return _gated(build, attention, read)


def _gated(build: Builder, attention: Attention, read: int) -> int:
    """Queries come with a gate on what is attended to."""
    positions = build.positions()
    both = build.product("attn_q", 2 * attention.q_width, read)
    queries = build.wide(attention.q_width, both, positions)
    turns = rotations(build, attention)
    if turns[0] >= 0:
        queries = build.wide(attention.q_width, queries, turns[0])
    values = build.product("attn_v", attention.v_width, read)
    if turns[1] >= 0:
        values = build.wide(attention.v_width, values, turns[1])
    keys = build.wide(
        attention.k_width, build.product("attn_k", attention.k_width, read), positions
    )
    if turns[0] >= 0:
        keys = build.wide(attention.k_width, keys, turns[0])
    result = turned_back(build, attention, attend(build, attention, queries, keys, values))
    gate = build.wide(attention.out_width, both)
    return build.wide(attention.out_width, result, gate, over=(gate,))


def _delta_net(build: Builder, attention: Attention, read: int) -> int:
    """One kernel for all tokens, which reads and writes the state of each sequence."""
    graph, batch = build.graph, build.batch
    heads, channels, width = (
        attention.num_attention_heads,
        attention.conv_channels,
        attention.out_width,
    )
    kept = FP32 * convolved(attention) * batch.sequences
    whose = build.given("whose state", 4 * batch.sequences)
    before = graph.add(kept, whose)
    mixed = build.product("attn_qkv", channels, read)
    joined = graph.add(kept + FP32 * channels * batch.tokens, before, mixed)
    graph.add(0, joined)
    state_bytes = FP32 * attention.recurrent_elements * batch.sequences
    state = graph.add(state_bytes, whose)
    mixed = build.wide(channels, joined)
    half = (channels - width) // 2
    queries, keys = build.wide(half, mixed), build.wide(half, mixed)
    if any(linear.name == "in_proj_ba" for linear in attention.linears):
        queries, keys = build.wide(width, queries), build.wide(width, keys)  # for each of its heads
        both = build.product("ssm_ba", 2 * heads, read)
        decay, beta = build.wide(heads, both), build.wide(heads, both)
    else:
        decay = build.wide(heads, build.product("ssm_alpha", heads, read))
        beta = build.wide(heads, build.product("ssm_beta", heads, read))
    result = graph.add(
        FP32 * width * batch.tokens + state_bytes, queries, keys, mixed, decay, beta, state
    )
    graph.add(0, result)
    normed = build.wide(width, result)
    gate = build.wide(width, build.product("attn_gate", width, read))
    return build.wide(width, normed, gate, over=(normed,))


_NAMES = {
    "in_proj_qkvz": ("ssm_in",),
    "in_proj_ba": ("ssm_ba",),
    "in_proj_qkv": ("attn_qkv",),
    "in_proj_z": ("attn_gate",),
    "in_proj_b": ("ssm_beta",),
    "in_proj_a": ("ssm_alpha",),
    "out_proj": ("ssm_out",),
}
_NORMS = {"post_attention_layernorm": "post_attention_norm", "norm": "ssm_norm"}


def _architecture(name: str, *model_types: str, positions: int = 1) -> Architecture:
    return Architecture(
        name=name,
        model_types=model_types,
        names=_NAMES,
        norms=_NORMS,
        tensors=_tensors,
        layer=_layer,
        attention=_attention,
        positions=positions,
        keeps_rows=True,
    )


ARCHITECTURES = (
    _architecture("qwen3next", "qwen3_next"),
    _architecture("qwen35", "qwen3_5", "qwen3_5_text", positions=4),
    _architecture("qwen35moe", "qwen3_5_moe", "qwen3_5_moe_text", positions=4),
)
