"""What the scan of a Mamba 2 layer does: products within chunks and between them."""

from __future__ import annotations

from whichlora.spec.architecture import Layer
from whichlora.spec.numeric import Count, ceil_div

SCAN_OPS = 70  # kernels of one scan and its convolution, traced as `work`'s are
# Times that each fp32 tensor is read or written in one forward, from the same trace: pairs of
# positions, keys and queries of every head, and values.
PAIR_PASSES, KEY_PASSES, VALUE_PASSES = 13, 18, 26


def scan_flops_per_token(layer: Layer, span: Count, *, decoding: bool) -> Count:
    """Products of one forward, per token of a sequence of `span`, filled up to whole chunks.

    Kind: exact. Source: transformers 5.23 `mamba2_chunk_scan`, `mamba2_selective_state_update`.
    """
    flops = 0 * span
    for attention in layer.attentions:
        if attention.kind != "mamba2":
            continue
        heads, chunk = attention.num_attention_heads, attention.chunk_size
        state = heads * attention.head_dim * attention.v_head_dim
        if decoding:
            flops = flops + 2 * state
            continue
        num_chunks = ceil_div(span, chunk)
        within = chunk * heads * (attention.head_dim + attention.v_head_dim) + 2 * state
        between = (num_chunks + 1) * (num_chunks + 1) * state
        flops = flops + 2 * (num_chunks * chunk * within + between) / span
    return flops


def scan_bytes(layer: Layer) -> int:
    """Bytes per token that the scan's operators read and write in one forward. Kind: estimate."""
    moved = 0
    for attention in layer.attentions:
        if attention.kind == "mamba2":
            heads = attention.num_attention_heads
            moved += PAIR_PASSES * 4 * heads * attention.chunk_size
            moved += KEY_PASSES * 4 * heads * attention.head_dim
            moved += VALUE_PASSES * 4 * heads * attention.v_head_dim
    return moved
