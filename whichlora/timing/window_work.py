"""Work of attention in overlapping chunks (`symbolic.windows` has its operators in order)."""

from __future__ import annotations

from whichlora.spec.layer import Attention
from whichlora.spec.numeric import Count


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
