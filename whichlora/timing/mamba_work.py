"""What the scan of a Mamba layer does: products within chunks and between them, or a loop."""

from __future__ import annotations

from whichlora.spec.layer import Layer
from whichlora.spec.numeric import Count, ceil_div

# Kernels of each token of the loop of Mamba 1, in a forward and a backward, counted per operator of
# `mamba_selective_scan`.
TOKEN_OPS, TOKEN_BACKWARD_OPS = 4, 17
# For each token the backward writes zeros for all tokens and adds them up, for two tensors:
# `select_backward` of torch 2.13.
SELECTED_PASSES = 2 * 4


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
