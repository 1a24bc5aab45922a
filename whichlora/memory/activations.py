"""What all layers share: masks, biases, rotary tables."""

from __future__ import annotations

from whichlora.spec.architecture import Layer, ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count
from whichlora.symbolic.kernels import (
    FUSED,
    added_mask_bytes,
    attention_kernel,
    has_mask_per_head,
    is_masked,
    shares_mask,
)

_INDEX_BYTES = 8  # torch indexes with int64


def kept_mask_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    *,
    tokens: Count,
    span: Count,
    checkpointed: bool = True,
    side: str = "",
) -> Count:
    """Attention masks and position biases that all layers of a stack share.

    Args:
        side: only those of this stack, "encoder" or "decoder".

    Checkpointed layers hold them as their arguments. Eager code adds a mask in the dtype of the
    stream, SDPA is handed a boolean one; layers with a window have a mask of their own. Without
    checkpointing only the zeros stay that T5's cross attention adds, where no padding mask makes
    new ones of them. Kind: exact.
    Source: transformers 5.23 `create_causal_mask`, `sdpa_mask`, `T5Stack.forward`.
    """
    masks: dict[tuple[str, bool, int | None], Count] = {}
    num_keys: dict[tuple[str, bool, int | None], Count] = {}
    biases: dict[tuple[str, bool], int] = {}
    saved: set[tuple[str, bool, int | None]] = set()  # by SDPA, which makes no mask of its own
    for group in (group for group in model.groups if side in ("", group.stack)):
        for attention in group.layer.attentions:
            kernel = attention_kernel(attention, dtypes, masked=attention.position == "relative")
            reads_encoder = any(each.cross for each in group.layer.attentions)
            decodes = reads_encoder and not attention.cross  # never padded
            masked = 0 * span if decodes else is_masked(attention, dtypes, span)
            key = (group.stack, attention.cross, attention.sliding_window)
            num_keys[key] = attention.memory_len or span + dtypes.prefix_tokens
            if kernel == "eager":
                # a mask is in the dtype of the looked-up rows, as a stream of one state is
                rows = dtypes.stream_bytes if model.streams is None else dtypes.embedding_bytes
                masks[key] = rows * (1 if attention.causal else masked)
            elif dtypes.uses_sdpa:
                masks[key] = masked
                if attention.adds_mask:
                    masks[key] = added_mask_bytes(attention, dtypes) * (1 + 0 * span)
                    if shares_mask(attention, dtypes):  # else each layer makes its own of it
                        saved.add(key)
            if has_mask_per_head(attention) and key in masks:
                masks[key] = dtypes.stream_bytes * attention.num_attention_heads * (1 + 0 * span)
            if attention.relative_rows:  # products of positions, and the distances
                masks[key] = 4 * (1 + 0 * span)
                biases[key[:2]] = _INDEX_BYTES
            elif attention.biases_each_sequence:
                continue
            elif attention.position == "relative" and not attention.biases_each_layer:
                size = dtypes.linear_out_bytes if attention.cross else dtypes.base_bytes
                if checkpointed or (attention.cross and kernel in FUSED and not dtypes.padded):
                    biases[key[:2]] = size * attention.num_attention_heads
    total = sum(biases.values()) * span * span
    if checkpointed:
        total = total + sequence_bias_bytes(model, dtypes, tokens=tokens, span=span)
    for mask, mask_bytes in masks.items():
        if checkpointed or mask in saved:
            total = total + mask_bytes * tokens * num_keys[mask]
    return total


def remade_zeros_bytes(layer: Layer, dtypes: Dtypes, *, span: Count) -> Count:
    """Zeros that the first checkpointed layer of T5's decoder makes again in its backward.

    It made them for the cross attention of all layers, and those of the forward wait for their
    gradient. The looked-up bias that it makes again takes the place of the forward's, which nobody
    holds by then. Kind: exact. Source: transformers 5.23 `T5Attention.forward`.
    """
    sizes = [
        attention.num_attention_heads * dtypes.linear_out_bytes
        for attention in layer.attentions
        if attention.cross and attention.position == "relative" and not attention.biases_each_layer
    ]
    return sum(sizes) * span * span


def sequence_bias_bytes(model: ModelSpec, dtypes: Dtypes, *, tokens: Count, span: Count) -> Count:
    """The position bias of MPNet, one for all layers and written out for every sequence.

    Kind: exact. Source: transformers 5.23 `MPNetEncoder.compute_position_bias`.
    """
    heads = max(
        attention.num_attention_heads * attention.biases_each_sequence
        for layer, _ in model.layers()
        for attention in layer.attentions
    )
    return dtypes.base_bytes * heads * tokens * span


def rotary_bytes(model: ModelSpec, dtypes: Dtypes, *, span: Count) -> Count:
    """Cosines and sines, shared by all layers of one rotated width. Kind: exact.

    Args:
        span: positions: of one sequence in training, of all of a batch that `generate` places.

    Source: transformers 5.23 `LlamaRotaryEmbedding.forward`.
    """
    tables = {
        (attention.rotary_dim, model.rotates_each_kind and attention.sliding_window is None)
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.position == "rope"
    }
    return 2 * dtypes.stream_bytes * sum(width for width, _ in tables) * span
