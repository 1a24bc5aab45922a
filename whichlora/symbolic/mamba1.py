"""The mixer of Mamba 1 on a tape, in plain operators: a loop over tokens.

Source: transformers 5.23 `JambaMambaMixer.forward`, `mamba_selective_scan`, which run where the
kernels of mamba-ssm and causal-conv1d are not installed.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Attention, Linear
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import (
    LinearForm,
    constant,
    minus,
    per_sequence,
    per_token,
    plus,
    scaled,
)
from whichlora.symbolic.operators import OpEmitter


def mix_by_channel_states(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """Projection, convolution, step sizes, keys and queries of few elements, scan, projection."""
    tape, dtypes = code.tape, code.dtypes
    in_linear, few_linear, step_linear, out_linear = attention.linears
    inner, state = attention.out_width, attention.k_width
    kernel = attention.state_elements // inner
    channels, few = per_token(inner), per_token(state)

    projected = code.linear(in_linear, x)
    decay = _decay(code, constant(inner * state))
    taken, gate = tape.parts(projected, (channels, channels))
    convolved = code.convolve(taken, inner, kernel)
    (convolved,) = tape.parts(convolved, (channels,))
    active = tape.op([convolved], channels, convolved.size, saves=[convolved])
    tape.hold(convolved)
    active = code.cast(active, taken.size)
    if dtypes.padded:
        active = tape.op([active], active.elements, active.size)
    joint = code.linear(few_linear, code.copy(active))
    step, keys, queries = tape.parts(joint, (per_token(step_linear.in_features), few, few))
    step_norm, key_norm, query_norm = attention.norms
    step = code.norm(step_norm, step)
    keys, queries = code.norm(key_norm, keys), code.norm(query_norm, queries)
    tape.hold(joint)
    steps = _steps(code, step_linear, step)
    scanned = _scan(code, attention, (active, steps, decay, keys, queries), gate)
    narrow = code.copy(code.cast(scanned, x.size))
    result = code.linear(out_linear, narrow)
    tape.hold(x, projected, decay, active, keys, queries, steps, scanned)
    return result


def _decay(code: OpEmitter, elements: LinearForm) -> Tensor:
    """`-exp(A_log)` in fp32, one number for each element of a state."""
    dtypes = code.dtypes
    logs = code.tape.weight(elements, dtypes.base_bytes, trained=dtypes.trains_base)
    power = code.tape.op([code.cast(logs, 4)], elements, 4, saves_result=True)
    return code.scale(power)


def _steps(code: OpEmitter, linear: Linear, step: Tensor) -> Tensor:
    """Step sizes before their bias: the weight itself is read, unless it is quantised."""
    if is_quantised(linear, code.dtypes):
        product = code.linear(linear, step)
        return code.tape.op([product], product.elements, product.size, passes=True)
    return code.base(replace(linear, bias=False), step)


def _scan(
    code: OpEmitter,
    attention: Attention,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: Tensor,
) -> Tensor:
    """States of every token, what is read from them, a skipped product, and the gate."""
    tape, dtypes = code.tape, code.dtypes
    values, steps, decay, keys, queries = operands
    channels, inner = values.elements, attention.out_width
    trained = dtypes.trains_base
    every = per_token(inner * attention.head_dim)

    shifted = tape.op([steps], channels, steps.size)
    if dtypes.under_autocast and dtypes.backend.widens_norms:
        shifted = code.cast(shifted, 4)
    soft = tape.op([shifted], channels, shifted.size, saves=[shifted], what="scan: step sizes")
    exponent = tape.op(
        [decay, soft],
        every,
        4,
        saves=[soft] if trained else [],
        inner_backward=[scaled(every, 4)] * (1 + trained),
    )
    decays = tape.op([exponent], every, 4, saves_result=True, what="scan: decay of each state")
    wide_keys = code.cast(keys, 4)
    written = tape.op(
        [soft, wide_keys],
        every,
        4,
        saves=[soft, wide_keys],
        inner_backward=scaled(every, 2 * 4),
        what="scan: weights of values",
    )
    wide = code.cast(values, 4, "scan: fp32 values")
    added = code.multiply_rows(written, wide)
    outputs = _states(code, attention, decays, added, queries, values.size)
    stacked = tape.op([outputs], channels, outputs.size)
    tape.hold(decays, written, added, outputs)
    skips = tape.weight(constant(inner), 4, trained=trained)
    skipped = code.multiply_rows(values, skips)
    summed = code.add(stacked, skipped)
    active = tape.op([gate], channels, gate.size, saves=[gate], what="gate, activated")
    result = code.multiply(summed, active)
    tape.hold(soft, decays, written, added, outputs, summed)
    return result


def _states(
    code: OpEmitter,
    attention: Attention,
    decays: Tensor,
    added: Tensor,
    queries: Tensor,
    size: int,
) -> Tensor:
    """The loop over tokens: every state is kept for the product that reads it, and the next state.

    The backward makes a gradient of all tokens for each of them and adds it up.
    Source: torch 2.13 `select_backward`.
    """
    num = attention.recurrent_elements
    single, every = per_sequence(num), decays.elements
    # the first state is zeros in the dtype of the values, and the last has no next one
    states = plus(scaled(minus(every, single), 4), scaled(single, size))
    product = code.dtypes.compute_bytes if code.dtypes.under_autocast else size
    # a product in fp32 reads the states themselves, the last among them
    narrow = scaled(every, product) if product < 4 else scaled(single, 4)
    return code.tape.op(
        [decays, added, queries],
        per_token(attention.out_width),
        product,
        saves=[decays, queries],
        keeps=[states, narrow],
        inner=scaled(single, 3 * 4),
        inner_backward=scaled(every, 4),
        in_turn=True,
        what="scan: states",
    )
