"""A feed-forward block on a tape, as transformers runs it."""

from __future__ import annotations

from whichlora.spec.layer import Mlp
from whichlora.symbolic.fused_lora import feed_fused, runs_fused
from whichlora.symbolic.graph import Assigned, Tensor
from whichlora.symbolic.linear_form import NOTHING, per_token
from whichlora.symbolic.operators import OpEmitter


def activate(code: OpEmitter, activation: str, x: Tensor) -> Tensor:
    result = _activated(code, activation, x)
    code.tape.hold(x)  # the variable `input` of the activation's `forward` refers to it
    return result


def _activated(code: OpEmitter, activation: str, x: Tensor) -> Tensor:
    tape = code.tape
    if activation in ("relu", "sigmoid", "tanh"):
        return tape.op([x], x.elements, x.size, saves_result=True, what="activation: result")
    if activation == "gelu_fast":
        # 0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x))), a tensor for each operator
        half, outer = code.scale(x), code.scale(x)
        squared = code.multiply(code.scale(x), x)
        shifted = tape.op([squared], x.elements, x.size, passes=True)
        inside = code.multiply(outer, shifted)
        tanh = tape.op([inside], x.elements, x.size, saves_result=True, what="tanh")
        return code.multiply(half, tape.op([tanh], x.elements, x.size, passes=True))
    if activation == "gelu_new":
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x³))), a tensor for each operator
        dtypes = code.dtypes
        half = code.scale(x)
        widened = dtypes.under_autocast and dtypes.backend.widens_norms
        base = code.cast(x, 4) if widened else x
        cubed = _power(code, base)
        inside = code.scale(code.add(x, code.scale(cubed)))
        tanh = tape.op([inside], x.elements, inside.size, saves_result=True, what="tanh")
        shifted = tape.op([tanh], x.elements, tanh.size, passes=True)
        return code.multiply(half, shifted)
    if activation == "erf_gelu":  # 0.5 * x * (1 + erf(x / √2)), so written in ESM
        half, inside = code.scale(x), code.scale(x)
        beside = (x.form,) * 4  # of one expression: square, minus, exp, factor
        erf = tape.op([inside], x.elements, x.size, saves=[inside], inner_backward=beside)
        return code.multiply(half, tape.op([erf], x.elements, x.size, passes=True))
    if activation == "relu2":
        rectified = tape.op([x], x.elements, x.size, saves_result=True, what="rectified")
        widened = code.dtypes.under_autocast and code.dtypes.backend.widens_norms
        base = code.cast(rectified, 4) if widened else rectified
        squared = _power(code, base)
        tape.hold(rectified)
        return squared
    if activation == "bloom_gelu":
        return _bloom_gelu(code, x)
    if activation == "xielu":
        return _xielu(code, x)
    if activation == "quick_gelu":
        gate = tape.op([code.scale(x)], x.elements, x.size, saves_result=True)
        return code.multiply(x, gate)
    return tape.op([x], x.elements, x.size, saves=[x], what="activation: result")


def _bloom_gelu(code: OpEmitter, x: Tensor) -> Tensor:
    """One function, each of whose temporaries goes when its expression has been read.

    Source: transformers 5.23 modeling_bloom.py, `bloom_gelu_forward`, `bloom_gelu_back`.
    """

    def made(*names: str) -> list[Assigned]:
        return [Assigned(name, x.form) for name in names]

    def read(*names: str) -> list[Assigned]:
        return [Assigned(name, None) for name in names]

    # tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    tanh = [
        *made("factor", "cubic", "cubic", "cubic", "product"),
        *read("factor", "cubic"),
        *made("product"),
    ]
    # x * 0.5 * (1.0 + tanh)
    forward = [*made("half"), *tanh, *made("product")]
    # 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh)
    backward = [
        *tanh,
        *made("half", "square", "square", "cubic", "cubic", "cubic", "slope"),
        *read("square", "cubic"),
        *made("first"),
        *read("half", "slope"),
        *made("second", "second", "sum"),
        *read("first", "second"),
    ]
    return code.tape.op([x], x.elements, x.size, saves=[x], inner=forward, inner_backward=backward)


def _power(code: OpEmitter, x: Tensor) -> Tensor:
    """`x` to a power above 1. Source: torch 2.13 `pow_backward`: a power, times the exponent."""
    beside = (x.form, x.form)
    return code.tape.op([x], x.elements, x.size, saves=[x], inner_backward=beside)


def _xielu(code: OpEmitter, x: Tensor) -> Tensor:
    """One formula above zero, another below. Source: `XIELUActivation._xielu_python`."""
    tape, dtypes = code.tape, code.dtypes
    widened = dtypes.under_autocast and dtypes.backend.widens_norms
    size = 4 if widened else x.size
    positive = tape.op([x], x.elements, 1, detached=True)
    slope_reads = [x] if dtypes.trains_base else []
    sloped = tape.op([x], x.elements, size, saves=slope_reads, what="xielu: slope · x")
    above = code.add(code.multiply(sloped, x), code.scale(x))
    least = code.cast(tape.op([x], x.elements, x.size, saves=[x]), size)
    power = tape.op([least], x.elements, size, saves_result=True, what="xielu: exponential")
    difference = tape.op([power, x], x.elements, size, passes=True)
    bent = tape.op([difference], x.elements, size, saves=[difference] if dtypes.trains_base else [])
    below = code.add(bent, code.scale(x))
    result = tape.op(
        [positive, above, below], x.elements, size, saves=[positive], what="xielu: sign"
    )
    tape.hold(x)
    return result


def _above_cutoff(code: OpEmitter, x: Tensor) -> Tensor:
    """What of `x` exceeds its mean by so many deviations, and 0 elsewhere.

    Source: transformers 5.23 `Gemma3nTextMLP._gaussian_topk`; torch 2.13 `std_backward`, whose
    `var_backward` makes `self - mean`, and two products with it.
    """
    tape, scalar = code.tape, per_token(1)
    mean = tape.op([x], scalar, x.size)
    # the difference, scaled; their product is the gradient
    deviation = tape.op(
        [x], scalar, x.size, saves=[x], saves_result=True, inner_backward=x.form, what="deviation"
    )
    cutoff = tape.op([mean, code.scale(deviation)], scalar, x.size)
    negative = x.form if cutoff.needs_grad else NOTHING  # before it is summed up
    above = tape.op([x, cutoff], x.elements, x.size, passes=True, inner_backward=negative)
    result = tape.op([above], x.elements, x.size, saves_result=True, what="above the cutoff")
    tape.hold(x)
    return result


def _gated_in_kernel(code: OpEmitter, gate: Tensor, up: Tensor, *, copies: bool) -> Tensor:
    """Activation and product in one kernel, whose backward writes over both factors.

    Args:
        copies: halves of one tensor, which are laid out anew.

    Source: liger-kernel 0.8.5 `ops/swiglu.py`, `LigerSiLUMulFunction`, and `ops/geglu.py`,
    `LigerGELUMulFunction`; `ensure_contiguous` of `ops/utils.py`.
    """
    return code.tape.op(
        [gate, up],
        up.elements,
        up.size,
        saves=[] if copies else [gate, up],
        keeps=[gate.form, up.form] if copies else [],
        overwrites=True,
        what="gate and up: copies" if copies else "activation · up",
    )


def feed_forward(code: OpEmitter, mlp: Mlp, x: Tensor) -> Tensor:
    tape, dtypes = code.tape, code.dtypes
    named: tuple[Tensor, ...] = ()
    if mlp.gated and len(mlp.linears) > 2 and runs_fused(code, mlp.linears[:3]):
        return feed_fused(code, mlp, x)
    if mlp.gated and len(mlp.linears) > 2:
        gate_linear, up_linear, down_linear = mlp.linears[:3]
        gate = code.linear(gate_linear, x)
        if mlp.is_scaled:
            gate = code.scale(gate)
        if mlp.is_sparse:
            gate = _above_cutoff(code, gate)
        active = gate if dtypes.kernels.gated else activate(code, mlp.activation, gate)
        up = code.linear(up_linear, x)
        if dtypes.kernels.gated:
            inner = _gated_in_kernel(code, gate, up, copies=False)
        else:
            inner = code.multiply(active, up)
        # `act_fn(gate_proj(x)) * up_proj(x)` of `LlamaMLP.forward`: the interpreter holds
        # both factors until the product exists
        tape.hold(active, up)
        named = (gate, active, up) if mlp.names_steps else ()
    elif mlp.gated:
        joint_linear, down_linear = mlp.linears[:2]
        joint = code.linear(joint_linear, x)
        half = per_token(mlp.width)
        gate, up = tape.parts(joint, (half, half))
        if dtypes.kernels.gated:
            inner = _gated_in_kernel(code, gate, up, copies=True)
        else:
            inner = code.multiply(up, activate(code, mlp.activation, gate))
        tape.hold(joint)
    else:
        in_linear, down_linear = mlp.linears[:2]
        inner = activate(code, mlp.activation, code.linear(in_linear, x))
        if mlp.is_inline:
            tape.hold(x)
    for norm in mlp.norms:
        normed = code.norm(norm, inner)
        tape.hold(inner)  # an argument of the norm's call
        inner = normed
    if mlp.dropout and dtypes.training:
        inner = code.dropout(inner)
    result = code.linear(down_linear, inner)
    if mlp.is_scaled:
        result = code.scale(result)
    tape.hold(*([] if mlp.is_inline else [x]), inner, *named)
    if mlp.gated and dtypes.kernels.gated and len(mlp.linears) < 3:
        tape.hold(joint)  # `gate` and `up_states` of `LigerPhi3SwiGLUMLP.forward` are parts of it
    return result
