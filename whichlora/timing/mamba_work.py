"""What the scan of a Mamba layer does: products within chunks and between them, or a loop."""

from __future__ import annotations

from whichlora.spec.architecture import Attention, Layer
from whichlora.spec.numeric import Count, ceil_div

SCAN_OPS = 70  # kernels of one scan and its convolution, traced as `work`'s are
# Times that each fp32 tensor is read or written in one forward, from the same trace: pairs of
# positions, keys and queries of every head, and values.
PAIR_PASSES, KEY_PASSES, VALUE_PASSES = 13, 18, 26
# Mamba 1, counted per operator of `mamba_selective_scan`: kernels around the loop, of each of its
# tokens in a forward and a backward, and times that the states of all tokens are read or written.
LOOP_SCAN_OPS, TOKEN_OPS, TOKEN_BACKWARD_OPS = 23, 4, 17
STATE_PASSES = 14
# For each token the backward writes zeros for all tokens and adds them up, for two tensors:
# `select_backward` of torch 2.13.
SELECTED_PASSES = 2 * 4


def scan_ops(attention: Attention) -> int:
    """Kernels of one scan and its convolution, those of the loop over tokens left out.

    Kind: estimate. Source: kernels of traced layers of transformers 5.23.
    """
    return {"mamba1": LOOP_SCAN_OPS, "mamba2": SCAN_OPS}.get(attention.kind, 0)


def scan_loop_ops(layer: Layer, span: Count, *, backward: bool = False) -> Count:
    """Kernels of the loop over the `span` tokens of a sequence.

    Kind: estimate. Source: transformers 5.23 `mamba_selective_scan`.
    """
    loops = sum(attention.kind == "mamba1" for attention in layer.attentions)
    return loops * span * (TOKEN_BACKWARD_OPS if backward else TOKEN_OPS)


def scan_loop_backward_bytes(layer: Layer, span: Count) -> Count:
    """Bytes per token that the loop's backward moves beyond twice those of its forward.

    Kind: estimate. Source: torch 2.13 `select_backward`.
    """
    states = sum(a.recurrent_elements for a in layer.attentions if a.kind == "mamba1")
    return SELECTED_PASSES * 4 * states * span


def scan_flops_per_token(layer: Layer, span: Count, *, decoding: bool) -> Count:
    """Products of one forward, per token of a sequence of `span`, filled up to whole chunks.

    Kind: exact. Source: transformers 5.23 `mamba2_chunk_scan`, `mamba2_selective_state_update`;
    `mamba_selective_scan`.
    """
    flops = 0 * span
    for attention in layer.attentions:
        if attention.kind == "mamba1":  # what each token reads from its state
            flops = flops + 2 * attention.recurrent_elements
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
        elif attention.kind == "mamba1":
            moved += STATE_PASSES * 4 * attention.recurrent_elements
    return moved
