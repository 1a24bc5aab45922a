"""What all layers share: masks, biases, rotary tables."""

from __future__ import annotations

from typing import Any, TypeAlias

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Layer
from whichlora.spec.numeric import Count, floor_div
from whichlora.symbolic.block_attention import bias_bytes, bias_elements, mask_elements
from whichlora.symbolic.graph import INDEX_BYTES
from whichlora.symbolic.kernels import (
    FUSED,
    added_mask_bytes,
    attention_kernel,
    has_mask_per_head,
    is_masked,
    masks_keys,
    shares_mask,
)
from whichlora.symbolic.linear_form import evaluate

_Mask: TypeAlias = tuple[str, bool, int | None]
"""A stack, whether it is of cross attention, and a window."""


def kept_mask_bytes(
    model: ModelSpec, dtypes: Dtypes, *, tokens: Count, span: Count, **settings: Any
) -> Count:
    """All of `kept_masks`, with its settings. Kind: exact. Source: as of it."""
    masks = kept_masks(model, dtypes, tokens=tokens, span=span, **settings)
    return sum(masks, 0 * span)


def kept_masks(
    model: ModelSpec,
    dtypes: Dtypes,
    *,
    tokens: Count,
    span: Count,
    checkpointed: bool = True,
    side: str = "",
    unbiased: str = "",
    without_zeros: bool = False,
) -> tuple[Count, ...]:
    """Bytes of each attention mask and position bias that all layers of a stack share.

    Args:
        side: only those of this stack, "encoder" or "decoder".
        unbiased: the stack that makes its position bias again, and whose layers have dropped it.
        without_zeros: so they have the zeros of its cross attention.

    Checkpointed layers hold them as their arguments. Eager code adds a mask as wide as looked-up
    rows, SDPA is handed a boolean one; layers with a window have their own. Without it only the
    zeros stay of T5's cross attention, where no padding mask makes new ones.
    Kind: exact. Source: transformers 5.23 `create_causal_mask`, `sdpa_mask`, `T5Stack.forward`.
    """
    masks: dict[_Mask, Count] = {}
    num_pairs: dict[_Mask, Count] = {}
    biases: dict[tuple[str, bool], Count] = {}
    saved: set[_Mask] = set()  # by SDPA, which makes no mask of its own
    for group in (group for group in model.groups if side in ("", group.stack)):
        rows, length = group.layer.padded(tokens, span)
        for attention in (each for each in group.layer.attentions if not each.in_blocks):
            kernel = attention_kernel(attention, dtypes, masked=attention.position == "relative")
            masked = _masked(group.layer, attention, dtypes, length)
            key = (group.stack, attention.cross, attention.sliding_window)
            num_pairs[key] = rows * (attention.memory_len or length + dtypes.prefix_tokens)
            if kernel == "eager":
                size = dtypes.stream_bytes if model.streams is None else dtypes.embedding_bytes
                masks[key] = size * _eager_mask(attention, dtypes, masked)
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
                biases[key[:2]] = INDEX_BYTES * length * length
            elif _shares_bias(attention):
                stays = checkpointed or (attention.cross and kernel in FUSED and not dtypes.padded)
                dropped = group.stack == unbiased and (without_zeros or not attention.cross)
                if stays and not dropped:
                    biases[key[:2]] = _kept_bias_bytes(attention, dtypes, kernel, rows, length)
    made = [masks[mask] * num_pairs[mask] for mask in masks if checkpointed or mask in saved]
    made += biases.values()
    if checkpointed:
        sizes = {"tokens": tokens, "span": span}
        made.append(sequence_bias_bytes(model, dtypes, **sizes))
        made.append(block_bias_bytes(model, dtypes, **sizes, side=side, unbiased=unbiased))
    return tuple(made)


def _eager_mask(attention: Attention, dtypes: Dtypes, masked: Count) -> Count:
    """1 where eager scores get a mask of all pairs; one row for each sequence is left out."""
    return 1 if attention.causal else masked * (not masks_keys(attention, dtypes))


def making_mask_bytes(layer: Layer, dtypes: Dtypes, *, tokens: Count, span: Count) -> Count:
    """While LED's encoder makes its mask, of which it reads one row: it has one of all pairs.

    The mask in the dtype of the rows, one less it, which are masked, and the result.
    Kind: exact. Source: transformers 5.23 `_prepare_4d_attention_mask_inverted` of modeling_led.py.
    """
    if layer.windows is None:
        return 0 * tokens
    rows, length = layer.padded(tokens, span)
    return (3 * dtypes.stream_bytes + 1) * rows * length


def _masked(layer: Layer, attention: Attention, dtypes: Dtypes, span: Count) -> Count:
    """1 where a mask is made: never for a decoder's own tokens, which are never padded."""
    decodes = any(each.cross for each in layer.attentions) and not attention.cross
    return 0 * span if decodes else is_masked(attention, dtypes, span)


def _relative_bias_bytes(attention: Attention, dtypes: Dtypes, *, span: Count) -> Count:
    """Of all queries and keys, the same for every sequence."""
    size = dtypes.linear_out_bytes if attention.cross else dtypes.base_bytes
    return size * attention.num_attention_heads * span * (attention.memory_len or span)


def _kept_bias_bytes(
    attention: Attention, dtypes: Dtypes, kernel: str, rows: Count, length: Count
) -> Count:
    """So; before transformers 5 eager code has added the mask of each sequence."""
    is_masked = kernel == "eager" and dtypes.libraries.adds_positions_in_place
    number = floor_div(rows, length) if is_masked else 1
    return number * _relative_bias_bytes(attention, dtypes, span=length)


def _shares_bias(attention: Attention) -> bool:
    of_its_own = attention.biases_each_layer or attention.biases_each_sequence
    return attention.position == "relative" and not of_its_own


def makes_bias(layer: Layer) -> bool:
    """Whether the first layer of a stack makes a position bias that the others read.

    Source: transformers 5.23 `T5Stack.forward`: `position_bias = self_attention_position_bias`.
    """
    return any(
        _shares_bias(attention) and not attention.relative_rows for attention in layer.attentions
    )


def zeros_bytes(layer: Layer, dtypes: Dtypes, *, span: Count) -> Count:
    """Zeros that the cross attention of T5 adds, made by its first layer. Kind: exact.

    Source: transformers 5.23 `T5Attention.forward`.
    """
    sizes = [
        _relative_bias_bytes(attention, dtypes, span=span)
        for attention in layer.attentions
        if attention.cross and attention.position == "relative" and not attention.biases_each_layer
    ]
    return sum(sizes, 0 * span)


def block_bias_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    *,
    tokens: Count,
    span: Count,
    side: str = "",
    unbiased: str = "",
) -> Count:
    """Mask and position bias of neighbouring blocks, for every sequence. Args: `kept_masks`.

    Kind: exact. Source: transformers 5.23 `LongT5Stack.forward`, `_get_local_attention_mask`.
    """
    blocks = {
        group.stack: (attention, group.layer.padded(tokens, span))
        for group in model.groups
        for attention in group.layer.attentions
        if attention.in_blocks and side in ("", group.stack)
    }
    total: Count = 0 * tokens
    for stack, (attention, (rows, length)) in blocks.items():
        sizes = {"tokens": rows, "span": length, "r": 0}
        if not attention.summed_tokens:  # else each layer makes its own mask
            total = total + evaluate(mask_elements(attention), **sizes)
        if stack != unbiased:
            size = bias_bytes(attention, dtypes.linear_out_bytes)
            total = total + size * evaluate(bias_elements(attention), **sizes)
    return total


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
