"""Work of attention in overlapping chunks (`symbolic.windows` has its operators in order)."""

from __future__ import annotations

from whichlora.spec.architecture import Attention
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count

WINDOW_OPS = 60  # kernels between the projections, traced on torch 2.13


def window_flops_per_token(attention: Attention, span: Count) -> Count:
    """Scores and weighted values of one token: products of whole chunks.

    Scores have `2 * one_sided` rows and columns for each chunk, of which there is one less than
    `one_sided` fits into `span`; values have three times `one_sided` for each token.
    Kind: exact. Source: transformers 5.23 `LEDEncoderSelfAttention`.
    """
    windows, heads = attention.windows, attention.num_attention_heads
    assert windows is not None
    half = windows.one_sided
    of_scores = attention.head_dim * (4 * half - 4 * half * half // span)
    return 2 * heads * (of_scores + attention.v_head_dim * 3 * half)


def window_bytes_per_token(attention: Attention, dtypes: Dtypes) -> tuple[int, int]:
    """What its operators read and write for one token: forward and backward.

    A row is a token's window for one head. Chunks have two rows for each, padded or cut; gradients
    of slices are tensors as large as what was sliced, and those of overlapping chunks are added up
    by an index of 8 bytes for each element.
    Kind: exact as counted per operator; edges of sequences and the mask's own chunks left out.
    Source: transformers 5.23 `LEDEncoderSelfAttention`; torch 2.13 `CopySlices::apply_impl`,
    `as_strided_backward`.
    """
    windows, size = attention.windows, dtypes.compute_bytes
    assert windows is not None
    row = attention.num_attention_heads * (2 * windows.one_sided + 1)
    width = attention.q_width
    # product 2, its padding 4, zeros 1, four slices 2, the mask's sum 2; softmax's result copied 2,
    # padded 2.5, read 1.5
    forward = row * size * (2 + 4 + 1 + 2 + 2 + 2 + 2 + 2)
    # queries and keys copied 8, read 4; values padded 2, copied 6, read 3; result, copied 3
    forward += width * size * (8 + 4 + 2 + 6 + 3 + 3)
    # the values' product 3, slices 9, padding 2, a copy 2; the mask's sum 4, corners 16, slices of
    # chunks 45, their padding 4, the scores' product 4
    backward = row * size * (3 + 9 + 2 + 2 + 4 + 16 + 45 + 4 + 4)
    # products 16, padding and copies 6, sums by index 28
    backward += width * size * (16 + 6 + 28)
    # positions once, those of three and twice two chunks thrice, and the zeros that they add to
    backward += width * (8 * (1 + 9) + 2 * 8 * (1 + 6))
    casts = size + 4 if size < 4 else 0
    forward += row * (2 * casts + 8 + 8 + 8)  # made contiguous, softmax, rows of padding
    backward += row * (2 * casts + 8 + 12)
    return forward, backward
