"""Attention of blocks to their neighbours, and to sums of blocks, all keys written out.

Source: transformers 5.23 `LongT5LocalAttention`, `LongT5TransientGlobalAttention`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.layer import Attention
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import (
    LinearForm,
    constant,
    per_chunk,
    per_chunk_group,
    per_group,
    per_sequence,
    per_token,
    plus,
)
from whichlora.symbolic.operators import OpEmitter, Rows

_NEIGHBOURS = 3  # a block, the one before it and the one after it


def _keys(attention: Attention, width: int) -> LinearForm:
    """Elements of a tensor that has `width` for every block and key that it sees."""
    chunk, group = attention.chunk_size, attention.summed_tokens
    near = per_chunk(_NEIGHBOURS * chunk * width, chunk)
    return plus(near, per_chunk_group(width, chunk=chunk, group=group)) if group else near


def mask_elements(attention: Attention) -> LinearForm:
    """Elements of the mask of a block's neighbours, one for every sequence."""
    chunk = attention.chunk_size
    return per_chunk(_NEIGHBOURS * chunk * chunk, chunk)


def bias_elements(attention: Attention) -> LinearForm:
    """Elements of the bias that the first layer makes, its mask added for every sequence."""
    return _keys(attention, attention.num_attention_heads * attention.chunk_size)


def attend_in_blocks(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    tape, dtypes = code.tape, code.dtypes
    q_linear, k_linear, v_linear, out_linear = attention.linears
    side: tuple[Tensor, ...] = ()
    sums = _sums_of_blocks(code, attention, x) if attention.summed_tokens else None
    q = tape.view(code.linear(q_linear, x), copies_gradient=not code.ragged)
    k, v = code.linear(k_linear, x), code.linear(v_linear, x)
    if sums is not None:
        of_groups = replace(code, rows=Rows(group=attention.summed_tokens))
        side = (of_groups.linear(k_linear, sums), of_groups.linear(v_linear, sums))
    q, k, v = (_in_blocks(code, attention, state) for state in (q, k, v))
    k, v = _with_neighbours(code, attention, k), _with_neighbours(code, attention, v)
    if side:
        side = tuple(_for_every_block(code, attention, state) for state in side)
        k, v = (
            tape.concatenate((near, far), _keys(attention, attention.q_width))
            for near, far in zip((k, v), side, strict=True)
        )
    scores = _product(code, code.copy(q), code.copy(k), bias_elements(attention))
    bias, named = _bias(code, attention, size=scores.size)
    added = tape.in_place(scores, bias)
    probabilities = code.cast(code.softmax(code.cast(added, 4)), scores.size)
    if attention.dropout and dtypes.training:
        probabilities = code.dropout(probabilities)
    probabilities = code.cast(probabilities, v.size)
    blocks = per_chunk(attention.chunk_size * attention.out_width, attention.chunk_size)
    out = code.copy(_product(code, probabilities, code.copy(v), blocks))
    (out,) = tape.parts(out, (per_token(attention.out_width),))
    result = code.linear(out_linear, code.copy(out) if code.ragged else out)
    tape.hold(out)
    tape.hold(x, q, k, v, scores, probabilities, *side, *named)
    return result


def _product(code: OpEmitter, x: Tensor, y: Tensor, elements: LinearForm) -> Tensor:
    """`torch.einsum`, whose operands autocast narrows after they are laid out head by head."""
    size = code.dtypes.compute_bytes if code.dtypes.under_autocast else x.size
    first, second = code.cast(x, size), code.cast(y, size)
    saves = [a for a, b in ((second, first), (first, second)) if b.needs_grad]
    result = code.tape.op([first, second], elements, size, saves=saves, what="scores")
    code.tape.hold(x, y)
    return result


def _in_blocks(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """`_split_into_blocks`: the last block is filled up."""
    if not code.ragged:
        return x
    chunk = attention.chunk_size
    return code.tape.op([x], per_chunk(chunk * attention.q_width, chunk), x.size)


def _with_neighbours(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """`_concatenate_3_blocks`: a block of zeros on both ends, and three slices side by side."""
    tape, chunk = code.tape, attention.chunk_size
    width = chunk * attention.q_width
    block = per_chunk(width, chunk)
    padded = tape.op([x], plus(block, per_sequence(2 * width)), x.size)
    slices = [tape.parts(padded, (block,))[0] for _ in range(_NEIGHBOURS)]
    result = tape.concatenate(slices, per_chunk(_NEIGHBOURS * width, chunk))
    tape.hold(x)
    return result


def _for_every_block(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    sizes = {"chunk": attention.chunk_size, "group": attention.summed_tokens}
    return code.tape.op([x], per_chunk_group(attention.q_width, **sizes), x.size)


def _sums_of_blocks(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """`_create_global_aggregates`: a product with a one-hot matrix, and a norm.

    Kind: upper bound where the last block is filled up: the matrix has no such rows.
    """
    tape, group = code.tape, attention.summed_tokens
    chosen = per_chunk_group(attention.chunk_size, chunk=attention.chunk_size, group=group)
    one_hot = tape.op([], plus(chosen, per_token(1)), INDEX_BYTES)
    numbers = tape.op([one_hot], chosen, x.size)
    size = code.dtypes.compute_bytes if code.dtypes.under_autocast else x.size
    read, factor = code.cast(x, size), code.cast(numbers, size)
    width = attention.linears[0].in_features
    sums = tape.op([read, factor], per_group(width, group), size, saves=[factor])
    tape.hold(one_hot, numbers)
    (norm,) = attention.norms
    return code.norm(norm, sums, rows=per_group(norm.rows, group))


def _bias(code: OpEmitter, attention: Attention, *, size: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What is added to the scores, and what variables name besides."""
    tape, dtypes = code.tape, code.dtypes
    elements, wanted = bias_elements(attention), dtypes.trains_base or code.reentrant
    size = bias_bytes(attention, size)
    masks: tuple[Tensor, ...] = ()
    if attention.summed_tokens or code.makes_bias:
        masks = (tape.op([], mask_elements(attention), 4),)
    if not code.makes_bias:
        return tape.shared(elements, size, needs_grad=wanted), masks
    bias, named = _looked_up(code, attention, size)
    tape.returns_to_later_layers(bias, gathers=bias.needs_grad or code.reentrant)
    return bias, masks + named


def bias_bytes(attention: Attention, size: int) -> int:
    """One element of the bias, added to scores of `size` bytes: the mask of zeros is in fp32."""
    return size if attention.summed_tokens else 4


def _looked_up(
    code: OpEmitter, attention: Attention, size: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The bias, and its part for sums.

    Source: `compute_bias`, `compute_side_bias` and what adds the mask to them.
    """
    tape, dtypes, chunk = code.tape, code.dtypes, attention.chunk_size
    heads, group = attention.num_attention_heads, attention.summed_tokens

    def table(places: LinearForm, elements: LinearForm) -> Tensor:
        buckets = tape.op([], places, INDEX_BYTES)
        weight = tape.weight(constant(0), dtypes.base_bytes, trained=dtypes.trains_base)
        return tape.op(
            [weight, buckets], elements, dtypes.base_bytes, saves=[buckets], what="position bias"
        )

    pairs = _NEIGHBOURS * chunk * chunk
    near = table(constant(pairs), constant(heads * pairs))
    masked = tape.op([near], per_chunk(heads * pairs, chunk), 4)
    if not group:
        return masked, ()
    masked = code.cast(masked, size)
    side = per_chunk_group(chunk, chunk=chunk, group=group)
    of_heads = per_chunk_group(heads * chunk, chunk=chunk, group=group)
    far = code.cast(tape.op([table(side, of_heads)], of_heads, 4), size)
    return tape.concatenate((masked, far), bias_elements(attention)), (far,)
