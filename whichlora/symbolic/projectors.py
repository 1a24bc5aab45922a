"""What stands between the last block of a vision tower and the language model, on a tape.

One function per class of transformers; a family names it in `Tower.projector`. The tape's token is
one vector that the language model reads, however many patches it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from whichlora.methods.base import Method
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Norm, NormKind
from whichlora.spec.tower import Tower
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import SavedTensor, Tensor
from whichlora.symbolic.layer import BlockEvents, LayerPoints, block_events
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    maximal,
    per_pair,
    per_token,
)
from whichlora.symbolic.mlp import activate, feed_forward
from whichlora.symbolic.operators import OpEmitter, Rows


def _merge(code: OpEmitter, tower: Tower, x: Tensor, kind: NormKind) -> Tensor:
    first, second = tower.stack.head_linears[:2]
    width, rows = tower.stack.hidden_size, tower.merge
    norm = Norm(name="ln_q", kind=kind, width=width, rows=rows, bias=kind == "layer")
    inner = code.linear(first, code.norm(norm, x))
    return code.linear(second, activate(code, "gelu", inner))


def _qwen2(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `PatchMerger.forward` of modeling_qwen2_vl.py."""
    return _merge(code, tower, x, "layer")


def _qwen2_5(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Qwen2_5_VisionTransformerPretrainedModel.forward`."""
    merged = _merge(code, tower, x, "rms")
    # `merged_hidden_states[reverse_indices, :]` undoes the order of the windows
    return code.tape.op([merged], merged.elements, merged.size)


def _qwen3(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Qwen3VLVisionPatchMerger.forward`."""
    return _merge(code, tower, x, "layer")


def _gemma3(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """A mean of square groups of patches.

    Source: transformers 5.23 `SiglipVisionModel.forward`, `Gemma3MultiModalProjector.forward`.
    """
    tape, width = code.tape, tower.stack.hidden_size
    last = Norm(name="post_layernorm", kind="layer", width=width, rows=tower.merge, bias=True)
    states = code.norm(last, x)
    planes = code.copy(states)  # [image, hidden_size, rows, columns]
    pooled = tape.op([planes], per_token(width), planes.size, saves=[planes], what="pooled patches")
    tape.hold(planes)
    normed = code.norm(Norm(name="mm_soft_emb_norm", kind="rms_offset", width=width), pooled)
    tape.hold(pooled)
    projected = code.linear(tower.stack.head_linears[0], normed)
    tape.hold(normed)
    result = code.cast(code.cast(projected, states.size), code.dtypes.compute_bytes)
    tape.hold(states)
    return result


def _mistral3(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `Mistral3MultiModalProjector.forward`, `Mistral3PatchMerger`."""
    tape, width = code.tape, tower.stack.hidden_size
    merging, first, second = tower.stack.head_linears
    normed = code.norm(Norm(name="norm", kind="rms", width=width, rows=tower.merge), x)
    # `unfold` lays out the patches of each image, `torch.cat` those of all
    unfolded = tape.op([normed], normed.elements, normed.size)
    joined = code.copy(unfolded)
    tape.hold(unfolded)
    merged = code.linear(merging, joined)
    tape.hold(normed)
    inner = code.linear(first, merged)
    tape.hold(merged)
    return code.linear(second, activate(code, "gelu", inner))


def _llava(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `LlavaModel.get_image_features`, `LlavaMultiModalProjector`."""
    first, second = tower.stack.head_linears
    # without the token of the whole image it is no longer in one piece
    inner = code.linear(first, code.copy(x))
    return code.linear(second, activate(code, "gelu", inner))


def _llava_next(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Squares are put together, and rows ended: two copies of their vectors.

    Source: transformers 5.23 `LlavaNextModel.pack_image_features`.
    """
    projected = _llava(code, tower, x)
    laid_out = code.copy(projected)
    joined = code.copy(laid_out)
    code.tape.hold(projected, laid_out)
    return joined


def _internvl(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Two copies put the patches of a vector beside each other.

    Source: transformers 5.23 `InternVLModel.pixel_shuffle`, `InternVLMultiModalProjector.forward`.
    """
    first, second = tower.stack.head_linears
    shuffled = code.copy(code.copy(x))
    width = tower.merge * tower.stack.hidden_size
    normed = code.norm(Norm(name="layer_norm", kind="layer", width=width, bias=True), shuffled)
    inner = code.linear(first, normed)
    code.tape.hold(shuffled)
    return code.linear(second, activate(code, "gelu", inner))


def _smolvlm(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Two copies put the patches of a vector beside each other.

    Source: transformers 5.23 `SmolVLMVisionTransformer.forward`, `SmolVLMConnector.forward`.
    """
    width = tower.stack.hidden_size
    last = Norm(name="post_layernorm", kind="layer", width=width, rows=tower.merge, bias=True)
    states = code.norm(last, x)
    projected = code.linear(tower.stack.head_linears[0], code.copy(code.copy(states)))
    code.tape.hold(states)
    return projected


def _whisper(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `WhisperEncoder.forward`."""
    last = Norm(name="layer_norm", kind="layer", width=tower.stack.hidden_size, bias=True)
    return code.norm(last, x)


def _qwen2_audio(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """A mean of two positions; vectors of the padding are projected, and left out after it.

    Source: transformers 5.23 `Qwen2AudioEncoder.forward`, `Qwen2AudioModel.forward`.
    """
    tape, width = code.tape, tower.stack.hidden_size
    (projection,) = tower.stack.head_linears
    pooled = tape.op([x], per_token(width), x.size, saves=[x], what="positions to be pooled")
    last = Norm(name="layer_norm", kind="layer", width=width, bias=True)
    states = code.norm(last, pooled)
    projected = replace(code, rows=Rows()).linear(projection, states)
    chosen = tape.op([projected], code.rows.of(projection.out_features), projected.size)
    tape.hold(states)
    return chosen


def _llama4(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """Two copies put the patches of a vector beside each other.

    Source: transformers 5.23 `Llama4VisionModel.forward`, `pixel_shuffle`, `Llama4VisionMLP2`,
    `Llama4ForConditionalGeneration.forward`.
    """
    tape, width = code.tape, tower.stack.hidden_size
    _, first, second, projection = tower.stack.head_linears
    last = Norm(name="layernorm_post", kind="layer", width=width, rows=tower.merge, bias=True)
    states = code.norm(last, x)
    shuffled = code.copy(code.copy(states))
    inner = code.linear(second, activate(code, "gelu", code.linear(first, shuffled)))
    features = activate(code, "gelu", inner)
    tape.hold(states, shuffled)
    projected = code.linear(projection, features)
    tape.hold(features)
    return projected


def _gemma4(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """A mean of square groups of patches, as a product with a matrix of their places.

    What is padding is left out of its result.
    Source: transformers 5.23 `Gemma4VisionPooler.forward`, `Gemma4VisionModel.forward`,
    `Gemma4MultimodalEmbedder.forward`.
    """
    tape, width = code.tape, tower.stack.hidden_size
    masked = tape.op([x], x.elements, x.size)
    of_places = per_pair(tower.merge)
    places = tape.op([tape.op([], of_places, 8)], of_places, 4)  # `F.one_hot(…).float()`
    weights = tape.op([places], of_places, 4)
    wide = code.cast(masked, 4)
    factors = code.autocast(weights), code.autocast(wide)
    pooled = tape.op(
        factors, per_token(width), factors[1].size, saves=factors[:1], what="pooled patches"
    )
    tape.hold(wide)
    tape.op([weights], of_places, 1)  # `weights == 0`
    narrow = code.cast(pooled, x.size)
    tape.hold(masked, weights, pooled)
    wide = code.cast(narrow, 4)
    pooled = code.scale(wide)
    tape.hold(narrow, wide)
    kept = code.rows.of(width)
    stripped = tape.op([pooled], kept, 4)
    standard = code.scale(code.scale(stripped))
    states = code.cast(standard, x.size)
    norm = Norm(name="embedding_pre_projection_norm", kind="rms_power", width=width, weight=False)
    projected = code.linear(tower.stack.head_linears[-1], code.norm(norm, states))
    tape.hold(states)
    return projected


def _mllama(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """States of blocks in between stand beside the last one, without the patches that fill up.

    Source: transformers 5.23 `MllamaVisionModel.forward`, `MllamaModel.forward`.
    """
    tape, width = code.tape, tower.stack.hidden_size
    (projection,) = tower.stack.head_linears
    num_stacked = code.dtypes.libraries.value_of("transformers", tower.stacked)
    earlier = tape.weight(per_token(width * num_stacked), x.size)
    earlier.needs_grad = x.needs_grad
    stacked = tape.op([earlier], earlier.elements, x.size, passes=True)
    if num_stacked > tower.num_joined:
        every, taken = stacked, per_token(width * tower.num_joined)
        stacked = tape.op([every], taken, x.size, passes=True)
        tape.hold(every)
    parts = [tape.parts(y, (code.rows.of(y.elements.per_token),))[0] for y in (x, stacked)]
    joined = tape.concatenate(parts, code.rows.of(projection.in_features))
    tape.hold(x, stacked)
    projected = code.linear(projection, joined)
    tape.hold(joined)
    return projected


def _glm4v(code: OpEmitter, tower: Tower, x: Tensor) -> Tensor:
    """A kernel merges square groups of patches, and a gated MLP follows.

    Source: transformers 5.23 `Glm4vVisionModel.forward`, `Glm4vVisionPatchMerger.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    merging, first, *fed = tower.stack.head_linears
    last = Norm(name="post_layernorm", kind="rms", width=tower.stack.hidden_size, rows=tower.merge)
    # the backward of a kernel has input and weight, whatever is frozen
    states = code.autocast(code.norm(last, x))
    weights = constant(merging.num_weights)
    kernel = code.autocast(tape.weight(weights, dtypes.base_bytes, trained=dtypes.trains_base))
    width = per_token(merging.out_features)
    merged = tape.op([states, kernel], width, states.size, saves=[states, kernel], what="merged")
    norm = Norm(name="post_projection_norm", kind="layer", width=merging.out_features, bias=True)
    features = activate(code, "gelu", code.norm(norm, code.linear(first, merged)))
    gated = tower.stack.groups[-1].layer.mlp
    assert gated is not None
    result = feed_forward(code, replace(gated, linears=tuple(fed)), features)
    tape.hold(merged)
    return result


PROJECTORS: Mapping[str, Callable[[OpEmitter, Tower, Tensor], Tensor]] = {
    "qwen2": _qwen2,
    "qwen2_5": _qwen2_5,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "llava": _llava,
    "llava_next": _llava_next,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
    "whisper": _whisper,
    "qwen2_audio": _qwen2_audio,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "mllama": _mllama,
    "glm4v": _glm4v,
}
"""Tensors of the last block -> those that the language model reads."""


def _tape_of(code: OpEmitter, tower: Tower, stream: int, *, needs_grad: bool) -> Tape:
    tape = code.tape
    width = tower.merge * tower.stack.hidden_size
    x = tape.input(per_token(width), stream, needs_grad=needs_grad)
    features = PROJECTORS[tower.projector](code, tower, x)
    tape.hold(x, features)
    tape.returns(features)
    return tape


@lru_cache(maxsize=512)
def embedder_saved(
    tower: Tower, targets: tuple[str, ...], dtypes: Dtypes, method: Method
) -> tuple[SavedTensor, ...]:
    """What autograd keeps of the matrix that embeds unfolded patches.

    Kind: exact. Source: transformers 5.23 `Llama4UnfoldConvolution.forward`,
    `Gemma4VisionPatchEmbedder.forward`.
    """
    embedder = tower.embedder
    assert embedder is not None
    code = OpEmitter(Tape(), dtypes, targets, method, stream_bytes=tower.pixel_bytes)
    pixels = code.tape.input(per_token(embedder.in_features), tower.pixel_bytes, needs_grad=False)
    if tower.rescales_pixels:
        pixels = code.scale(pixels)
        if not is_quantised(embedder, dtypes):
            pixels = code.cast(pixels, dtypes.base_bytes, "pixels, scaled")
    code.tape.returns(code.linear(embedder, pixels))
    return code.tape.saved_tensors()


@lru_cache(maxsize=64)
def _training_tape(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    needs_grad: bool,
    stream: int,
    kept: int,
) -> Tape:
    rows = Rows(in_sequence=kept)
    code = OpEmitter(Tape(), dtypes, targets, method, stream_bytes=stream, rows=rows)
    return _tape_of(code, tower, stream, needs_grad=needs_grad)


@lru_cache(maxsize=512)
def projector_events(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    needs_grad: bool,
    accumulated: bool,
    stream: int,
    kept: int = 0,
) -> BlockEvents:
    """What it makes and frees in a step; args and source as of `projector_points`. Kind: exact."""
    tape = _training_tape(
        tower, targets, dtypes, method, needs_grad=needs_grad, stream=stream, kept=kept
    )
    return block_events(tape, accumulated=accumulated)


@lru_cache(maxsize=512)
def projector_forward_events(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    stream: int,
    kept: int = 0,
) -> BlockEvents:
    """Of a forward without gradients; args and source as of `projector_points`. Kind: exact."""
    return block_events(_forward_tape(tower, targets, dtypes, method, stream=stream, kept=kept))


@lru_cache(maxsize=64)
def result_bytes(
    tower: Tower, targets: tuple[str, ...], dtypes: Dtypes, method: Method, *, stream: int
) -> int:
    """One element of what it returns. Kind: exact. Source: the functions above."""
    code = OpEmitter(Tape(), dtypes, targets, method, stream_bytes=stream, rows=Rows(in_sequence=1))
    x = code.tape.input(per_token(tower.merge * tower.stack.hidden_size), stream, needs_grad=False)
    return PROJECTORS[tower.projector](code, tower, x).size


@lru_cache(maxsize=512)
def projector_points(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    needs_grad: bool,
    accumulated: bool,
    stream: int,
    kept: int = 0,
) -> LayerPoints:
    """Bytes at its points that can be the largest; it is never checkpointed.

    Args:
        needs_grad: a gradient flows on into the blocks.
        stream: bytes of one element of what the last block returns.
        kept: vectors of each image that the last matrix reads, where `Tower.strips`.

    Kind: exact. Source: the functions above.
    """
    tape = _training_tape(
        tower, targets, dtypes, method, needs_grad=needs_grad, stream=stream, kept=kept
    )
    backward: tuple[LinearForm, ...] = (NOTHING,)
    if tape.has_graph:
        backward = maximal(tape.backward(recomputed=False, accumulated=accumulated))
    return LayerPoints(
        tape.saved_tensors(),
        tape.saved,
        NOTHING,
        tape.saved_tensors(hidden=True),
        NOTHING,
        NOTHING,
        NOTHING,
        maximal(tape.forward(saving=True)),
        backward,
    )


@lru_cache(maxsize=512)
def projector_working_points(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    stream: int,
    kept: int = 0,
) -> tuple[LinearForm, ...]:
    """Points of a forward without gradients, what the last block returns left out.

    Kind: exact. Source: as of `projector_points`.
    """
    tape = _forward_tape(tower, targets, dtypes, method, stream=stream, kept=kept)
    return maximal(tape.forward(saving=False))


@lru_cache(maxsize=64)
def _forward_tape(
    tower: Tower,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    stream: int,
    kept: int,
) -> Tape:
    tape, rows = Tape(no_grad=True), Rows(in_sequence=kept)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream, rows=rows)
    return _tape_of(code, tower, stream, needs_grad=False)
