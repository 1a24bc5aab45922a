"""Experts in a Python loop, each on the rows of the tokens that chose it: an even share.

Source: transformers 4.36 to 4.57 `MixtralSparseMoeBlock.forward`; 5.23 `DbrxExperts.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whichlora.spec.layer import Linear, Mlp, Moe
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import constant, per_token
from whichlora.symbolic.mlp import activate
from whichlora.symbolic.operators import OpEmitter, Rows


def run_each_expert(
    code: OpEmitter, moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """One expert after the other, added to the rows of its tokens in place."""
    tape, hidden = code.tape, moe.router.in_features
    result = tape.op([], per_token(hidden), x.size)
    linears = [replace(linear, count=1, active=1) for linear in moe.expert.linears]
    for number in range(moe.num_experts):
        rows = Rows(chosen=moe.experts_per_token, part=number, parts=moe.num_experts)
        part = replace(code, rows=rows)
        readers = tape.op([chosen], rows.of(1), INDEX_BYTES, what="experts: rows")
        gathered = tape.op(
            [x, readers], rows.of(hidden), x.size, saves=[readers], what="experts: gathered inputs"
        )
        out = _run(part, moe.expert, linears, gathered)
        row_weights = tape.op([weights, readers], rows.of(1), weights.size, saves=[readers])
        weighted = part.multiply_rows(out, row_weights)
        result = tape.in_place(result, part.cast(weighted, x.size))
        tape.hold(gathered, out)
    tape.hold(x)
    return result


def _run(part: OpEmitter, expert: Mlp, linears: Sequence[Linear], x: Tensor) -> Tensor:
    tape = part.tape
    *into, down = linears
    if len(into) == 2:
        active = activate(part, expert.activation, _product(part, into[0], x))
        raised = _product(part, into[1], x)
    else:  # two matrices that later became one
        half = part.rows.of(expert.width)
        gate, raised = tape.parts(_product(part, into[0], x), (half, half))
        active = activate(part, expert.activation, gate)
    inner = part.multiply(active, raised)
    tape.hold(active, raised)
    return _product(part, down, inner)


def _product(part: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """A module, or a part of a bare parameter, which autocast casts for each product."""
    if linear.is_module:
        return part.linear(linear, x)
    tape, dtypes = part.tape, part.dtypes
    weight = tape.weight(
        constant(linear.num_weights), dtypes.base_bytes, trained=dtypes.trains_base
    )
    if dtypes.under_autocast:
        x, weight = part.cast(x, dtypes.compute_bytes), part.cast(weight, dtypes.compute_bytes)
    saves = [factor for factor, partner in ((weight, x), (x, weight)) if partner.needs_grad]
    return tape.op(
        [x, weight], part.rows.of(linear.out_features), x.size, saves=saves, multiplies=True
    )
