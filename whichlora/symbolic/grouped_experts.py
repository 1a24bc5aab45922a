"""Experts in grouped products that keep no weight, as Unsloth runs them.

A frozen weight in 4 bit is expanded for a product, and again for its gradient. Adapters are grouped
products of their own beside it, so that no weight with an adapter in it is made.

Source: unsloth_zoo 2026.10.9 `temporary_patches/moe_utils.py`, `forward_native_grouped_mm`,
`_GroupedMMRecompute`, `_extract_lora_from_wrapper`; `moe_triton_kernels.py`, `moe_fused_swiglu.py`.
"""

from __future__ import annotations

from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Linear, Moe
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import NOTHING, LinearForm, constant, per_token, scaled
from whichlora.symbolic.operators import OpEmitter


def run_grouped(code: OpEmitter, moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by expert, gate and up, their product, down, and the weighted sum.

    Kind: exact, of code that is not compiled; upper bound of compiled code.
    """
    tape, few, hidden = code.tape, moe.experts_per_token, moe.router.in_features
    rows = per_token(few)
    up_linear, down_linear = moe.expert.linears
    up_factors, down_factors = (_factors(code, linear) for linear in (up_linear, down_linear))
    order = tape.op([chosen], rows, INDEX_BYTES, detached=True)
    readers = tape.op([order], rows, INDEX_BYTES, detached=True)
    gathered = tape.op(
        [x], per_token(few * hidden), x.size, saves=[readers], what="experts: gathered inputs"
    )
    joint, of_up = _product(code, up_linear, gathered, up_factors, few, ())
    active = tape.op(
        [joint],
        per_token(few * moe.expert.width),
        joint.size,
        saves=[joint],
        what="experts: gate and up",
    )
    # `_MoEGateGradIdentity`: gradients of the weights, by products in fp32, from what `down` reads
    gates = tape.op([weights], rows, weights.size, saves=[order, active], what="experts: weights")
    inner = tape.works_before(
        tape.in_place(active, gates), 3 * [scaled(per_token(few * moe.expert.width), 4)]
    )
    out, of_down = _product(code, down_linear, inner, down_factors, few, of_up)
    inverse = [scaled(rows, INDEX_BYTES), scaled(rows, INDEX_BYTES)]
    result = tape.op(
        [out], per_token(hidden), x.size, saves=[order, gates], inner=inverse, what="experts: sum"
    )
    # local variables of `forward_native_grouped_mm`, and of PEFT's wrappers around it
    tape.hold(x, gathered, order, joint, inner, gates, out, *of_down)
    tape.hold(*up_factors, *down_factors)
    return result


def _factors(code: OpEmitter, linear: Linear) -> tuple[Tensor, ...]:
    """A [experts, in, r] and B [experts, r, out]: PEFT's flat matrices, laid out anew."""
    if not code.adapts(linear):
        return ()
    tape, size, made = code.tape, code.dtypes.adapter_bytes, []
    for width in (linear.in_features, linear.out_features):
        elements = code.per_rank(linear.rank_multiple * linear.count * width)
        flat = tape.weight(elements, size, trained=True)
        made.append(tape.op([flat], elements, size, what=f"{linear.name}: adapter, laid out"))
    return tuple(made)


def _product(
    code: OpEmitter,
    linear: Linear,
    x: Tensor,
    factors: tuple[Tensor, ...],
    few: int,
    named: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The rows times their experts' matrices, and what local variables hold of the adapter.

    Args:
        named: what these variables hold before; each gives way to its successor.
    """
    tape, elements = code.tape, per_token(few * linear.out_features)
    dense = _expanded(code, linear)
    base = tape.op([x], elements, x.size, inner=dense, inner_backward=dense)
    if not factors:
        return base, named
    narrow = [code.cast(factor, x.size, f"{linear.name}: adapter, cast") for factor in factors]
    a, b = narrow
    tape.hold(*named[:2])
    small = tape.op(
        [x, a], code.rows.of_rank(linear.rank_multiple * few), x.size, saves=[x, a], what="A·x"
    )
    tape.hold(*named[2:3])
    update = tape.op([small, b], elements, x.size, saves=[small, b])
    tape.hold(*named[3:])
    result = code.add(base, code.scale(update), f"{linear.name}: result")
    return result, (a, b, small, update)


def _expanded(code: OpEmitter, linear: Linear) -> LinearForm:
    """All experts in 16 bit, where they are not stored so; Triton's kernel unpacks scales inside.

    Source: `nf4_dequant_triton`.
    """
    if not is_quantised(linear, code.dtypes):
        return NOTHING
    return constant(linear.num_weights * code.dtypes.half_bytes)
