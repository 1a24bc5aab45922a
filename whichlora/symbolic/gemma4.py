"""Parts of Gemma 4 alone, on a tape: borrowed keys, experts beside an MLP, inputs of every layer.

Source: transformers 5.23 `Gemma4TextAttention`, `Gemma4TextDecoderLayer`, `Gemma4TextModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Layer, LayerInput, Linear, Norm
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.experts import route, run_experts
from whichlora.symbolic.graph import SavedTensor, Tensor
from whichlora.symbolic.linear_form import LinearForm, constant, maximal, per_token
from whichlora.symbolic.mlp import activate, feed_forward
from whichlora.symbolic.operators import OpEmitter

INPUTS_PROJECTION = "per_layer_model_projection"


def project_in_turn(
    code: OpEmitter,
    attention: Attention,
    x: Tensor,
    rotate: Callable[[OpEmitter, Tensor, Attention, str], Tensor],
    *,
    copies_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, then keys, then values, each projected, normalised and, except values, rotated.

    Args:
        copies_gradient: the kernel's gradients have another layout than the projections' results.
    """
    tape = code.tape
    linears, norms = list(attention.linears), list(attention.norms)

    def rotated(projected: Tensor, label: str) -> Tensor:
        normed = code.norm(norms.pop(0), tape.view(projected, copies_gradient=copies_gradient))
        tape.hold(projected)
        result = rotate(code, normed, attention, label)
        tape.hold(normed)
        return result

    q = rotated(code.linear(linears.pop(0), x), "query")
    if attention.projection == "borrowed":
        borrowed = tape.shared(
            per_token(attention.k_width + attention.v_width),
            q.size,
            needs_grad=code.dtypes.training,
        )
        k, v = tape.parts(borrowed, (per_token(attention.k_width), per_token(attention.v_width)))
        return q, k, v
    k = code.linear(linears.pop(0), x)
    if attention.projection == "one_after_other":  # `Gemma4VisionAttention.forward`
        k = rotated(k, "key")
        v = code.linear(linears.pop(0), x)
    else:
        shares = attention.projection == "one_by_one_shared"
        v = k if shares else code.linear(linears.pop(0), x)
        k = rotated(k, "key")
    normed = code.norm(norms.pop(0), tape.view(v, copies_gradient=copies_gradient))
    tape.hold(v)
    if attention.keeps_keys and code.dtypes.training:
        tape.hold_for_later_layers(k, normed)
    return q, k, normed


def feed_both_ways(code: OpEmitter, layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    """An MLP of the normalised `y`, and experts of `x` with norms of their own; their sum."""
    assert layer.mlp is not None
    assert layer.moe is not None
    tape = code.tape
    after_mlp, before_experts, after_experts = layer.norms[4:]
    dense = feed_forward(code, layer.mlp, y)
    normed_dense = code.norm(after_mlp, dense)
    weights, chosen, scores = route(code, layer.moe, x)
    expert_input = code.norm(before_experts, x)
    routed = run_experts(code, layer.moe, expert_input, weights, chosen)
    tape.hold(expert_input)
    normed_routed = code.norm(after_experts, routed)
    tape.hold(routed)
    result = code.add(normed_dense, normed_routed)
    tape.hold(dense)
    for local_variable in (normed_dense, normed_routed, weights, chosen, scores):
        tape.hold_to_end(local_variable)
    return result


def gated_layer_input(code: OpEmitter, layer_input: LayerInput, x: Tensor) -> Tensor:
    """This layer's part of the inputs of all, behind a gate. All layers add to one gradient."""
    tape = code.tape
    needs_grad = code.dtypes.trains_base or code.checkpointed or INPUTS_PROJECTION in code.targets
    inputs = tape.shared(
        per_token(layer_input.packed_width), code.stream_bytes, needs_grad=needs_grad
    )
    width = per_token(layer_input.gate.out_features)
    (layer_part,) = tape.parts(inputs, (width,))
    active = activate(code, layer_input.activation, code.linear(layer_input.gate, x))
    opened = code.multiply(active, layer_part)
    tape.hold(active)
    projected = code.linear(layer_input.projection, opened)
    tape.hold(opened)
    return code.norm(layer_input.norm, projected)


def add_layer_input(code: OpEmitter, layer_input: LayerInput, x: Tensor) -> Tensor:
    """`x` and what the layer makes of its own input."""
    result = code.add(x, gated_layer_input(code, layer_input, x))
    code.tape.hold(x)
    return result


def embed_layer_inputs(
    code: OpEmitter, projection: Linear, norm: Norm, x: Tensor, *, in_place: bool
) -> Tensor:
    """The inputs of all layers side by side: looked up, and projected from the embeddings `x`.

    Args:
        in_place: what is projected is scaled in place (Gemma 3n).

    Source: `Gemma4TextModel.get_per_layer_inputs`, `project_per_layer_inputs`.
    """
    tape, dtypes = code.tape, code.dtypes
    packed = per_token(projection.out_features)
    table = tape.weight(constant(0), dtypes.embedding_bytes, trained=dtypes.trains_base)
    looked_up = tape.op([table], packed, dtypes.embedding_bytes, saves=[table])
    scaled = code.scale(looked_up)
    product = code.linear(projection, x)
    projected = tape.in_place(product) if in_place else code.scale(product)
    y = code.norm(norm, projected)
    summed = code.add(y, scaled)
    result = code.scale(summed)
    tape.hold(y, scaled, summed)
    return result


@dataclass(frozen=True, slots=True)
class LayerInputPoints:
    """Bytes at the points of making the inputs of all layers, the embeddings left out.

    Args:
        packed_bytes: of the result per token, which lives as long as a layer can read it.
        saved_tensors: what autograd keeps for backward.
        forward: alive while it is made.
        backward: alive in its backward, with the gradient of the result and `saved_tensors`.
    """

    packed_bytes: int
    saved_tensors: tuple[SavedTensor, ...]
    forward: tuple[LinearForm, ...]
    backward: tuple[LinearForm, ...]


@lru_cache(maxsize=512)
def _points(
    projection: Linear,
    norm: Norm,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    rows_bytes: int,
    in_place: bool,
    needs_grad: bool,
    accumulated: bool,
) -> LayerInputPoints:
    tape = Tape()
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=dtypes.stream_bytes)
    x = tape.input(per_token(projection.in_features), rows_bytes, needs_grad=needs_grad)
    result = embed_layer_inputs(code, projection, norm, x, in_place=in_place)
    tape.hold(result)
    forward = tape.forward(saving=result.needs_grad)
    backward = tape.backward(recomputed=False, accumulated=accumulated) if result.needs_grad else ()
    return LayerInputPoints(
        result.form.per_token, tape.saved_tensors(), maximal(forward), maximal(backward)
    )


def layer_input_points(
    model: ModelSpec,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    needs_grad: bool = False,
    accumulated: bool = False,
) -> LayerInputPoints | None:
    """None for a model whose layers read the hidden state alone. Kind: exact.

    Args:
        needs_grad: the looked-up embeddings do.
    """
    if model.layer_input_norm is None:
        return None
    several = model.streams is not None  # which begins after them
    return _points(
        model.head_linears[0],
        model.layer_input_norm,
        targets,
        dtypes,
        method,
        rows_bytes=dtypes.embedding_bytes if several else dtypes.stream_bytes,
        in_place=several,
        needs_grad=needs_grad,
        accumulated=accumulated,
    )
