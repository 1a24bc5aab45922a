"""A mixture of experts on a tape: routing, gathered rows, grouped products, the weighted sum.

Source: transformers 5.23 `integrations/moe.py` (`grouped_mm_experts_forward`) and the routers of
the classes; peft 0.21.2 `ParamWrapper` for adapters of bare parameters.
"""

from __future__ import annotations

from whichlora.spec.dtypes import BNB_BLOCK, is_quantised
from whichlora.spec.layer import Linear, Moe, Norm
from whichlora.symbolic.expert_loop import run_each_expert
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.grouped_experts import run_grouped
from whichlora.symbolic.linear_form import constant, per_token, scaled
from whichlora.symbolic.llama4 import run_every_expert
from whichlora.symbolic.mlp import activate, feed_forward
from whichlora.symbolic.operators import OpEmitter
from whichlora.symbolic.switch_transformers import route_to_largest, run_with_capacity

_IN_FP32 = ("softmax_fp32", "softmax_exact", "sigmoid", "sigmoid_divided")
# The best groups of experts first. Source: `DeepseekV3MoE.route_tokens_to_experts`: the correction,
# a sum and a choice of groups, a mask of five steps, the weights' sum, quotient and scale.
_IN_GROUPS, _GROUP_KERNELS = ("sigmoid", "sigmoid_divided"), 11
_DIVIDED = ("sigmoid_narrow", "sigmoid_divided")  # by their sum, which autocast widens


def mix_experts(code: OpEmitter, moe: Moe, x: Tensor) -> Tensor:
    """The block in the place of a feed-forward."""
    tape = code.tape
    if code.dtypes.quant == "mxfp4" and moe.clamped:
        return _run_packed(code, moe, x)
    if moe.by_score:
        return run_every_expert(code, moe, x)
    shared = feed_forward(code, moe.shared, x) if moe.shared and moe.shared_first else None
    weights, chosen, logits = route(code, moe, x)
    result = _run_routed(code, moe, x, weights, chosen)
    if moe.shared is not None:
        result = _with_shared(code, moe, x, result, shared)
    if moe.norm is not None:
        result = code.norm(moe.norm, result)
    tape.hold(x, logits, weights, chosen)
    return result


def _run_routed(code: OpEmitter, moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    grouped = run_grouped if code.dtypes.kernels.experts else run_experts
    run = run_each_expert if moe.one_by_one else grouped
    run = run_with_capacity if moe.capacity else run
    if not moe.latent:
        return run(code, moe, x, weights, chosen)
    into, back = moe.latent
    return code.linear(back, run(code, moe, code.linear(into, x), weights, chosen))


def _with_shared(
    code: OpEmitter, moe: Moe, x: Tensor, routed: Tensor, shared: Tensor | None
) -> Tensor:
    """`routed` and what the shared expert makes of `x`, if it has not run yet: `shared`."""
    assert moe.shared is not None
    first = code.cast(routed, 4) if moe.sums_wide else routed
    if shared is None:
        shared = feed_forward(code, moe.shared, x)
    gates = [linear for linear in moe.shared.linears if linear.out_features == 1]
    if gates:
        product = code.linear(gates[0], x)
        gate = code.tape.op([product], product.elements, product.size, saves_result=True)
        shared = code.multiply_rows(shared, gate)
    if not moe.sums_wide:
        return code.add(first, shared)
    result = code.cast(code.add(first, code.cast(shared, 4)), x.size)
    code.tape.hold(routed)
    return result


def _weight(code: OpEmitter, linear: Linear) -> Tensor:
    """A bare parameter, its adapter folded in if it has one."""
    if code.method.folded is not None and code.adapts(linear):
        return code.method.folded(code, linear)
    if not linear.is_module and is_quantised(linear, code.dtypes):
        return _expanded(code, linear)
    trained = code.dtypes.trains_base
    return code.tape.weight(constant(linear.num_weights), code.dtypes.base_bytes, trained=trained)


def _expanded(code: OpEmitter, linear: Linear) -> Tensor:
    """All experts in 16 bit, anew in each forward, which the products save for their inputs.

    Source: bitsandbytes 0.50.2 `Bnb4bitParametrization.forward`, without gradients.
    """
    scales = linear.num_weights // BNB_BLOCK * 4 if code.dtypes.quant == "nf4-dq" else 0
    return code.tape.op(
        [],
        constant(linear.num_weights),
        code.dtypes.half_bytes,
        inner=[constant(scales), constant(scales)],
        multiplies=True,
        what=f"{linear.name}: expanded experts",
    )


def _multiplied(code: OpEmitter, x: Tensor, weight: Tensor, elements: int, label: str) -> Tensor:
    saves = [weight] if x.needs_grad else []
    if weight.needs_grad:
        saves.append(x)
    return code.tape.op(
        [x, weight], per_token(elements), x.size, saves=saves, multiplies=True, what=label
    )


def _logits(code: OpEmitter, moe: Moe, x: Tensor) -> Tensor:
    router, in_fp32 = moe.router, moe.routing in _IN_FP32
    if in_fp32:
        x = code.cast(x, 4)
    if router.is_module:
        return code.linear(router, x)
    weight = _weight(code, router)
    if in_fp32:
        weight = code.cast(weight, 4, "router: fp32 weight")
    if code.dtypes.under_autocast and moe.routing != "softmax_exact":
        size = code.dtypes.compute_bytes
        x, weight = code.cast(x, size), code.cast(weight, size, "router: weight, cast")
    return _multiplied(code, x, weight, router.out_features, "router: logits")


def route(code: OpEmitter, moe: Moe, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and numbers of the chosen experts, and logits, which the caller's variable holds."""
    tape, router_input = code.tape, x
    if moe.routing == "largest":
        return route_to_largest(code, moe, x)
    if moe.routing == "scaled":
        x = _scaled(code, moe, x)
    logits = _logits(code, moe, x)
    every, few = per_token(moe.num_experts), per_token(moe.experts_per_token)
    chosen = tape.op([], few, INDEX_BYTES)
    if moe.routing == "chosen":
        wide = logits if moe.clamped else code.cast(logits, 4)
        top = tape.op([wide], few, wide.size, saves=[chosen])
        weights = tape.op([top], few, top.size, saves_result=True, what="router: weights")
        return code.cast(weights, x.size), chosen, wide
    scores = logits
    if moe.routing == "sparse_mixer":  # one softmax for each of the two experts
        size = 4 if code.dtypes.under_autocast else logits.size
        scores = tape.op([logits], every, size, saves_result=True, what="router: probabilities")
        again = tape.op([logits], every, size, saves_result=True, what="router: probabilities")
        weights = tape.op([scores, again], few, size, keeps=[scaled(few, INDEX_BYTES + size)])
        tape.runs_beside(18)  # what each expert's softmax masks: largest, distances, comparisons
        return weights, chosen, logits
    is_sigmoid = moe.routing in ("sigmoid", *_DIVIDED)  # it asks for no dtype
    size = logits.size if is_sigmoid else 4
    scores = tape.op(
        [code.cast(logits, size)], every, size, saves_result=True, what="router: probabilities"
    )
    top = tape.op([scores], few, size, saves=[chosen])
    if moe.routing in _DIVIDED and code.dtypes.under_autocast:
        size = 4
    weights = tape.op([top], few, size, keeps=[scaled(few, 4)], what="router: weights")
    if moe.routing in _IN_GROUPS:
        tape.runs_beside(_GROUP_KERNELS)
    if moe.routing == "scaled":
        scale = code.dtypes.base_bytes
        expert_scales = tape.op([chosen], few, scale, what="router: scales of the chosen")
        return code.multiply(weights, expert_scales), chosen, scores
    if moe.routing == "softmax":
        weights = code.cast(weights, logits.size)
    elif moe.routing in ("softmax_exact", "softmax_as_input"):
        weights = code.cast(weights, router_input.size)
    return weights, chosen, logits


def _scaled(code: OpEmitter, moe: Moe, x: Tensor) -> Tensor:
    """Normalised, times a weight for each element and a number. Source: `Gemma4TextRouter`."""
    width, dtypes = moe.router.in_features, code.dtypes
    norm = Norm(name="router: norm", kind="rms_power", width=width, weight=False)
    scale = code.tape.weight(constant(width), dtypes.base_bytes, trained=dtypes.trains_base)
    return code.scale(code.multiply_rows(code.norm(norm, x), scale))


def run_experts(code: OpEmitter, moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by expert, two grouped products, and back. Source: as named above."""
    tape, dtypes, few = code.tape, code.dtypes, moe.experts_per_token
    rows = per_token(few)
    hidden = moe.expert.linears[0].in_features
    sorted_numbers = tape.op([chosen], rows, INDEX_BYTES)
    order = tape.op([chosen], rows, INDEX_BYTES)
    readers = tape.op([order], rows, INDEX_BYTES)
    selected = tape.op(
        [x], per_token(few * hidden), x.size, saves=[readers], what="experts: gathered inputs"
    )
    picked = tape.op([weights], rows, weights.size, saves=[order])

    up_linear, down_linear = moe.expert.linears
    up_bias = _biases(code, up_linear)
    up_weight = _weight(code, up_linear)
    narrow = code.cast(selected, up_weight.size, "experts: gathered inputs")
    raised = up_linear.out_features
    joint = _multiplied(code, narrow, up_weight, few * raised, "experts: gate and up")
    inner = _gated(code, moe, joint)
    tape.hold(joint)
    down_bias = _biases(code, down_linear)
    tape.hold(up_bias)
    down_weight = _weight(code, down_linear)
    read = code.cast(inner, down_weight.size)
    out = _multiplied(code, read, down_weight, few * hidden, "experts: outputs")
    tape.hold(inner)

    weighted = code.multiply_rows(out, picked, row_last=True)
    places = tape.op([order], rows, INDEX_BYTES)
    back = tape.op([weighted], weighted.elements, weighted.size, saves=[places])
    summed = tape.op([back], per_token(hidden), 4 if dtypes.under_autocast else back.size)
    result = code.cast(summed, x.size)
    tape.hold(x, selected, picked, sorted_numbers, order, out, places, back, summed)
    tape.hold(up_weight, down_weight, down_bias)  # PEFT's until the experts return
    return result


def _run_packed(code: OpEmitter, moe: Moe, x: Tensor) -> Tensor:
    """Experts in mxfp4: kernels that gather rows, unpack weights and gate in registers.

    Rows of the second product lie in a buffer of their own before they are added up; a kernel that
    adds them at once has none, so that this is an upper bound.
    Source: transformers 5.23 `Mxfp4GptOssMLP.forward`; `init_allocation` of the kernels'
    `matmul_ogs`.
    """
    tape, few = code.tape, moe.experts_per_token
    rows, hidden = per_token(few), moe.router.in_features
    logits = _logits(code, moe, x)
    scales = tape.op([logits], rows, logits.size)
    # two of int32 each
    gather, scatter = tape.op([], rows, INDEX_BYTES), tape.op([], rows, INDEX_BYTES)
    inner = tape.op([x], per_token(few * moe.expert.width), x.size, what="experts: gated")
    outputs = tape.op([inner], per_token(few * hidden), x.size, what="experts: outputs")
    result = tape.op([outputs], per_token(hidden), x.size)
    tape.hold(x, logits, scales, gather, scatter, inner, outputs)
    return result


def _biases(code: OpEmitter, linear: Linear) -> Tensor:
    """The bias of each row's expert, if there is one; added in place."""
    width = linear.active * linear.out_features if linear.bias else 0
    return code.tape.op([], per_token(width), code.dtypes.base_bytes)


def _gated(code: OpEmitter, moe: Moe, joint: Tensor) -> Tensor:
    tape = code.tape
    half = per_token(moe.experts_per_token * moe.expert.width)
    if not moe.expert.gated:
        return activate(code, moe.expert.activation, joint)
    if not moe.clamped:
        gate, up = tape.parts(joint, (half, half))
        return code.multiply(activate(code, moe.expert.activation, gate), up)
    # every second column each: the gradient of a part is laid out over the whole
    (gate,), (up,) = tape.parts(joint, (half,)), tape.parts(joint, (half,))
    gate = tape.op([gate], half, joint.size, saves=[gate], what="experts: clamped gate")
    up = tape.op([up], half, joint.size, saves=[up])
    sigmoid = tape.op([code.scale(gate)], half, gate.size, saves_result=True, what="experts: gate")
    glu = code.multiply(gate, sigmoid)
    shifted_up = tape.op([up], half, up.size, passes=True)
    result = code.multiply(shifted_up, glu)
    tape.hold(gate, up, glu)
    return result
