"""A stream of several hidden states, on a tape: its begin, what a layer does to it, its end.

Source: transformers 5.23 `Gemma3nTextModel`, `Gemma3nTextDecoderLayer`, `Gemma3nTextAltUp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.methods.base import NO_ADAPTERS, Method
from whichlora.spec.architecture import ModelSpec, Streams
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import AltUp, Layer, LowRankResidual, Norm
from whichlora.symbolic.attention import attend
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.gemma4 import gated_layer_input
from whichlora.symbolic.graph import SavedTensor, Tensor
from whichlora.symbolic.linear_form import LinearForm, constant, maximal, per_token
from whichlora.symbolic.mlp import feed_forward
from whichlora.symbolic.operators import OpEmitter

# --- the layers ---------------------------------------------------------------------------------


def run_altup_layer(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Gemma3nTextDecoderLayer.forward`, whose variables live to its end.

    Args:
        x: all hidden states of each token.
    """
    altup, low_rank = layer.altup, layer.low_rank
    assert altup is not None
    assert low_rank is not None
    assert layer.mlp is not None
    tape = code.tape
    # cosines and sines are in the dtype of the stream, masks and inputs of layers in that of the
    # looked-up rows
    attention = replace(layer.attentions[0], tables="fp32" if code.stream_bytes == 4 else "stream")
    narrow = replace(code, stream_bytes=code.dtypes.embedding_bytes)
    before, after, before_mlp, after_mlp = layer.norms

    predictions = _predict(code, altup, x)
    (active,) = tape.parts(predictions, (per_token(before.width),))
    normed = code.norm(before, active)
    residual = _low_rank(code, low_rank, normed)
    attended = code.norm(after, attend(narrow, attention, normed))
    gated = code.add(active, attended)
    middle = code.scale(code.add(gated, residual))
    fed_input = code.norm(before_mlp, middle)
    fed = feed_forward(code, layer.mlp, fed_input)
    fed_normed = code.norm(after_mlp, fed)
    activated = code.add(middle, fed_normed)
    corrected = _correct(code, altup, predictions, activated)
    for variable in (x, predictions, normed, residual, attended, gated, middle, fed_input, fed):
        tape.hold_to_end(variable)
    for variable in (fed_normed, activated, corrected):
        tape.hold_to_end(variable)
    return _with_layer_input(narrow, layer, altup, corrected)


def _low_rank(code: OpEmitter, low_rank: LowRankResidual, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Gemma3nTextLaurelBlock.forward`."""
    narrow = code.linear(low_rank.down, x)
    product = code.linear(low_rank.up, narrow)
    normed = code.norm(low_rank.norm, product)
    result = code.add(x, normed)
    code.tape.hold(product, normed)
    return result


def _routed(code: OpEmitter, altup: AltUp, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Gemma3nTextAltUp.compute_router_modalities`."""
    read = code.scale(code.norm(altup.norm, x))
    routed = code.linear(altup.router, read)
    wide = code.cast(routed, 4)
    tanh = code.tape.op([wide], wide.elements, 4, saves_result=True, what="router: tanh")
    result = code.cast(tanh, x.size)
    code.tape.hold(read, routed)
    return result


def _predict(code: OpEmitter, altup: AltUp, x: Tensor) -> Tensor:
    """Every state as a sum of all, added to what it was.

    Source: transformers 5.23 `Gemma3nTextAltUp.predict`.
    """
    tape = code.tape
    (first,) = tape.parts(x, (per_token(altup.norm.width),))
    routed = _routed(code, altup, first)
    coefficients = code.linear(altup.prediction, routed)
    read = code.autocast(x, "states: cast")
    factors = code.autocast(coefficients)
    saves = [factors] if read.needs_grad else []
    saves += [read] if factors.needs_grad else []
    product = tape.op([read, factors], x.elements, read.size, saves=saves, what="states: predicted")
    summed = tape.write_view(product, x)  # `predictions += hidden_states`, permuted
    (view,) = tape.parts(summed, (summed.elements,))
    result = code.cast(code.copy(view), x.size)
    tape.hold(product, routed, coefficients)
    return result


def _correct(code: OpEmitter, altup: AltUp, predictions: Tensor, activated: Tensor) -> Tensor:
    """Every state plus a multiple of what the active one has gained.

    Source: transformers 5.23 `Gemma3nTextAltUp.correct`.
    """
    tape, width = code.tape, per_token(altup.norm.width)
    routed = _routed(code, altup, activated)
    (first,) = tape.parts(predictions, (width,))
    # the gradient of what is subtracted is a new tensor
    innovation = code.add(activated, tape.view(first, copies_gradient=True), "innovation")
    repeated = tape.op([innovation], predictions.elements, innovation.size, what="innovation")
    if altup.correction.clamps_weight and code.dtypes.training:  # `F.linear` of the clamped weight
        factors = code.base(altup.correction, routed)
    else:
        factors = code.linear(altup.correction, routed)
    factors = tape.op([factors], factors.elements, factors.size, passes=True)
    product = code.multiply_rows(repeated, factors, row_last=True)
    result = tape.in_place(product, predictions)
    tape.hold(routed, repeated, factors)
    return result


def _with_layer_input(code: OpEmitter, layer: Layer, altup: AltUp, states: Tensor) -> Tensor:
    """This layer's input, added to all states but the active one."""
    tape, dtypes, width = code.tape, code.dtypes, altup.norm.width
    assert layer.layer_input is not None
    (first,) = tape.parts(states, (per_token(width),))
    x = code.copy(first)
    if altup.scales:
        scales = tape.weight(constant(width), dtypes.base_bytes, trained=dtypes.trains_base)
        wide = code.cast(x, dtypes.base_bytes)
        x = code.cast(code.multiply_rows(wide, scales, row_last=True), x.size)
    added = gated_layer_input(code, layer.layer_input, x)
    # `corrected_predictions[1:] += first_prediction`, which also assigns the sum to the slice
    others = per_token((altup.num_states - 1) * width)
    summed = tape.write_view(states, added, others)
    (view,) = tape.parts(summed, (others,))
    result = tape.write_view(summed, view, others, replaces=True)
    tape.hold(added)
    return result


# --- before the first and after the last layer --------------------------------------------------


def _magnitude(code: OpEmitter, x: Tensor, *, clamps: bool = False) -> Tensor:
    """The root of the mean square of each token's `x`; autocast takes the power in fp32."""
    tape, dtypes, scalar = code.tape, code.dtypes, per_token(1)
    widened = dtypes.under_autocast and dtypes.backend.widens_norms
    wide = code.cast(x, 4) if widened else x
    factors = (wide.form, wide.form)
    squared = tape.op([wide], x.elements, wide.size, saves=[wide], inner_backward=factors)
    mean = tape.op([squared], scalar, wide.size)
    if clamps:
        mean = code.clamp(mean)
    return tape.op([mean], scalar, wide.size, saves_result=True, what="magnitude")


def _divide_rows(code: OpEmitter, x: Tensor, row: Tensor) -> Tensor:
    """`x` divided by one number of each token.

    Source: torch 2.13 `div_tensor_other_grad`: `-grad * ((self / other) / other)`, four tensors
    before the gradient of `x` is there.
    """
    saves = [row] if x.needs_grad else []
    saves += [x] if row.needs_grad else []
    inner = (x.form,) * (4 - x.needs_grad) if row.needs_grad else ()
    return code.tape.op([x, row], x.elements, x.size, saves=saves, inner_backward=inner)


def _like(code: OpEmitter, projected: Tensor, target: Tensor) -> Tensor:
    """`projected` with the magnitude of `target`."""
    current = code.cast(projected, code.dtypes.embedding_bytes)
    magnitude = _magnitude(code, current, clamps=True)
    result = _divide_rows(code, code.multiply_rows(current, target, row_last=True), magnitude)
    code.tape.hold(current, magnitude)
    return result


def _stacked(code: OpEmitter, states: list[Tensor]) -> Tensor:
    """All states in one tensor, of the widest dtype under autocast."""
    widest = max(state.size for state in states)
    return code.tape.stack([code.cast(state, widest) for state in states])


def expand_streams(code: OpEmitter, streams: Streams, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """All hidden states of the embeddings `x`, and what the model's loop over layers names.

    Source: transformers 5.23 `Gemma3nTextModel.forward`: `temp_hidden_states`, `altup_proj`.
    """
    target = _magnitude(code, x)
    states, named = [x], [x]
    for number, linear in enumerate(streams.expanding):
        projected = code.linear(linear, x)
        states.append(_like(code, projected, target))
        code.tape.hold(projected)
        is_last = number + 1 == len(streams.expanding)
        named += [states[-1], projected] if is_last else [states[-1]]
    result = _stacked(code, states)
    code.tape.hold(*named)
    return result, named


def merge_streams(code: OpEmitter, streams: Streams, x: Tensor) -> Tensor:
    """The mean of all states, the further ones projected.

    Source: transformers 5.23 `Gemma3nTextModel.forward`, `altup_unembed_projections`.
    """
    tape = code.tape
    width = per_token(x.elements.per_token // streams.num_states)
    target = _magnitude(code, tape.parts(x, (width,))[0])
    states = [tape.parts(x, (width,))[0]]
    for linear in streams.merging:
        projected = code.linear(linear, tape.parts(x, (width,))[0])
        states.append(_like(code, projected, target))
        tape.hold(projected)
    stacked = _stacked(code, states)
    tape.hold(x)
    result = tape.op([stacked], width, stacked.size)  # whose backward writes all of it out
    tape.hold(stacked)
    for state in states:
        tape.hold_to_end(state)
    return result


@dataclass(frozen=True, slots=True)
class StreamPoints:
    """Bytes at the points where the states are made, or become one, their input left out.

    Args:
        named_bytes: of the tensors that the model's loop over layers names, per token.
        unsaved_named_bytes: those of them that autograd keeps not; `outer_named_bytes` those that
            are still named after the last layer.
        saved_tensors: what autograd keeps for backward.
        forward: alive while it runs.
        backward: alive in its backward, with the gradient of the result and `saved_tensors`.
    """

    named_bytes: int
    unsaved_named_bytes: int
    outer_named_bytes: int
    saved_tensors: tuple[SavedTensor, ...]
    forward: tuple[LinearForm, ...]
    backward: tuple[LinearForm, ...]


@lru_cache(maxsize=512)
def _expanding_points(
    streams: Streams,
    width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    needs_grad: bool,
    accumulated: bool,
) -> StreamPoints:
    tape = Tape(no_grad=not dtypes.training)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=dtypes.stream_bytes)
    x = tape.input(per_token(width), dtypes.embedding_bytes, needs_grad=needs_grad)
    result, named = expand_streams(code, streams, x)
    tape.returns(result)
    storages = {each.storage: each.form.per_token for each in named}
    backward = tape.backward(recomputed=False, accumulated=accumulated) if result.needs_grad else ()
    saved = tape.saved_storages()
    return StreamPoints(
        sum(storages.values()),
        sum(size for storage, size in storages.items() if storage not in saved),
        sum(storages[each.storage] for each in (x, named[-1]) if each.storage not in saved),
        tape.saved_tensors(),
        maximal(tape.forward(saving=result.needs_grad)),
        maximal(backward),
    )


def expanding_points(
    model: ModelSpec,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method = NO_ADAPTERS,
    *,
    needs_grad: bool = False,
    accumulated: bool = False,
) -> StreamPoints | None:
    """Before the first layer; None for a stream of one state. Kind: exact, as the tape is.

    Args:
        needs_grad: the looked-up embeddings do.

    Source: `expand_streams`.
    """
    if model.streams is None:
        return None
    return _expanding_points(
        model.streams,
        model.embeddings[0].width,
        targets,
        dtypes,
        method,
        needs_grad=needs_grad,
        accumulated=accumulated,
    )


def merging_points(
    model: ModelSpec,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method = NO_ADAPTERS,
    *,
    accumulated: bool = False,
) -> StreamPoints | None:
    """From the last layer's result to what the head reads; None for a stream of one state.

    Kind: exact, as the tape is. Source: `merge_streams`.
    """
    if model.streams is None:
        return None
    return _merging_points(
        model.streams,
        model.final_norms,
        targets,
        dtypes,
        method,
        accumulated=accumulated,
    )


@lru_cache(maxsize=512)
def _merging_points(
    streams: Streams,
    norms: tuple[Norm, ...],
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    accumulated: bool,
) -> StreamPoints:
    tape = Tape(no_grad=not dtypes.training)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=dtypes.stream_bytes)
    width = norms[0].width * streams.num_states
    x = tape.input(per_token(width), dtypes.stream_bytes, needs_grad=dtypes.training)
    result = merge_streams(code, streams, x)
    for norm in norms:
        result = code.norm(norm, result)
    tape.returns(result)
    backward = tape.backward(recomputed=False, accumulated=accumulated) if result.needs_grad else ()
    return StreamPoints(
        0,
        0,
        0,
        tape.saved_tensors(),
        maximal(tape.forward(saving=result.needs_grad)),
        maximal(backward),
    )
