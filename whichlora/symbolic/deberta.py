"""DeBERTa's attention on a tape: scores of contents, and of contents with relative positions.

Source: transformers 5.23 `DisentangledSelfAttention` with shared projections.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.layer import Attention, Linear
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import (
    LinearForm,
    constant,
    per_pair,
    per_sequence,
    per_span_squared,
    per_token,
)
from whichlora.symbolic.operators import OpEmitter, Rows


def attend_disentangled(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """Projections, three kinds of scores, their softmax, and the output projection."""
    tape, dtypes = code.tape, code.dtypes
    heads = attention.num_attention_heads
    query, key, value, out_linear = attention.linears
    q, k, v = (code.copy(code.linear(linear, x)) for linear in (query, key, value))
    scaled_k = code.scale(k)
    scores = _product(code, q, scaled_k, per_pair(heads))
    table = _table(code, attention, x)
    relative = _relative_scores(code, attention, q, k, table)
    scores = code.add(scores, relative)
    boolean = tape.op([], per_pair(1), 1)
    negated = tape.op([boolean], per_pair(1), 1, what="mask, negated")
    masked = tape.op([scores, negated], scores.elements, scores.size, saves=[negated])
    widened = dtypes.under_autocast and dtypes.backend.widens_norms
    wide = code.cast(masked, 4) if widened else masked
    probabilities = code.softmax(wide)
    if attention.dropout and dtypes.training:
        probabilities = code.dropout(probabilities)
    context = _product(code, probabilities, v, per_token(heads * attention.v_head_dim))
    joined = code.copy(context)
    tape.hold(q, k, v, table, relative, boolean, masked, probabilities)
    result = code.linear(out_linear, joined)
    tape.hold(x)
    return result


def _product(
    code: OpEmitter, x: Tensor, y: Tensor, elements: LinearForm, label: str = "scores"
) -> Tensor:
    """Autocast casts both factors of each product anew."""
    if code.dtypes.under_autocast:
        size = code.dtypes.compute_bytes
        x, y = code.cast(x, size), code.cast(y, size)
    saves = [factor for factor, partner in ((y, x), (x, y)) if partner.needs_grad]
    return code.tape.op([x, y], elements, x.size, saves=saves, what=label)


def _table(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """The embedded positions, which all layers read; dropped anew in each."""
    tape, dtypes = code.tape, code.dtypes
    rows = constant(attention.relative_rows * attention.linears[0].in_features)
    widened = dtypes.under_autocast and dtypes.backend.widens_norms  # out of a LayerNorm
    table = tape.shared(rows, 4 if widened else x.size, needs_grad=dtypes.trains_base)
    if attention.dropout and dtypes.training:
        table = code.dropout(table)
    return table


def _relative_scores(
    code: OpEmitter, attention: Attention, q: Tensor, k: Tensor, table: Tensor
) -> Tensor:
    """Queries with the positions of keys, and keys with those of queries."""
    tape = code.tape
    heads, rows = attention.num_attention_heads, attention.relative_rows
    of_positions = replace(code, rows=Rows(number=rows))

    def projected(linear: Linear) -> Tensor:
        once = code.copy(of_positions.linear(linear, table))
        repeated = per_sequence(rows * linear.out_features)
        return tape.op([once], repeated, once.size, what="projected positions, repeated")

    def score(content: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        label = "scores of all positions, before theirs are gathered"
        every = _product(code, content, positions, per_token(heads * rows), label)
        pairs = per_span_squared(1)
        index = tape.op(
            [tape.op([], pairs, INDEX_BYTES)], pairs, INDEX_BYTES, what="indices of positions"
        )
        picked = tape.op(
            [every, index],
            per_pair(heads),
            every.size,
            saves=[every, index],
            inner_backward=every.form,
        )
        return picked, code.scale(picked)

    pos_q, pos_k = projected(attention.linears[0]), projected(attention.linears[1])
    of_queries, divided = score(q, pos_k)
    total = code.scale(divided)  # added to nought
    of_keys, divided = score(k, pos_q)
    total = tape.in_place(total, divided)
    tape.hold(pos_q, pos_k, of_queries, of_keys, divided)
    return total
