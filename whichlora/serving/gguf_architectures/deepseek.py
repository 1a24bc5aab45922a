"""DeepSeek's latent attention, which Kimi K2 and GLM-4.7-Flash have, too.

A file has the matrix from a latent to heads as two, one for keys and one for values, and the cache
has latents: all heads of queries are multiplied into their space, and what they attend to out of
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.serving.ggml_backends import FP16, FP32, FusedAttention
from whichlora.serving.ggml_buffer import HOST
from whichlora.serving.ggml_graph import INDEX, Batch, Builder, mask_of
from whichlora.serving.gguf import Tensor, layer_tensors
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.layer import Attention, Layer
from whichlora.spec.numeric import ceil_div


def _latent(attention: Attention) -> int:
    """Elements of the latent, without the rotated part."""
    return attention.cache_elements - attention.rotary_dim


def _tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    attention = layer.attentions[0]
    heads, latent = attention.num_attention_heads, _latent(attention)
    unrotated = attention.head_dim - attention.rotary_dim
    for tensor in layer_tensors(layer, architecture):
        if tensor.name != "attn_kv_b":
            yield tensor
            continue
        yield replace(tensor, name="attn_k_b", row=unrotated, num_rows=latent * heads, count=heads)
        yield replace(
            tensor,
            name="attn_v_b",
            row=latent,
            num_rows=attention.v_head_dim * heads,
            count=heads,
        )


def _cached(attention: Attention) -> tuple[int, int]:
    """Values are a part of the keys."""
    return attention.cache_elements, 0


def _attention(build: Builder, attention: Attention, read: int) -> int:
    """Source: llama.cpp 0c1e570 src/models/deepseek2.cpp `graph`."""
    heads, latent, rotated = attention.num_attention_heads, _latent(attention), attention.rotary_dim
    sizes = {linear.name: linear.out_features for linear in attention.linears}
    if "q_a_proj" in sizes:
        low = build.product("attn_q_a", sizes["q_a_proj"], read)
        low = build.wide(sizes["q_a_proj"], low, over=(low,))
        raw = build.product("attn_q_b", attention.q_width, low)
    else:
        raw = build.product("attn_q", attention.q_width, read)
    absorbed = build.product("attn_k_b", heads * latent, raw)
    positions = build.positions()
    turned = build.wide(heads * rotated, raw, positions)
    queries = build.wide(heads * (latent + rotated), absorbed, turned)
    both = build.product("attn_kv_a_mqa", latent + rotated, read)
    values = build.wide(latent, both)
    turned = build.wide(rotated, both, positions)
    keys = build.wide(latent + rotated, values, turned)
    result = _attend(build, attention, queries, keys)
    if build.batch.flash:
        result = build.product("attn_v_b", attention.out_width, result)
    return build.wide(attention.out_width, result)


def _attend(build: Builder, attention: Attention, queries: int, keys: int) -> int:
    """Latents of what is seen, for each head."""
    graph, batch = build.graph, build.batch
    heads, latent = attention.num_attention_heads, _latent(attention)
    # values are a part of the keys, and are copied beside them
    copies = tuple(graph.add(build.at.cached[0], place=HOST) for _ in build.at.cached)
    if copies:
        graph.add(0, keys, place=HOST)
    else:
        graph.add(0, keys, build.given("rows of keys", INDEX * batch.tokens))
    seen, mask = mask_of(build, None)
    if batch.flash:
        copied = 0 if batch.backend.views_values else latent
        widened = batch.widened_keys * (attention.cache_elements + copied)
        size = FP32 * heads * latent * batch.tokens + FP16 * seen * widened
        size += _fused_bytes(batch, attention, seen)
        return graph.add(size, queries, *copies, mask)
    scores = FP32 * seen * batch.tokens * heads
    raw = graph.add(scores, queries)
    weights = graph.add(scores, raw, mask, over=(raw,))
    values = graph.add(FP16 * seen * latent, mask)
    seen_latents = build.wide(heads * latent, values, weights)
    return build.product("attn_v_b", attention.out_width, seen_latents)


def _fused_bytes(batch: Batch, attention: Attention, cells: int) -> int:
    """As `ggml_graph.fused_bytes`, of one cached head whose values are a part of its keys."""
    row_bytes = FP16 * attention.cache_elements
    return batch.backend.attention_bytes(
        FusedAttention(
            tokens=ceil_div(batch.tokens, batch.streams),
            cells=cells,
            streams=batch.streams,
            heads=attention.num_attention_heads,
            key_heads=1,
            value_dim=_latent(attention),
            key_row_bytes=row_bytes,
            value_row_bytes=row_bytes,
        )
    )


ARCHITECTURES = (
    Architecture(
        name="deepseek2",
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
        names={
            "q_a_proj": ("attn_q_a",),
            "q_b_proj": ("attn_q_b",),
            "kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
            "kv_b_proj": ("attn_kv_b",),
        },
        norms={"q_a_layernorm": "attn_q_a_norm", "kv_a_layernorm": "attn_kv_a_norm"},
        tensors=_tensors,
        cached=_cached,
        attention=_attention,
    ),
)
