"""Choosing the keys that each query sees, on a tape: an indexer that learns nothing.

Source: transformers 5.23 `DeepseekV32Indexer`, `DeepseekV32Attention.forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whichlora.spec.layer import Attention, SparseKeys
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import LinearForm, per_pair, per_token
from whichlora.symbolic.operators import OpEmitter

CHOICE_BYTES = 4  # of an index as the indexer returns it
CHOICE = "chosen keys"  # a variable of the model's loop
Rotate = Callable[[OpEmitter, Tensor, Attention, str], Tensor]
Turn = Callable[[OpEmitter, Tensor], Tensor]


def mask_other_keys(
    code: OpEmitter, attention: Attention, x: Tensor, latent: Tensor, rotate: Rotate, turn: Turn
) -> tuple[Tensor, ...]:
    """The layer's mask of keys that were not chosen; all tensors that local variables then hold.

    Args:
        x, latent: what keys and queries of the indexer are made of.
        rotate: half against half; `turn`: every second column against its neighbour.
    """
    tape, sparse = code.tape, attention.sparse
    assert sparse is not None
    with tape.without_graph():
        if sparse.num_heads:
            read = replace(x, needs_grad=False), replace(latent, needs_grad=False)
            chosen = _choose(code, attention, sparse, *read, rotate, turn)
        else:
            chosen = tape.weight(_of_chosen(sparse, 1), CHOICE_BYTES)  # counted elsewhere
        every = tape.op([], per_pair(1), 1)
        indices = code.cast(chosen, INDEX_BYTES)
        others = tape.op([every, indices], per_pair(1), 1)  # `scatter`
        tape.hold(every)
        if code.dtypes.uses_sdpa:
            seen = tape.op([others], per_pair(1), 1)
            mask = tape.op([seen], per_pair(1), 1)
        else:
            mask = tape.op([others], per_pair(1), code.stream_bytes)
    if sparse.hands_on and sparse.num_heads:
        tape.hold_to_end(chosen, name=CHOICE)
    return chosen, others, mask


def _of_chosen(sparse: SparseKeys, count: int) -> LinearForm:
    """`count` for each key that a query sees."""
    return per_pair(count) if sparse.has_all else per_token(count * sparse.top_k)


def _choose(
    code: OpEmitter,
    attention: Attention,
    sparse: SparseKeys,
    x: Tensor,
    latent: Tensor,
    rotate: Rotate,
    turn: Turn,
) -> Tensor:
    """Indices of the keys of most score, for each query."""
    tape, heads = code.tape, sparse.num_heads
    assert sparse.norm is not None
    q_linear, k_linear, weights_linear = (
        replace(linear, active=1) for linear in attention.linears if not linear.active
    )
    q = code.linear(q_linear, latent)
    k = code.norm(sparse.norm, code.linear(k_linear, x))
    query, q_turned = _rotated(code, attention, sparse, q, heads, rotate, turn)
    key, k_turned = _rotated(code, attention, sparse, k, 1, rotate, turn)
    wide = code.cast(query, 4), code.cast(key, 4)
    factors = [code.autocast(each) for each in wide]
    if sparse.batched and not code.decoding:  # laid out for every query
        factors[1] = tape.op([factors[1]], per_pair(sparse.head_dim), factors[1].size)
    product = tape.op(factors, per_pair(heads), factors[0].size)
    tape.hold(*wide)
    scores = code.scale(code.scale(product))  # `relu` of them, scaled
    weights = code.scale(code.cast(code.linear(weights_linear, x), 4))
    of_heads = tape.op([code.autocast(weights), scores], per_pair(1), scores.size)
    hidden = tape.op([], per_pair(1), 1)  # `~attention_mask`
    masked = tape.op([of_heads, hidden], per_pair(1), of_heads.size)
    tape.hold(of_heads)
    places = tape.op(
        [masked], _of_chosen(sparse, 1), INDEX_BYTES, inner=_of_chosen(sparse, masked.size)
    )
    chosen = code.cast(places, CHOICE_BYTES)
    # local variables, until it returns
    tape.hold(q, k, q_turned, k_turned, query, scores, weights, masked)
    if code.dtypes.training:  # else the name is that of the cache's keys
        tape.hold(key)
    return chosen


def _rotated(
    code: OpEmitter,
    attention: Attention,
    sparse: SparseKeys,
    x: Tensor,
    heads: int,
    rotate: Rotate,
    turn: Turn,
) -> tuple[Tensor, Tensor]:
    """Heads with their positions, and the part of them that was rotated."""
    tape, rotary = code.tape, attention.rotary_dim
    parts = per_token(heads * rotary), per_token(heads * (sparse.head_dim - rotary))
    turned, plain = tape.parts(x, parts)
    if sparse.interleaved:
        turned = turn(code, turned)
    else:
        turned = rotate(code, turned, replace(attention, head_dim=rotary), "indexer")
    return tape.op([turned, plain], x.elements, x.size), turned
