"""Blocks that mix tokens without attention, on a tape: gated delta nets and short convolutions.

Source: transformers 5.23 `Qwen3_5GatedDeltaNet`, `Qwen3NextGatedDeltaNet`, `Lfm2ShortConv` and
`torch_chunk_gated_delta_rule`, which run where no kernels of flash-linear-attention are installed.
"""

from __future__ import annotations

from whichlora.spec.layer import Attention
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import (
    CHUNK,
    LinearForm,
    minus,
    per_chunk,
    per_sequence,
    per_token,
    plus,
    scaled,
    total,
)
from whichlora.symbolic.mamba1 import mix_by_channel_states
from whichlora.symbolic.mamba2 import mix_by_states
from whichlora.symbolic.operators import OpEmitter


def mix_recurrently(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """The block in the place of an attention."""
    block_input = x
    if code.dtypes.padded:  # padding tokens are set to nothing
        x = code.tape.op([x], x.elements, x.size)
    result = _BLOCKS[attention.kind](code, attention, x)
    if attention.kind in ("mamba1", "mamba2"):
        code.tape.hold(block_input)  # held by a variable of the caller
    return result


def _short_convolution(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    tape = code.tape
    in_linear, out_linear = attention.linears
    hidden = attention.head_dim
    joint = code.linear(in_linear, x)
    in_gate, out_gate, values = tape.parts(joint, (per_token(hidden),) * 3)
    product = code.multiply(in_gate, values)
    kernel = attention.state_elements // hidden
    convolved = code.cast(code.convolve(product, hidden, kernel), product.size)
    (convolved,) = tape.parts(convolved, (per_token(hidden),))
    y = code.multiply(out_gate, convolved)
    copied = code.copy(y)
    tape.hold(joint, convolved, y)
    result = code.linear(out_linear, copied)
    tape.hold(x, joint, convolved, copied)
    return result


def _delta_net(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    tape = code.tape
    *in_linears, out_linear = attention.linears
    v_width, heads = attention.out_width, attention.num_attention_heads
    few = per_token(heads)
    first = code.linear(in_linears[0], x)
    if len(in_linears) == 2:  # queries, keys, values and gates per key head
        k_width = in_linears[0].out_features // 2 - v_width
        pair = code.linear(in_linears[1], x)
        q, k, v, z = tape.parts(first, _widths(k_width, k_width, v_width, v_width))
        v, z, q, k = (code.copy(state) for state in (v, z, q, k))
        b, a = (code.copy(part) for part in tape.parts(pair, (few, few)))
        channels = per_token(2 * k_width + v_width)
        mixed = tape.op([q, k, v], channels, first.size)
        tape.hold(q, k, v)
        local_variables = [first, pair]
    else:
        k_width = (in_linears[0].out_features - v_width) // 2
        mixed = first
        z, b, a = (code.linear(linear, x) for linear in in_linears[1:])
        local_variables = [z]
    num_channels = 2 * k_width + v_width
    kernel = attention.state_elements // num_channels
    convolved = code.convolve(mixed, num_channels, kernel)
    active = tape.op([convolved], mixed.elements, convolved.size, saves=[convolved])
    tape.hold(convolved)
    active = code.cast(active, mixed.size)
    tape.hold(mixed)
    q, k, v = tape.parts(active, _widths(k_width, k_width, v_width))
    beta = tape.op([b], few, b.size, saves_result=True)
    shifted = code.scale(code.cast(a, 4))
    decay = code.scale(tape.op([shifted], few, 4, saves=[shifted]))
    y = _chunked_rule(code, attention, (q, k, v), beta, decay)
    tape.hold(active, beta, decay)
    y = _gated_norm(code, attention, y, z)
    result = code.linear(out_linear, y)
    tape.hold(x, active, beta, decay, a, b, y, z, *local_variables)
    return result


def _widths(*counts: int) -> tuple[LinearForm, ...]:
    return tuple(per_token(count) for count in counts)


def _gated_norm(code: OpEmitter, attention: Attention, x: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm over each head, scaled in the stream's dtype, times an activated gate in fp32."""
    normed = code.norm(attention.norms[0], x)
    wide = code.cast(gate, 4, "gate, fp32")
    active = code.tape.op([wide], gate.elements, 4, saves=[wide], what="gate, activated")
    product = code.multiply(normed, active)
    code.tape.hold(x, gate)
    return code.cast(product, x.size)


def _normalised(code: OpEmitter, x: Tensor, rows: LinearForm) -> Tensor:
    """Each head's vector over its length."""
    tape = code.tape
    squares = tape.op([x], x.elements, 4, saves=[x], inner_backward=x.form)
    sums = tape.op([squares], rows, 4)
    inverse = tape.op([code.scale(sums)], rows, 4, saves_result=True)
    return code.multiply_rows(x, inverse)


def _chunked_rule(
    code: OpEmitter,
    attention: Attention,
    qkv: tuple[Tensor, Tensor, Tensor],
    beta: Tensor,
    decay: Tensor,
) -> Tensor:
    """The delta rule in chunks of 64 tokens, in fp32 but for what autocast narrows."""
    tape = code.tape
    heads, size = attention.num_attention_heads, qkv[0].size
    k_width, v_width = heads * attention.head_dim, attention.out_width
    rows, square = per_chunk(CHUNK * heads), per_chunk(CHUNK * CHUNK * heads)
    q, k, v = qkv
    if q.elements.per_token != k_width:  # every key head serves several value heads
        q, k = (tape.op([state], per_token(k_width), size) for state in (q, k))
    # in fp32 already they stay as they are, each head's tokens apart: products copy them first,
    # unless filling up the last chunk has laid them out anew
    apart = size == 4 and not code.ragged
    wide = [state if size == 4 else code.cast(state, 4) for state in (q, k, v)]
    tape.hold(q, k, v)
    beta, decay = (tape.op([state], state.elements, 4, passes=True) for state in (beta, decay))
    q, k = (_normalised(code, state, per_token(heads)) for state in wide[:2])
    scaled_q = code.scale(q)
    before = (scaled_q, k, wide[2])
    q, k, v = (
        tape.op([state], _in_chunks(state), 4, what="delta rule: padded") for state in before
    )
    tape.hold(*before)
    beta, decay = (tape.op([state], rows, 4) for state in (beta, decay))

    v_beta, k_beta = code.multiply_rows(v, beta), code.multiply_rows(k, beta)
    summed = tape.op([decay], rows, 4)
    filled = code.scale(tape.op([summed], square, 4))
    pairwise = tape.op([filled], square, 4, saves_result=True, what="delta rule: decays of pairs")
    system = _product(code, k_beta, k, pairwise, apart=apart)
    inside = _product(code, q, k, pairwise, apart=apart)
    decayed = code.multiply_rows(k_beta, _exponent(code, summed, rows))
    solved = scaled(square, 2 * 4)
    values, keys = (
        tape.op(
            [system, state], state.elements, 4, saves=[system], saves_result=True,
            inner_backward=solved, what="delta rule: solved",
        )
        for state in (v_beta, decayed)
    )  # fmt: skip
    read = code.multiply_rows(q, _exponent(code, summed, rows))
    written = code.multiply_rows(k, _exponent(code, summed, rows))
    core = _scan(code, attention, values, keys, read, inside, written, apart=apart)
    core = code.copy(core)  # solutions are laid out by column, and so is what is made like them
    out = tape.op([core], per_token(v_width), size, passes=True, what="delta rule: result")
    tape.hold(v, beta, k_beta, v_beta, pairwise, system, inside, decayed)
    tape.hold(values, keys, read, written, core)
    return out


def _in_chunks(x: Tensor) -> LinearForm:
    return per_chunk(CHUNK * x.elements.per_token)


def _exponent(code: OpEmitter, x: Tensor, rows: LinearForm) -> Tensor:
    return code.tape.op([x], rows, 4, saves_result=True)


def _product(
    code: OpEmitter, first: Tensor, second: Tensor, pairwise: Tensor, *, apart: bool
) -> Tensor:
    """Each token of a chunk with each, weighted with their decay."""
    if code.dtypes.under_autocast:
        size = code.dtypes.compute_bytes
        first, second = (code.cast(x, size, "delta rule: factor, cast") for x in (first, second))
    if apart:
        first, second = code.copy(first), code.copy(second)
    product = code.tape.op([first, second], pairwise.elements, first.size, saves=[first, second])
    return code.multiply(product, pairwise)


def _scan(
    code: OpEmitter,
    attention: Attention,
    values: Tensor,
    keys: Tensor,
    read: Tensor,
    inside: Tensor,
    written: Tensor,
    *,
    apart: bool,
) -> Tensor:
    """The loop over chunks: a state is read and written in each, and every state is kept.

    The first state needs no gradient, and nothing reads the last.
    """
    state = attention.recurrent_elements
    k_width, v_width = keys.elements, values.elements
    saves: list[Tensor] = []
    if code.dtypes.under_autocast:  # every product casts its factors, chunk by chunk
        size = code.dtypes.compute_bytes
        reads = scaled(plus(k_width, k_width), size)  # keys and queries
        writes = scaled(plus(k_width, v_width), size)  # keys and new values
        always = scaled(plus(v_width, inside.elements), size)
        states = plus(per_chunk(2 * size * state), _but_one(per_chunk(4 * state)))
        saved = total((states, _but_one(reads), _but_one(writes), always))
    elif apart:
        saves = [keys, inside]
        copies = scaled(_but_one(plus(k_width, k_width)), 4)
        saved = total((per_chunk(4 * state), scaled(v_width, 4), copies))
    else:
        saves = [keys, read, inside, written]
        saved = plus(per_chunk(4 * state), scaled(v_width, 4))
    # a part's gradient is laid out over the whole; so is that of what was written in place
    part = scaled(values.elements, 4)
    return code.tape.op(
        [values, keys, read, inside, written],
        values.elements,
        4,
        saves=saves,
        keeps=[saved],
        # a state, what is left of it, what comes to it and their sum, which a cache has counted;
        # new values and what was read
        inner=per_sequence(4 * ((3 + code.dtypes.training) * state + 2 * v_width.per_chunk)),
        inner_backward=plus(plus(part, part), part),
        what="delta rule: states and factors of each chunk",
    )


def _but_one(form: LinearForm) -> LinearForm:
    """Without one chunk of every sequence."""
    return minus(form, per_sequence(form.per_chunk))


_BLOCKS = {
    "linear": _delta_net,
    "mamba1": mix_by_channel_states,
    "mamba2": mix_by_states,
    "conv": _short_convolution,
}
