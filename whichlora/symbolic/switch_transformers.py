"""One expert for each token, which takes so many tokens of a sequence and no more.

Source: transformers 5.23 `SwitchTransformersTop1Router`, `SwitchTransformersExperts`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.layer import Moe
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import per_token
from whichlora.symbolic.mlp import feed_forward
from whichlora.symbolic.operators import OpEmitter, Rows


def route_to_largest(code: OpEmitter, moe: Moe, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The probability of each token's expert, a mask of all experts, and logits."""
    tape, every = code.tape, per_token(moe.num_experts)
    wide = code.cast(x, 4)
    if moe.jitters and code.dtypes.training:
        noise = tape.op([], x.elements, 4, what="router: noise")
        wide = tape.in_place(wide, saves=[noise])
    logits = code.linear(moe.router, wide)
    scores = tape.op(
        [code.cast(logits, 4)], every, 4, saves_result=True, what="router: probabilities"
    )
    narrow = code.cast(scores, x.size)
    largest = tape.op([], per_token(1), INDEX_BYTES)
    one_hot = tape.op([largest], every, INDEX_BYTES)
    places = tape.op([one_hot], every, INDEX_BYTES)
    takes = tape.op([places], every, 1)
    chosen = tape.op([one_hot, takes], every, INDEX_BYTES)
    weights = tape.op([narrow], per_token(1), narrow.size, keeps=[per_token(INDEX_BYTES)])
    tape.hold(wide, logits, narrow, places, takes)
    return weights, chosen, logits


def run_with_capacity(
    code: OpEmitter, moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """One expert after the other, an even share of the tokens for each, up to its capacity."""
    tape, hidden = code.tape, moe.router.in_features
    result = tape.op([], per_token(hidden), x.size)
    linears = tuple(replace(linear, count=1) for linear in moe.expert.linears)
    expert = replace(moe.expert, linears=linears)
    named: tuple[Tensor, ...] = ()
    for number in range(moe.num_experts):
        rows = Rows(chosen=1, part=number, parts=moe.num_experts)
        if code.ragged and not code.decoding:
            rows = Rows(in_sequence=moe.capacity)
        part = replace(code, rows=rows)
        readers = tape.op([tape.op([chosen], per_token(1), INDEX_BYTES)], rows.of(2), INDEX_BYTES)
        gathered = tape.op(
            [x, readers], rows.of(hidden), x.size, saves=[readers], what="experts: gathered inputs"
        )
        tape.hold(*named[:1])
        out = feed_forward(part, expert, gathered)
        row_weights = tape.op([weights, readers], rows.of(1), weights.size, saves=[readers])
        weighted = part.multiply_rows(out, row_weights, row_last=True)
        tape.hold(*named)
        added = part.cast(weighted, x.size)
        # `index_add` of derivatives.yaml: `expand_as(source)`
        result = tape.in_place(result, added, saves=[readers, added])
        named = gathered, weighted
    tape.hold(x, *named)
    return result
