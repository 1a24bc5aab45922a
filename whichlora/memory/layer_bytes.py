"""Bytes of one layer at each moment: what it keeps, and the worst points of its passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.memory.entries import Tensor
from whichlora.methods.base import NO_ADAPTERS, Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, runs_adapter
from whichlora.spec.layer import Layer, SparseKeys
from whichlora.spec.numeric import Count, is_plain, largest, smallest
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import adapted
from whichlora.symbolic import kernels
from whichlora.symbolic.altup import expanding_points
from whichlora.symbolic.gemma4 import layer_input_points
from whichlora.symbolic.graph import SavedTensor
from whichlora.symbolic.layer import (
    LayerPoints,
    layer_points,
    returned_probabilities,
    stream_bytes,
    working_points,
)
from whichlora.symbolic.linear_form import (
    evaluate,
    has_sequences,
    in_sequence,
    most,
    without_sequences,
)
from whichlora.symbolic.sparse_keys import CHOICE_BYTES

# The state decayed, what comes to it and their sum, in fp32, beside the cached one. Source:
# transformers 5.23 `torch_recurrent_gated_delta_rule`, `mamba2_selective_state_update`.
_STEP_STATES = 3
_SUMMED = (  # over a layer with a mask and without
    "saved",
    "unsaved",
    "held_by_later_layers",
    "graph_behind_held",
    "gathered",
    "memory",
    "saved_memory",
    "forward",
    "backward",
)
WEIGHT_COPIES = ("weight, cast", "adapter, cast")  # as `operators` calls them


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One of `count` equal layers.

    Args:
        stream_bytes: one element of its input.
        tensors: what it keeps for backward.
        saved: their bytes.
        unsaved: bytes that the first layer of a stack keeps less, its input being frozen.
        held: what checkpointing does not free.
        held_by_later_layers: bytes of keys and values that checkpointed later layers hold; without
            checkpointing those that a dict of the forward alone does.
        graph_behind_held: bytes that the recomputed graph of those holds from its backward on.
        leaf_behind_held: so of the input of a reentrant checkpoint, a leaf of that graph, to which
            belongs a gradient as large.
        gathered: so of gradients that later layers have left when its backward begins.
        memory: bytes of the encoder's output that it reads; `saved_memory` where that very tensor
            is kept for the backward.
        copies: those of `tensors` that are autocast's copies of weights.
        forward: bytes at the worst point of a forward that keeps `saved`.
        backward: so of its backward, with the gradient of its result and `saved`; of a checkpointed
            layer its input is left out.
        gradients: bytes of its parameters' gradients.
    """

    count: int
    stream_bytes: int
    tensors: tuple[Tensor, ...]
    saved: Count
    unsaved: Count
    held: tuple[Tensor, ...]
    held_by_later_layers: Count
    graph_behind_held: Count
    leaf_behind_held: Count
    gathered: Count
    memory: Count
    saved_memory: Count
    copies: tuple[Tensor, ...]
    forward: Count
    backward: Count
    gradients: Count
    tokens: Count = 0
    span: Count = 0

    @property
    def sized(self) -> dict[str, Count]:
        """Tokens that it runs on, padding to whole windows included, and their span."""
        return {"tokens": self.tokens, "span": self.span}


def layer_bytes(
    layer: Layer,
    count: int,
    model: ModelSpec,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    r: Count,
    tokens: Count,
    span: Count,
    run: RunConfig,
    meets: bool = False,
    makes_bias: bool = False,
) -> LayerBytes:
    """Args as of the ledger, `Tape.backward` and `OpEmitter`.

    `run` says how gradients are accumulated.

    Kind: exact. Source: `symbolic.layer.layer_points`.
    """
    tokens, span = layer.padded(tokens, span)
    count_of = _counted_once if is_plain(r, tokens, span) else _counted
    of_layer = count_of(
        layer,
        targets,
        dtypes,
        method,
        stream_width=model.stream_width,
        stream=stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm),
        r=r,
        tokens=tokens,
        span=span,
        checkpointed=bool(run.gradient_checkpointing),
        reentrant=bool(run.use_reentrant),
        accumulated=run.adds_to_gradients or method.in_loss,
        meets=meets,
        makes_bias=makes_bias,
    )
    return replace(of_layer, count=count, tokens=tokens, span=span)


def _counted(
    layer: Layer,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    stream_width: int,
    stream: int,
    r: Count,
    tokens: Count,
    span: Count,
    checkpointed: bool,
    reentrant: bool,
    **graph: bool,
) -> LayerBytes:
    """One layer; args as of `layer_points`."""
    sizes = {"tokens": tokens, "span": span, "r": r}
    tensors: list[Tensor] = []
    held: list[Tensor] = []
    values: dict[str, Count] = dict.fromkeys(_SUMMED, 0)
    before = evaluate(returned_probabilities(layer, dtypes, saving=not checkpointed), **sizes)
    for share, running, masked, ragged in layer_cases(layer, dtypes, tokens=tokens, span=span):
        points = layer_points(
            running,
            stream_width,
            targets,
            dtypes,
            method,
            masked=masked,
            ragged=ragged,
            reentrant=reentrant,
            checkpointed=checkpointed,
            stream=stream,
            **graph,
        )
        tensors.extend(listed_tensors(points.saved_tensors, share, tokens=tokens, span=span, r=r))
        held.extend(listed_tensors(points.held, share, tokens=tokens, span=span, r=r))
        maxima = _values(points, **sizes)
        for name, value in maxima.items():
            values[name] = values[name] + share * value
    handed_on = handed_on_bytes(layer, tokens=tokens, span=span)
    values["forward"] = values["forward"] + before + handed_on * (not checkpointed)
    if checkpointed and reentrant:  # a `Function` materializes gradients of unused results as zeros
        values["backward"] = values["backward"] + before
    if not checkpointed or reentrant:  # its backward frees that graph
        values["graph_behind_held"] = 0
    is_leaf = checkpointed and reentrant and keeps_keys(layer)
    # `CheckpointFunction.forward` of torch 2.13 runs the layer under `no_grad`, and the graph of
    # the second run dies in its `backward`: no node is left to hold anything as an attribute.
    # Without `use_reentrant` the nodes of the first forward stay
    return LayerBytes(
        count=1,
        stream_bytes=stream,
        tensors=tuple(tensors),
        copies=tuple(tensor for tensor in tensors if tensor.what.endswith(WEIGHT_COPIES)),
        held=() if checkpointed and reentrant else tuple(held),
        gradients=_gradients(layer, targets, dtypes, method, r),
        leaf_behind_held=stream * stream_width * tokens * is_leaf,
        **values,
    )


# The strategies of several GPUs ask for the same layers, and so do lengths of a sweep.
_counted_once = lru_cache(maxsize=256, typed=True)(_counted)


def _gradients(
    layer: Layer, targets: tuple[str, ...], dtypes: Dtypes, method: Method, r: Count
) -> Count:
    """Bytes of those that one layer leaves."""
    gradients: Count = layer.trained_params * dtypes.base_bytes * method.trains_base + 0 * r
    for linear in adapted(layer, targets):
        if not runs_adapter(linear, dtypes):
            continue
        gradients = gradients + method.gradient_bytes(linear, dtypes, r)
    for norm in layer.norms:
        gradients = gradients + norm.num_params * dtypes.base_bytes * (norm.name in targets)
    return gradients


def handed_on_bytes(layer: Layer, *, tokens: Count, span: Count) -> Count:
    """Indices of the keys that the layer before has chosen, which the model's loop names.

    With checkpointing they are an argument of the checkpoint, and counted with it.
    Kind: exact. Source: transformers 5.23 `GlmMoeDsaModel.forward`: `topk_indices`.
    """
    for attention in layer.attentions:
        if attention.sparse is not None and attention.sparse.follows:
            return choice_bytes(attention.sparse, tokens=tokens, span=span)
    return 0 * tokens


def choice_bytes(sparse: SparseKeys, *, tokens: Count, span: Count) -> Count:
    """Indices of the keys that one indexer chooses.

    Kind: exact. Source: transformers 5.23 `GlmMoeDsaIndexer.forward`, in int32.
    """
    return CHOICE_BYTES * tokens * smallest(span, sparse.top_k)


def keeps_keys(layer: Layer) -> bool:
    """Whether later layers read the keys and values that `layer` makes."""
    return any(attention.keeps_keys for attention in layer.attentions)


def reads_last(layer: Layer, dtypes: Dtypes) -> bool:
    """Whether `generate` runs `layer` on the last position of a prompt alone: it makes no keys.

    Source: transformers 5.23 `Gemma4TextModel._maybe_slice_kv_shared_inputs`.
    """
    skips = any(attention.skips_prompt for attention in layer.attentions)
    return skips and dtypes.attn != "flash_attention_2"


def forward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    *,
    tokens: Count,
    span: Count,
    targets: tuple[str, ...] = (),
    method: Method = NO_ADAPTERS,
    r: Count = 0,
    side: str = "",
    prompt: bool = False,
    queries: Count | None = None,
    decoding: bool = False,
    fills_cache: bool = False,
    makes_bias: bool = False,
) -> Count:
    """Alive while a forward without gradients is in the layer that needs most.

    Args:
        span: keys that each token may see.
        targets, method, r: of adapters that are not merged.
        side: only the layers of this stack, "encoder" or "decoder".
        prompt: of `generate`, of which the last position alone is scored.
        queries: tokens of each sequence, where a preallocated cache makes more keys than these.
        decoding: one token of each sequence, so that a recurrent layer has no chunks.
        fills_cache: a layer's keys and values, counted elsewhere, are there once it has made them.
        makes_bias: as of `OpEmitter`.

    With the looked-up embeddings and the layer's input, which the model's loop holds.
    Kind: exact.
    Source: `symbolic.layer.working_points`.
    """
    points: list[Count] = [0 * tokens]
    beside: Count = 0 * tokens
    inputs = layer_input_points(model, targets, dtypes, method)
    if inputs is not None:
        rows = dtypes.stream_bytes if model.streams is None else dtypes.embedding_bytes
        embedded = rows * model.hidden_size * tokens
        points.append(embedded + most(inputs.forward, tokens=tokens, span=span, r=r))
        beside = inputs.packed_bytes * tokens  # every layer reads its part of it
    begun = expanding_points(model, targets, dtypes, method)
    if begun is not None:
        points.append(dtypes.embedding_bytes * model.hidden_size * tokens + beside)
        points[-1] = points[-1] + most(begun.forward, tokens=tokens, span=span, r=r)
    layers = [group.layer for group in model.groups if side in ("", group.stack)]
    for layer in layers:
        if prompt and reads_last(layer, dtypes):
            continue
        num_tokens, length = layer.padded(tokens, span)
        around = beside + _streams(layer, model, dtypes, tokens=num_tokens, span=length, r=r)
        run = _Forward(layer, model, targets, dtypes, method, decoding, fills_cache, makes_bias)
        # chunks of a recurrent layer are made of the tokens that run, not of all keys
        length = length if queries is None or not run.state_elements else queries
        for share, in_layer in run.points(tokens=num_tokens, span=length, r=r):
            points.append(share * (around + in_layer))
    return largest(*points)


def _streams(
    layer: Layer, model: ModelSpec, dtypes: Dtypes, *, tokens: Count, span: Count, r: Count
) -> Count:
    """What the model's loop names: looked-up rows, the layer's input, probabilities before it.

    Source: transformers 5.23 `LlamaModel.forward`, `inputs_embeds` and `hidden_states`; the rows
    of positions in `GPT2Model.forward`, `position_embeds`.
    """
    begun = expanding_points(model, (), dtypes)
    if begun is not None:
        return (begun.named_bytes + dtypes.stream_bytes * model.stream_width) * tokens
    num_streams = 3 if model.adds_positions and model.task == "causal-lm" else 2
    stream = stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm)
    before = evaluate(returned_probabilities(layer, dtypes), tokens=tokens, span=span, r=r)
    before = before + handed_on_bytes(layer, tokens=tokens, span=span)
    return num_streams * stream * model.hidden_size * tokens + before


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward of one layer without gradients.

    Args:
        decoding: of one token of each sequence.
        fills_cache, makes_bias: as of `forward_bytes`.
    """

    layer: Layer
    model: ModelSpec
    targets: tuple[str, ...]
    dtypes: Dtypes
    method: Method
    decoding: bool
    fills_cache: bool
    makes_bias: bool

    @property
    def state_elements(self) -> int:
        return sum(attention.recurrent_elements for attention in self.layer.attentions)

    def points(self, *, tokens: Count, span: Count, r: Count) -> Iterator[tuple[Count, Count]]:
        """Bytes at the worst point, with 1 where they hold and 0 elsewhere."""
        layer, dtypes, model = self.layer, self.dtypes, self.model
        states: Count = 0
        if self.decoding:
            states = _STEP_STATES * 4 * self.state_elements * tokens
        for share, running, masked, ragged in layer_cases(layer, dtypes, tokens=tokens, span=span):
            forms = working_points(
                running,
                model.stream_width,
                self.targets,
                dtypes,
                self.method,
                masked=masked,
                stream=stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm),
                ragged=ragged,
                decoding=self.decoding,
                fills_cache=self.fills_cache,
                makes_bias=self.makes_bias,
            )
            if self.decoding:
                forms = tuple(without_sequences(form) for form in forms)
            yield share, most(forms, tokens=tokens, span=span, r=r) + states


def _values(points: LayerPoints, *, tokens: Count, span: Count, r: Count) -> dict[str, Count]:
    sizes = {"tokens": tokens, "span": span, "r": r}
    return {
        "saved": evaluate(points.saved, **sizes),
        "unsaved": evaluate(points.unsaved, **sizes),
        "held_by_later_layers": evaluate(points.held_by_later_layers, **sizes),
        "graph_behind_held": evaluate(points.graph_behind_held, **sizes),
        "gathered": evaluate(points.gathered, **sizes),
        "memory": evaluate(points.memory, **sizes),
        "saved_memory": evaluate(points.memory, **sizes) * points.saves_memory,
        "forward": most(points.forward, **sizes),
        "backward": most(points.backward, **sizes),
    }


def layer_cases(
    layer: Layer, dtypes: Dtypes, *, tokens: Count, span: Count
) -> Iterator[tuple[Count, Layer, bool, bool]]:
    """Whether SDPA gets a mask, and the length is uneven: each with 1 where it holds.

    The layer comes back as it runs on so many tokens.
    """
    for share, running in _window_cases(layer, tokens=tokens, span=span):
        for part, masked, ragged in _mask_cases(running, dtypes, span):
            yield share * part, running, masked, ragged


def _window_cases(layer: Layer, *, tokens: Count, span: Count) -> Iterator[tuple[Count, Layer]]:
    """Whether a batch has several sequences, and a sequence several chunks or padding."""
    if any(attention.sparse for attention in layer.attentions):
        yield from _sparse_cases(layer, tokens=tokens, span=span)
        return
    cut_from = max((attention.cut_from for attention in layer.attentions), default=0)
    if layer.windows is None and not cut_from:
        yield 1, layer
        return
    if layer.windows is None:
        read = max(attention.memory_len for attention in layer.attentions) or span
        is_cut = 1 * (tokens > span) * (read % cut_from > 0)
        whole = tuple(replace(attention, cut_from=0) for attention in layer.attentions)
        for share, running in ((is_cut, layer), (1 - is_cut, replace(layer, attentions=whole))):
            if not is_plain(share) or share:
                yield share, running
        return
    (attention,) = layer.attentions
    for batched, single in itertools.product((False, True), repeat=2):
        windows = replace(layer.windows, batched=batched, single=single)
        has_one = span == 2 * windows.one_sided
        share = 1 * ((tokens > span) == batched) * (has_one == single)
        if not is_plain(share) or share:
            yield share, replace(layer, attentions=(replace(attention, windows=windows),))


def _sparse_cases(layer: Layer, *, tokens: Count, span: Count) -> Iterator[tuple[Count, Layer]]:
    """Whether a batch has several sequences, and whether queries see all keys of theirs."""
    (attention,) = layer.attentions
    assert attention.sparse is not None
    for batched, has_all in itertools.product((False, True), repeat=2):
        sparse = replace(attention.sparse, batched=batched, has_all=has_all)
        share = 1 * ((tokens > span) == batched) * ((span <= sparse.top_k) == has_all)
        if not is_plain(share) or share:
            yield share, replace(layer, attentions=(replace(attention, sparse=sparse),))


def _uneven(layer: Layer, span: Count) -> Count | None:
    """1 where the last chunk is filled up or experts turn tokens away; None: no length does."""
    attention, moe = layer.attentions[0], layer.moe
    if attention.kind in ("linear", "mamba2") or attention.in_blocks:
        return 1 * (span % attention.chunk_size > 0)
    if moe is not None and moe.capacity:
        return 1 * (span > moe.capacity * moe.num_experts)
    return None


def _mask_cases(layer: Layer, dtypes: Dtypes, span: Count) -> Iterator[tuple[Count, bool, bool]]:
    """Whether SDPA gets a mask, and the length is uneven: each with 1 where it holds."""
    if not layer.attentions:
        yield 1, False, False
        return
    attention = layer.attentions[0]
    uneven = _uneven(layer, span)
    if uneven is not None:
        if is_plain(uneven):
            yield 1, dtypes.padded, bool(uneven)
            return
        yield 1 - uneven, dtypes.padded, False
        yield uneven, dtypes.padded, True
        return
    always = dtypes.padded or (attention.always_masked and dtypes.uses_sdpa)
    if always or attention.sliding_window is None:
        yield 1, always, False
        return
    masked = kernels.is_masked(attention, dtypes, span)
    if is_plain(masked):
        yield 1, bool(masked), False
        return
    yield 1 - masked, False, False
    yield masked, True, False


def listed_tensors(
    saved: tuple[SavedTensor, ...], share: Count, *, tokens: Count, span: Count, r: Count
) -> Iterator[Tensor]:
    for tensor in saved:
        form = tensor.form
        constant: Count = form.constant
        if form.per_rank:
            constant = constant + form.per_rank * r
        if form.per_span_squared:
            constant = constant + form.per_span_squared * span * span
        if form.per_span:
            constant = constant + form.per_span * span
        if has_sequences(form):
            constant = constant + tokens // span * in_sequence(form, span=span, r=r)
        per_token: Count = form.per_token
        if form.per_rank_token:
            per_token = per_token + form.per_rank_token * r
        width = tensor.element_bytes or 1
        yield Tensor(
            tensor.what or "operand",
            share * per_token,
            share * form.per_pair,
            share * constant,
            dims=_dims(tensor, width),
            element_bytes=tensor.element_bytes,
        )


def _dims(tensor: SavedTensor, width: int) -> str:
    form = tensor.form
    per_rank = form.per_rank_token or form.per_rank or form.per_rank_sequence
    if per_rank:
        return f"{per_rank // width} · r"
    elements = form.per_pair or form.per_token or form.constant or max(0, form.per_sequence)
    return str(elements // width)
