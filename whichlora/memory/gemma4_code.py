"""What only Gemma 4 has, on a tape: borrowed keys, experts beside an MLP, inputs of every layer.

Source: transformers 5.23 `Gemma4TextAttention`, `Gemma4TextDecoderLayer`, `Gemma4TextModel`.
"""

from __future__ import annotations

from collections.abc import Callable

from whichlora.architecture import Attention, Layer, LayerInput
from whichlora.memory.expert_code import route, run_experts
from whichlora.memory.mlp_code import activate, feed_forward
from whichlora.memory.operators import Code
from whichlora.memory.tape import Tensor, per_token

INPUTS_PROJECTION = "per_layer_model_projection"


def one_after_the_other(
    code: Code,
    attention: Attention,
    x: Tensor,
    rotate: Callable[[Code, Tensor, Attention, str], Tensor],
    *,
    copies_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, then keys, then values, each projected, normalised and, values apart, rotated.

    Args:
        copies_gradient: the kernel's gradients are not laid out as what the projections return.
    """
    tape = code.tape
    linears, norms = list(attention.linears), list(attention.norms)

    def rotated(projected: Tensor, what: str) -> Tensor:
        normed = code.norm(norms.pop(0), tape.view(projected, copies_gradient=copies_gradient))
        tape.hold(projected)
        result = rotate(code, normed, attention, what)
        tape.hold(normed)
        return result

    q = rotated(code.linear(linears.pop(0), x), "query")
    if attention.keys_from == "earlier":
        borrowed = tape.shared(
            per_token(attention.k_width + attention.v_width), q.size, needs_grad=code.stack.training
        )
        k, v = tape.parts(borrowed, (per_token(attention.k_width), per_token(attention.v_width)))
        return q, k, v
    k = code.linear(linears.pop(0), x)
    v = k if attention.keys_from == "one" else code.linear(linears.pop(0), x)
    k = rotated(k, "key")
    normed = code.norm(norms.pop(0), tape.view(v, copies_gradient=copies_gradient))
    tape.hold(v)
    return q, k, normed


def feed_both_ways(code: Code, layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    """An MLP of the normalised `y`, and experts of `x` with norms of their own; their sum."""
    assert layer.mlp is not None, "is_written"
    assert layer.moe is not None, "is_written"
    tape = code.tape
    after_mlp, before_experts, after_experts = layer.norms[4:]
    dense = feed_forward(code, layer.mlp, y)
    one = code.norm(after_mlp, dense)
    weights, chosen, scores = route(code, layer.moe, x)
    given = code.norm(before_experts, x)
    routed = run_experts(code, layer.moe, given, weights, chosen)
    tape.hold(given)
    two = code.norm(after_experts, routed)
    tape.hold(routed)
    result = code.add(one, two)
    tape.hold(dense)
    for named in (one, two, weights, chosen, scores):
        tape.hold_to_end(named)
    return result


def add_layer_input(code: Code, layer_input: LayerInput, x: Tensor) -> Tensor:
    """This layer's part of the inputs of all, behind a gate. One gradient for all is gathered."""
    tape = code.tape
    needs_grad = code.stack.trains_base or code.checkpointed or INPUTS_PROJECTION in code.targets
    inputs = tape.shared(
        per_token(layer_input.packed_width), code.stream_bytes, needs_grad=needs_grad
    )
    width = per_token(layer_input.gate.out_features)
    (own,) = tape.parts(inputs, (width,))
    active = activate(code, layer_input.activation, code.linear(layer_input.gate, x))
    opened = code.multiply(active, own)
    tape.hold(active)
    projected = code.linear(layer_input.projection, opened)
    tape.hold(opened)
    y = code.norm(layer_input.norm, projected)
    result = code.add(x, y)
    tape.hold(x)
    return result
