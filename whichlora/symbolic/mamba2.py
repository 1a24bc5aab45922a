"""The mixer of Mamba 2 on a tape, in plain operators: a scan over chunks, without a loop.

Source: transformers 5.23 `GraniteMoeHybridMambaLayer.forward`, `mamba2_chunk_scan`, which run
where the kernels of mamba-ssm are not installed; torch 2.13 `einsum`, which lays out what its
batched product reads.
"""

from __future__ import annotations

from whichlora.spec.layer import Attention
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import (
    LinearForm,
    constant,
    per_chunk,
    per_sequence,
    per_token,
    plus,
    scaled,
)
from whichlora.symbolic.operators import OpEmitter


def mix_by_states(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """Projection, convolution, scan, gated norm, projection."""
    tape, dtypes = code.tape, code.dtypes
    in_linear, out_linear = attention.linears
    inner, heads = attention.out_width, attention.num_attention_heads
    shared = attention.k_width
    mixed = inner + 2 * shared
    kernel = attention.state_elements // mixed

    is_scaled = attention.projection == "scaled"
    read = code.scale(x) if is_scaled else x
    projected = code.linear(in_linear, read)
    if is_scaled:
        tape.hold(projected)
        projected = code.scale(projected)
    gate, taken, step = tape.parts(
        projected, (per_token(inner), per_token(mixed), per_token(heads))
    )
    convolved = code.convolve(taken, mixed, kernel)
    (convolved,) = tape.parts(convolved, (per_token(mixed),))
    active = tape.op([convolved], per_token(mixed), convolved.size, saves=[convolved])
    tape.hold(convolved)
    active = code.cast(active, taken.size)
    if dtypes.padded:
        active = tape.op([active], active.elements, active.size)
    parts = tape.parts(active, (per_token(inner), per_token(shared), per_token(shared)))
    scan = _update_state if code.decoding else _scan
    scanned = scan(code, attention, step, *parts)
    if code.ragged:
        (scanned,) = tape.parts(scanned, (per_token(inner),))
    gated = _gated_norm if attention.norms else _gated
    normed = gated(code, attention, scanned, gate)
    narrow = code.cast(normed, x.size)
    result = code.linear(out_linear, narrow)
    tape.hold(read, projected, active, normed, narrow)
    return result


def _gated(code: OpEmitter, attention: Attention, x: Tensor, gate: Tensor) -> Tensor:
    """Times an activated gate. Source: transformers 5.23 `FalconH1Mixer.forward`."""
    active = code.tape.op([gate], gate.elements, gate.size, saves=[gate], what="gate, activated")
    opened = code.multiply(x, active)
    code.tape.hold(x)
    return opened


def _gated_norm(code: OpEmitter, attention: Attention, x: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm of what the activated gate has let through, all in fp32."""
    tape = code.tape
    wide = code.cast(gate, 4, "gate, fp32")
    active = tape.op([wide], gate.elements, 4, saves=[wide], what="gate, activated")
    tape.hold(wide)
    opened = code.multiply(x, active)
    normed = code.norm(attention.norms[0], opened)
    tape.hold(x)
    return normed


def _scan(code: OpEmitter, attention: Attention, step: Tensor, *parts: Tensor) -> Tensor:
    """Every token reads those before it in its chunk, and the state that the chunk begins with.

    States of chunks are few enough that the decays between them are left out.
    """
    tape, dtypes = code.tape, code.dtypes
    values, keys, queries = parts
    heads, inner = attention.num_attention_heads, attention.out_width
    trained = dtypes.trains_base
    few, read = per_token(heads), per_token(heads * attention.head_dim)
    chunk = attention.chunk_size

    def in_chunks(count: int) -> LinearForm:
        return per_chunk(chunk * count, chunk)

    steps = _step_sizes(code, step, few)
    wide = code.cast(values, 4, "scan: fp32 values")
    repeated = [
        tape.op([code.cast(state, 4)], read, 4, what="scan: repeated for every head")
        for state in (keys, queries)
    ]
    filled = tape.op([wide], in_chunks(inner), 4)
    skipped = code.multiply_rows(filled, tape.weight(constant(heads), 4, trained=trained))
    stepped = code.multiply_rows(wide, code.cast(steps, 4))
    decay = tape.op([again := code.cast(steps, 4)], few, 4, saves=[again] if trained else [])
    x = tape.op([stepped], in_chunks(inner), 4)
    decay_in = tape.op([decay], in_chunks(heads), 4)
    b, c = (tape.op([state], in_chunks(heads * attention.head_dim), 4) for state in repeated)
    tape.hold(stepped, decay, *repeated)
    total = tape.op([decay_in], in_chunks(heads), 4)
    within = _decays_of_pairs(code, decay_in, in_chunks(heads * chunk), chunk)

    scores = _contract(code, c, b, in_chunks(heads * chunk))
    weighted = code.multiply(scores, within)
    diagonal = _contract(code, weighted, x, in_chunks(inner), lays_out=(False, True), turns=True)

    to_end = tape.op([tape.op([total], in_chunks(heads), 4)], total.elements, 4, saves_result=True)
    written = code.multiply_rows(b, to_end)
    num_elements = heads * attention.head_dim * attention.v_head_dim
    states = _contract(code, x, written, per_chunk(num_elements, chunk), turns=True)
    first, begun = _first_states(code, states, num_elements, chunk)
    (starts,) = tape.parts(begun, (per_chunk(num_elements, chunk),))

    from_start = tape.op([total], in_chunks(heads), 4, saves_result=True)
    off = _contract(code, c, starts, in_chunks(inner), turns=True)
    off_scaled = code.multiply_rows(off, from_start)
    summed = code.copy(code.add(diagonal, off_scaled))
    result = code.add(summed, skipped)
    tape.hold(skipped, steps, decay_in, b, c, x, total, within, scores, weighted, diagonal)
    tape.hold(written, first, begun, off, off_scaled)
    return result


# Of a state that decays, takes in a token and is read: two products, a sum, a copy, a cast, and the
# product with the queries. What they move is `STATE_PASSES` of `timing.work`.
_STATE_KERNELS = 6


def _update_state(code: OpEmitter, attention: Attention, step: Tensor, *parts: Tensor) -> Tensor:
    """One token. Source: transformers 5.23 `mamba2_selective_state_update`."""
    tape, heads = code.tape, attention.num_attention_heads
    values, keys, queries = parts
    few, read = per_token(heads), per_token(heads * attention.head_dim)
    steps = code.cast(_step_sizes(code, step, few), 4)
    decay = tape.op([tape.op([steps], few, 4)], few, 4)
    repeated = [tape.op([state], read, state.size) for state in (keys, queries)]
    taken = code.multiply_rows(repeated[0], steps)
    result = tape.op([decay, taken, repeated[1]], values.elements, 4)
    tape.runs_beside(_STATE_KERNELS - 1)
    skipped = code.multiply_rows(values, tape.weight(constant(heads), 4))
    tape.hold(*repeated, taken)
    return code.cast(code.add(result, skipped), values.size)


def _step_sizes(code: OpEmitter, step: Tensor, few: LinearForm) -> Tensor:
    """`softplus(dt + dt_bias)`, which is also clamped."""
    tape, dtypes = code.tape, code.dtypes
    shifted = tape.op([step], few, step.size)
    if dtypes.under_autocast and dtypes.backend.widens_norms:
        shifted = code.cast(shifted, 4)
    soft = tape.op([shifted], few, shifted.size, saves=[shifted])
    return tape.op([soft], few, soft.size, saves=[soft])


def _first_states(
    code: OpEmitter, states: Tensor, num_elements: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """The state before the first chunk, and that which every chunk begins with.

    Args:
        num_elements: elements of the state of one sequence.
    """
    tape, dtypes = code.tape, code.dtypes
    # without gradients, the cache has counted the state that it is only given at the end
    first = tape.op([], per_sequence(num_elements if dtypes.training else 0), states.size)
    with_first = plus(per_chunk(num_elements, chunk), per_sequence(num_elements))
    joined = tape.op([first, states], with_first, states.size)
    laid_out = code.copy(joined)
    begun = tape.op([laid_out], with_first, laid_out.size, saves=[laid_out])
    begun = tape.view(begun, copies_gradient=True)
    tape.hold(joined)
    return first, begun


def _decays_of_pairs(code: OpEmitter, x: Tensor, square: LinearForm, chunk: int) -> Tensor:
    """From each token of a chunk to each, the later ones masked. Source: `segment_sum`."""
    tape = code.tape
    mask = constant(chunk * chunk)
    filled = tape.op([x], square, 4, keeps=[mask], inner_backward=scaled(square, 4))
    summed = tape.op([filled], square, 4, inner_backward=scaled(square, 2 * 4))
    masked = tape.op([summed], square, 4, keeps=[mask])
    tape.hold(filled)
    return tape.op([masked], square, 4, saves_result=True, what="scan: decays of pairs")


def _contract(
    code: OpEmitter,
    first: Tensor,
    second: Tensor,
    elements: LinearForm,
    *,
    lays_out: tuple[bool, bool] = (True, True),
    turns: bool = False,
) -> Tensor:
    """A batched product of two tensors.

    Args:
        lays_out: which of them is copied into the layout of the product.
        turns: the result is looked at in another layout, which its gradient comes back in.
    """
    tape, dtypes = code.tape, code.dtypes
    pair = [
        code.copy(x) if copied else x for x, copied in zip((first, second), lays_out, strict=True)
    ]
    narrow = pair
    if dtypes.under_autocast:
        narrow = [code.cast(x, dtypes.compute_bytes, "scan: factor, cast") for x in pair]
    first, second = narrow
    saves = [x for x, factor in ((second, first), (first, second)) if factor.needs_grad]
    result = tape.op(narrow, elements, first.size, saves=saves, what="scan: product")
    tape.hold(*pair)
    return tape.view(result, copies_gradient=turns)
