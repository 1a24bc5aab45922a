"""Attention in overlapping chunks on a tape, as Longformer writes it.

Chunks of `2 * one_sided` tokens begin every `one_sided` tokens, so that a sequence of `n` times
`one_sided` tokens has `n - 1` of them. What their products hold of the window of each token is
copied into one tensor, slice by slice.
Source: transformers 5.23 `LEDEncoderSelfAttention`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.layer import Attention, Windows
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import LinearForm, per_sequence, per_token, plus, scaled
from whichlora.symbolic.operators import OpEmitter


def attend_in_windows(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """Projections, scores of each token's window, their softmax, and the output projection.

    Kind: exact, masks of a chunk's corners left out. Source: `LEDEncoderSelfAttention.forward`
    without global attention; `LEDEncoderAttention.forward`.
    """
    tape, windows = code.tape, attention.windows
    assert windows is not None
    query, key, value, *_, out_linear = attention.linears
    read = replace(x, strided=windows.batched)  # `hidden_states.transpose(0, 1)`
    q, k, v = (code.linear(linear, read) for linear in (query, key, value))
    q = tape.in_place(q)  # `query_vectors /= math.sqrt(self.head_dim)`
    heads = attention.num_attention_heads
    scores = _window_scores(code, windows, heads, q, k)
    mask = _window_scores(code, windows, 1, *_mask(code, q.size))
    scores = tape.write_view(scores, mask)  # `attn_scores += diagonal_mask`
    probabilities = _probabilities(code, attention, tape.view(scores, copies_gradient=True))
    v = tape.view(v, copies_gradient=True)
    context = _weighted_values(code, windows, probabilities, v)
    joined = code.copy(tape.view(context, copies_gradient=True))
    tape.hold(q, k, v, mask, probabilities)
    result = code.linear(out_linear, replace(joined, strided=windows.batched))
    tape.hold(x, joined)
    return result


def _of_chunks(windows: Windows, count: int) -> LinearForm:
    """Elements of a tensor that has `count` for each token of each chunk."""
    return plus(per_token(2 * count), per_sequence(-2 * windows.one_sided * count))


def _mask(code: OpEmitter, size: int) -> tuple[Tensor, Tensor]:
    """One element for each token, 0 or the least number, beside as many ones."""
    ones, mask = (code.tape.op([], per_token(1), size) for _ in range(2))
    return ones, mask


def _chunks(code: OpEmitter, windows: Windows, x: Tensor, width: int, *, turned: bool) -> Tensor:
    """`x` chunk by chunk, which a product reads; a single chunk is read where it is.

    Its gradient is added up by indices, since chunks overlap: all positions, and those of each
    chunk, beside the gradient laid out in a row.
    Source: `_chunk`; torch 2.13 `as_strided_backward`, `sumproduct_pair`.

    Args:
        turned: the product's gradient for it is laid out otherwise.
    """
    if windows.single:
        return code.autocast(code.tape.view(x, copies_gradient=True))
    elements = _of_chunks(windows, width)
    indices = (scaled(x.elements, INDEX_BYTES), scaled(elements, INDEX_BYTES))
    inner = (indices[0], scaled(elements, x.size), indices[1]) if turned else indices
    (overlapping,) = code.tape.parts(x, (elements,), inner=inner)
    return code.autocast(code.copy(overlapping))


def _window_scores(code: OpEmitter, windows: Windows, heads: int, q: Tensor, k: Tensor) -> Tensor:
    """Products of queries and keys, one row of `2 * one_sided + 1` for each token and head.

    Source: `_sliding_chunks_query_key_matmul`, `_mask_invalid_locations`.
    """
    tape, half = code.tape, windows.one_sided
    width = q.elements.per_token
    if width > 1:  # else a broadcast product reads the chunks where they are
        q, k = (
            _chunks(code, windows, each, width, turned=turned)
            for each, turned in ((q, False), (k, True))
        )
    size = q.size
    products = tape.op(
        [q, k], _of_chunks(windows, 2 * half * heads), size, saves=[q, k], what="chunks, copied"
    )
    padded = tape.op([products], _of_chunks(windows, (2 * half + 1) * heads), size)
    row = (2 * half + 1) * heads  # of one token
    scores = tape.op([], per_token(row), size)
    in_last = per_sequence(half * (half + 1) * heads)
    in_first = per_sequence((half - 1) ** 2 * heads)
    chunk_rows = plus(per_token(row), per_sequence(-half * row))  # of half of each chunk
    upper = plus(per_token((half + 1) * heads), scaled(in_last, -1))
    lower = plus(per_token(half * heads), per_sequence(-half * half * heads))
    last_chunk, last_rows = per_sequence(2 * half * row), per_sequence(half * row)
    for parts in (
        (chunk_rows, upper),
        (last_chunk, last_rows, in_last),
        (chunk_rows, lower),
        (last_chunk, last_rows, in_first),
    ):
        value = padded
        for part in parts:
            (value,) = tape.parts(value, (part,))
        scores = tape.write_view(scores, value, parts[-1], replaces=True)
    tape.hold(padded)
    for _ in range(2):  # corners that no token of the sequence stands in
        scores = _corner_masked(code, scores, last_rows, in_last)
    return scores


def _corner_masked(code: OpEmitter, scores: Tensor, rows: LinearForm, corner: LinearForm) -> Tensor:
    """Source: `_mask_invalid_locations`."""
    tape = code.tape
    before = tape.view(scores, copies_gradient=True)
    for part in (rows, corner):
        (before,) = tape.parts(before, (part,))
    lowest, boolean = tape.op([], corner, scores.size), tape.op([], corner, 1)
    chosen = tape.op([before, boolean], corner, scores.size, saves=[boolean])
    tape.hold(lowest)
    return tape.write_view(scores, chosen, corner, replaces=True)


def _probabilities(code: OpEmitter, attention: Attention, scores: Tensor) -> Tensor:
    """Softmax in fp32, rows of padding set to 0, in the dtype of the scores."""
    tape, dtypes = code.tape, code.dtypes
    is_fused = dtypes.fused_fp16_softmax and scores.size == 2
    wide = scores if is_fused else code.cast(scores, 4)
    # `host_softmax` of SoftMax.cu makes its input contiguous, which these scores are not
    if dtypes.kernel_buffers:
        wide = tape.op([wide], wide.elements, wide.size, passes=True)
    softmax = code.softmax(wide, size=4)
    filled = tape.op([softmax], softmax.elements, 4)
    narrow = code.cast(filled, scores.size)
    tape.hold(scores)
    return code.dropout(narrow) if attention.dropout and dtypes.training else narrow


def _weighted_values(code: OpEmitter, windows: Windows, probabilities: Tensor, v: Tensor) -> Tensor:
    """Each token's row of probabilities, moved to its place in a chunk, times padded values.

    Source: `_sliding_chunks_matmul_attn_probs_value`, `_pad_and_diagonalize`.
    """
    tape, half, width = code.tape, windows.one_sided, v.elements.per_token
    heads = probabilities.elements.per_token // (2 * half + 1)
    rows = code.copy(probabilities)
    padded_values = tape.op(
        [v], plus(v.elements, per_sequence(2 * half * width)), v.size, what="values, padded"
    )
    indices = (scaled(padded_values.elements, INDEX_BYTES), per_token(3 * width * INDEX_BYTES))
    (chunks,) = tape.parts(padded_values, (per_token(3 * width),), inner=indices)
    padded = tape.op([rows], per_token((3 * half + 2) * heads), rows.size, what="rows, padded")
    (moved,) = tape.parts(padded, (per_token((3 * half + 1) * heads),))
    (moved,) = tape.parts(moved, (per_token(3 * half * heads),))
    chunks = code.autocast(code.copy(chunks))
    context = tape.op([moved, chunks], v.elements, chunks.size, saves=[moved, chunks])
    tape.hold(padded_values)
    return context
