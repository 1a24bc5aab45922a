"""What the profile pass of vLLM 0.3.1 to 0.6.3 reserves beyond tensors that are alive at once.

These releases read how much is free while the allocator still holds every segment of the pass. The
sampler's tensors are cut from segments of the forward before it, and what fits none is new.
"""

from __future__ import annotations

from functools import lru_cache

from whichlora.memory.allocator_simulator import Allocator
from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention

UNUSED_PASS = Fact(
    part="activations",
    what="profile pass: rest of segments",
    shape="-",
    dtype="bytes",
    why="the sampler's tensors are cut from segments of the forward, and do not fill them",
    source="vLLM 0.6.3 worker/worker.py:224 mem_get_info without empty_cache",
)
_LAYERS = 2  # after which a forward reserves no more


def reserved_bytes(
    rank: ModelSpec,
    *,
    vocab_size: int,
    tokens: int,
    sequences: int,
    element_bytes: int,
    sorted_bytes: int,
) -> int:
    """Segments after the profile pass of a dense model; 0 of others, whose passes are not replayed.

    Args:
        sorted_bytes: of a logit that is sorted: fp32 since 0.5.5, before as it was computed.

    Kind: exact for the tensors that are named.
    Source: vLLM 0.6.1 and 0.6.3 models/llama.py `LlamaDecoderLayer.forward`, layers/sampler.py
    `Sampler.forward`, `_apply_top_k_top_p`; logs of Llama-3.1-8B: 1.7 GiB (0.6.2, 8,192 tokens on
    a card of 47.5), 1.24 (built before 0.6.4, 512 tokens).
    """
    layers = [layer for layer, _ in rank.layers()]
    if rank.head is None or any(layer.moe or layer.mlp is None for layer in layers):
        return 0
    widths = tuple(
        (_joined_width(layer.attentions[0]), layer.attentions[0].out_width, layer.mlp.width)
        for layer in layers
        if layer.mlp is not None
    )
    return _replayed(
        widths,
        hidden=tokens * rank.hidden_size * element_bytes,
        token_bytes=tokens * element_bytes,
        logits=sequences * vocab_size,
        logit_bytes=element_bytes,
        sorted_bytes=sorted_bytes,
    )


def _joined_width(attention: Attention) -> int:
    return attention.q_width + attention.k_width + attention.v_width


@lru_cache(maxsize=256)
def _replayed(
    widths: tuple[tuple[int, int, int], ...],
    *,
    hidden: int,
    token_bytes: int,
    logits: int,
    logit_bytes: int,
    sorted_bytes: int,
) -> int:
    """Segments after layers of `widths` (queries, keys and values; their result; MLP)."""
    allocator = Allocator()
    new, free = allocator.allocate, allocator.free
    residual, state = new(hidden), new(hidden)  # rows of the table, and their norm
    for joined, out, width in widths * _LAYERS:
        qkv, attended = new(joined * token_bytes), new(out * token_bytes)
        projected = new(hidden)
        for block in (attended, qkv, state):
            free(block)
        gate_up, product = new(2 * width * token_bytes), new(width * token_bytes)
        free(gate_up)
        state = new(hidden)
        free(product)
        free(projected)
    free(residual)
    new(logits * logit_bytes)
    widened = [new(logits * 4)] if sorted_bytes > logit_bytes else []
    values, indices = new(logits * sorted_bytes), new(logits * 8)
    temporary = [new(logits * 8), new(logits * (sorted_bytes + 8))]  # as of SORTED_LOGIT_BYTES
    for block in temporary:
        free(block)
    held = [new(logits * sorted_bytes), new(logits * sorted_bytes), new(logits)]  # top-p, its mask
    new(logits * sorted_bytes)  # what is sampled of
    for block in [values, indices, *held, *widened]:
        free(block)
    new(logits * 4)  # probabilities and their logarithms
    new(logits * 4)
    return allocator.reserved_bytes
