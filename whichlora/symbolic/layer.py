"""One layer of a transformer, written on a tape in the order in which transformers runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from whichlora.methods.base import Method
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Layer, Norm
from whichlora.spec.run import BNB_QUANTS
from whichlora.symbolic.altup import run_altup_layer
from whichlora.symbolic.attention import attend
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.experts import mix_experts
from whichlora.symbolic.gemma4 import add_layer_input, feed_both_ways
from whichlora.symbolic.graph import SavedTensor, TapeEvent, Tensor
from whichlora.symbolic.kernels import attention_kernel
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    maximal,
    minus,
    per_pair,
    per_sequence,
    per_token,
    plus,
)
from whichlora.symbolic.mlp import feed_forward
from whichlora.symbolic.operators import OpEmitter
from whichlora.symbolic.sparse_keys import CHOICE
from whichlora.symbolic.traffic import StepTraffic, Traffic


def feed(code: OpEmitter, layer: Layer, y: Tensor, x: Tensor) -> Tensor:
    """The MLP or experts between the second norm, which turns `x` into `y`, and the second sum."""
    if layer.moe is None:
        assert layer.mlp is not None
        return feed_forward(code, layer.mlp, y)
    if layer.mlp is None:
        return mix_experts(code, layer.moe, y)
    return feed_both_ways(code, layer, x, y)


def run_layer(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """The layer's forward, in one of the orders of norms and sums that the classes have."""
    if layer.altup is not None:
        return run_altup_layer(code, layer, x)
    if layer.parallel:
        return _run_parallel(code, layer, x)
    if layer.post_norm:
        return _run_post_norm(code, layer, x)
    if layer.side_by_side:
        return _run_side_by_side(code, layer, x)
    if not (layer.attentions and (layer.mlp or layer.moe)):
        return _run_single(code, layer, x)
    return _run_pre_norm(code, layer, x)


def _dropped(code: OpEmitter, layer: Layer, y: Tensor, *, of_mlp: bool = False) -> Tensor:
    if not layer.dropouts or not code.dtypes.training or (of_mlp and not layer.drops_mlp):
        return y
    return code.dropout(y)


def _memory(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor | None:
    """The encoder's output, which the cross attention of every decoder layer reads."""
    dtypes = code.dtypes
    if not any(attention.cross for attention in layer.attentions):
        return None
    widened = layer.norms[0].kind == "layer" and dtypes.widens_layer_norm
    size = dtypes.encoder_bytes or (4 if widened else dtypes.stream_bytes)
    length = layer.attentions[-1].memory_len
    elements = per_sequence(length * x.elements.per_token) if length else x.elements
    needs_grad = dtypes.training and dtypes.learns_encoder
    memory = code.tape.shared(elements, size, needs_grad=needs_grad)
    code.tape.memory = memory
    return replace(memory, cut=any(attention.cut_from for attention in layer.attentions))


def _attend_self(code: OpEmitter, layer: Layer, x: Tensor, memory: Tensor | None) -> Tensor:
    # an encoder's tokens alone have a padding mask
    by_itself = replace(code, masked=False) if memory is not None else code
    return attend(by_itself, layer.attentions[0], x)


def _run_parallel(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `GPTNeoXLayer.forward`, `FalconDecoderLayer.forward`."""
    norms = layer.norms
    first = code.norm(norms[0], x)
    mixed = _dropped(code, layer, _attend_self(code, layer, first, None))
    second = code.norm(norms[1], x) if len(norms) > 1 else first
    fed = _dropped(code, layer, feed(code, layer, second, x))
    result = code.add(code.add(mixed, fed), x)
    code.tape.hold(mixed, fed, second)
    return result


def _run_post_norm(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `BertLayer.forward`, `BartDecoderLayer.forward`."""
    norms, memory = layer.norms, _memory(code, layer, x)
    mixed = _dropped(code, layer, _attend_self(code, layer, x, memory))
    if norms[0].kind != "layer":  # OLMo 2 normalises what it adds, not the sum
        middle = code.add(x, code.norm(norms[0], mixed))
        fed = feed(code, layer, middle, middle)
        return code.add(middle, code.norm(norms[1], fed))
    middle = code.norm(norms[0], code.add(mixed, x))
    for cross in layer.attentions[1:]:
        mixed = _dropped(code, layer, attend(code, cross, middle, memory=memory))
        middle = code.norm(norms[1], code.add(mixed, middle))
    fed = _dropped(code, layer, feed(code, layer, middle, middle), of_mlp=True)
    return code.norm(norms[-1], code.add(fed, middle))


def _run_pre_norm(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `LlamaDecoderLayer.forward`, `T5Block.forward`."""
    norms, memory = list(layer.norms), _memory(code, layer, x)
    read_norms = len(norms) - 1 - _is_sandwich(layer)
    for number, attention in enumerate(layer.attentions):
        # ModernBERT's first layer reads its input as it is
        y = code.norm(norms.pop(0), x) if number or read_norms else x
        if layer.names_norm and not number:
            code.tape.hold_to_end(y)
        if number or attention.cross:
            mixed = attend(code, attention, y, memory=memory)
        else:
            mixed = _attend_self(code, layer, y, memory)
        y = _dropped(code, layer, mixed)
        if layer.names_attention:
            code.tape.hold_to_end(y)
        x = _add_to_stream(code, layer, x, y, mixed, norms)
    y = code.norm(norms.pop(0), x)
    mixed = feed(code, layer, y, x)
    if layer.masks_fed:
        mixed = code.multiply_rows(mixed, code.tape.weight(per_token(1), code.dtypes.base_bytes))
    y = _dropped(code, layer, mixed, of_mlp=True)
    result = _add_to_stream(code, layer, x, y, mixed, norms)
    if layer.layer_input is not None:
        result = add_layer_input(code, layer.layer_input, result)
    return code.tape.in_place(result) if layer.scales_result else result


def _run_side_by_side(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """Source: transformers 5.23 `FalconH1DecoderLayer.forward`."""
    first, second = layer.norms
    y = code.norm(first, x)
    mixer, attention = layer.attentions
    states = code.scale(attend(code, mixer, y))
    attended = code.scale(attend(code, attention, code.scale(y)))
    mixed = code.add(states, attended)
    code.tape.hold(y)
    middle = code.add(x, mixed)
    code.tape.hold(x)
    result = code.add(middle, feed(code, layer, code.norm(second, middle), middle))
    code.tape.hold(middle, states, attended)
    return result


def _run_single(code: OpEmitter, layer: Layer, x: Tensor) -> Tensor:
    """One mixer, MLP or mixture of experts between one norm and one sum.

    Source: transformers 5.23 `Mamba2Block.forward`, `NemotronHBlock.forward`.
    """
    narrow = code.cast(x, code.dtypes.base_bytes) if layer.wide_residual else x
    y = code.norm(layer.norms[0], narrow)
    mixed = attend(code, layer.attentions[0], y) if layer.attentions else feed(code, layer, y, x)
    result = code.add(x, mixed)
    code.tape.hold(x)
    return result


def _is_sandwich(layer: Layer) -> bool:
    """Whether a norm stands before and after each of attention and MLP (Gemma 2)."""
    return len(layer.norms) >= 4


def _add_to_stream(
    code: OpEmitter, layer: Layer, x: Tensor, y: Tensor, mixed: Tensor, norms: list[Norm]
) -> Tensor:
    """`x` and `y`, which dropout made of `mixed`; a sandwich takes the next of `norms` first."""
    # T5LayerFF.forward adds `dropout(forwarded_states)`: the variable still holds its argument
    names_both = layer.norms[0].kind == "rms_mixed"
    if _is_sandwich(layer):
        y = code.norm(norms.pop(0), y)
    if layer.scales_channels:
        y = _scaled_by_channel(code, layer, y)
    y = code.tape.view(y, copies_gradient=layer.copies_gradients)
    added = code.scale(y) if layer.scales_sums else y
    if layer.gates_sums:
        added = code.multiply_rows(y, _gate(code))
    result = code.add(x, added)
    # `residual` and `hidden_states` of `LlamaDecoderLayer.forward` refer to both operands until
    # the sum is assigned
    code.tape.hold(x, *([mixed] if names_both else []))
    if layer.scales_sums or layer.gates_sums:
        code.tape.hold(y)
    return result


def _gate(code: OpEmitter) -> Tensor:
    """The hyperbolic tangent of a parameter of one number.

    Source: transformers 5.23 `MllamaCrossAttentionDecoderLayer.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    gate = tape.weight(constant(1), dtypes.base_bytes, trained=dtypes.trains_base)
    return tape.op([gate], constant(1), gate.size, saves_result=True, what="gate")


def _scaled_by_channel(code: OpEmitter, layer: Layer, y: Tensor) -> Tensor:
    """Source: transformers 5.23 `InternVLVisionLayer.forward`, which names the first to its end."""
    dtypes, channels = code.dtypes, constant(layer.norms[0].width)
    scales = code.tape.weight(channels, dtypes.base_bytes, trained=dtypes.trains_base)
    scaled_y = code.multiply_rows(y, scales)
    code.tape.hold_to_end(scaled_y)
    return scaled_y


def returned_probabilities(layer: Layer, dtypes: Dtypes, *, saving: bool = False) -> LinearForm:
    """Attention probabilities of the previous block, held by a variable of the loop. Kind: exact.

    Args:
        saving: only those that are not saved for backward.

    Source: transformers 5.23 `GPTJModel.forward`: `outputs = block(...)`.
    """
    if not layer.returns_probabilities:
        return NOTHING
    widened = dtypes.under_autocast and dtypes.backend.widens_norms
    form = NOTHING
    for attention in layer.attentions:
        if attention_kernel(attention, dtypes, masked=True) != "eager":  # whatever the mask
            continue
        is_wide = widened and not attention.wide_softmax  # the values' product reads a copy
        if is_wide or not saving:
            size = 4 if is_wide else dtypes.linear_out_bytes
            of_heads, keys = attention.num_attention_heads * size, attention.memory_len
            form = plus(form, per_token(of_heads * keys) if keys else per_pair(of_heads))
    return form


def stream_bytes(layer: Layer, dtypes: Dtypes, *, after_norm: bool) -> int:
    """One element of the layer's input: CUDA's autocast returns fp32 from a LayerNorm.

    So do matrices of bitsandbytes that read it, and the MLP's result makes the sum fp32, too.

    Args:
        after_norm: a LayerNorm stands between the embeddings and the first layer.

    Kind: exact; upper bound where the matrices widen it: the first layer's input is narrower.
    Source: torch 2.13 `autocast_mode.h`: `layer_norm` is in its fp32 list; bitsandbytes 0.50.2
    `Linear4bit.forward`: `.to(inp_dtype)`.
    """
    if layer.wide_residual:
        return 4
    if not dtypes.widens_layer_norm:
        return dtypes.stream_bytes
    is_last_wide = bool(layer.norms) and layer.norms[-1].kind == "layer"
    if after_norm or (is_last_wide and (layer.post_norm or _keeps_wide(layer, dtypes))):
        return 4
    return dtypes.stream_bytes


def _keeps_wide(layer: Layer, dtypes: Dtypes) -> bool:
    """Whether the MLP gives back the dtype that it is given."""
    if layer.mlp is None or dtypes.quant not in BNB_QUANTS:
        return False
    return all(is_quantised(linear, dtypes) for linear in layer.mlp.linears)


@dataclass(frozen=True, slots=True)
class LayerPoints:
    """Bytes at the points of one layer that can be the largest.

    Args:
        saved_tensors: what autograd keeps for backward; `saved` their sum.
        unsaved: bytes that the first layer saves less where its input needs no gradient, as that
            of a checkpointed one does.
        held: saved tensors that checkpointing does not free.
        held_by_later_layers: keys and values that checkpointed later layers hold; without
            checkpointing those that the forward alone does.
        graph_behind_held: what the recomputed nodes behind those have saved.
        gathered: gradients that later layers have summed when its backward begins.
        forward: alive in a forward that saves `saved`.
        backward: alive in its backward, `saved` and the gradient of its result included; of a
            checkpointed layer while its forward is repeated and goes backward, without its input.
        memory: the encoder's output that it reads.
        saves_memory: that is saved, or an argument of a checkpoint.
    """

    saved_tensors: tuple[SavedTensor, ...]
    saved: LinearForm
    unsaved: LinearForm
    held: tuple[SavedTensor, ...]
    held_by_later_layers: LinearForm
    graph_behind_held: LinearForm
    gathered: LinearForm
    forward: tuple[LinearForm, ...]
    backward: tuple[LinearForm, ...]
    memory: LinearForm = NOTHING
    saves_memory: bool = False


def _tape_of(layer: Layer, stream_width: int, code: OpEmitter, *, needs_grad: bool) -> Tape:
    """The tape of `code` after one layer has run on it."""
    x = code.tape.input(per_token(stream_width), code.stream_bytes, needs_grad=needs_grad)
    code.tape.returns(run_layer(code, layer, x))
    return code.tape


@lru_cache(maxsize=64)
def result_bytes(
    layer: Layer, stream_width: int, targets: tuple[str, ...], dtypes: Dtypes, method: Method
) -> int:
    """Width of one element of what `layer` returns; wider than its input where adapters widen it.

    Kind: exact. Source: the `forward` of the method's layers: `result.to(previous_dtype)`.
    """
    code = OpEmitter(Tape(), dtypes, targets, method, stream_bytes=dtypes.stream_bytes)
    x = code.tape.input(per_token(stream_width), code.stream_bytes, needs_grad=True)
    return run_layer(code, layer, x).size


@lru_cache(maxsize=16)  # what the points of a layer are read from, its events are, too
def _training_tape(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    checkpointed: bool,
    stream: int,
    ragged: bool,
    needs_grad: bool,
    reentrant: bool,
    makes_bias: bool = False,
) -> Tape:
    settings = (dtypes, targets, method, masked, stream, checkpointed)
    code = OpEmitter(
        Tape(),
        *settings,
        ragged=ragged,
        makes_bias=makes_bias,
        reentrant=checkpointed and reentrant,
    )
    return _tape_of(layer, stream_width, code, needs_grad=needs_grad)


@lru_cache(maxsize=512)
def layer_points(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    accumulated: bool,
    reentrant: bool,
    checkpointed: bool,
    stream: int,
    ragged: bool = False,
    meets: bool = False,
    makes_bias: bool = False,
) -> LayerPoints:
    """Args: `stream` as of `stream_bytes`, `meets` of `Tape.backward`, the others of the ledger.

    `makes_bias` is as of `OpEmitter`.

    Kind: exact. Source: the code of transformers, peft, bitsandbytes and torch named above.
    """
    written = partial(
        _training_tape,
        layer,
        stream_width,
        targets,
        dtypes,
        method,
        masked=masked,
        checkpointed=checkpointed,
        stream=stream,
        ragged=ragged,
        reentrant=reentrant,
        makes_bias=makes_bias,
    )
    tape = written(needs_grad=True)
    backward = tape.backward(
        recomputed=checkpointed,
        early_stop=not reentrant,
        accumulated=accumulated,
        meets=meets,
    )
    return LayerPoints(
        tape.saved_tensors(),
        tape.saved,
        NOTHING if checkpointed else minus(tape.saved, written(needs_grad=False).saved),
        tape.saved_tensors(hidden=True),
        tape.held_by_later_layers if checkpointed else tape.unsaved_for_later_layers,
        tape.graph_behind_held,
        tape.gathered,
        maximal(tape.forward(saving=not checkpointed)),
        maximal(backward),
        NOTHING if tape.memory is None else tape.memory.form,
        checkpointed or tape.saves_memory,
    )


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Births and deaths of one block in a step, in order; its tensors have numbers of their own.

    Number 0 is its input. What `result`, `input_gradient`, `parameters` and `hidden` name outlives
    the block.

    Args:
        num_tensors: one more than the largest number.
        forward: of the first forward; `copies` stay until the model's forward is done, `in_cache`
            until the next one replaces them.
        backward: a repeated forward included.
        saved: what the backward reads, `hidden` what nobody frees before the graph is gone.
        backward: none where no gradient flows.
        result_gradient, gathered: there before the backward.
        input_gradient: None where the input needs none.
        parameters: gradients of trained parameters; `summed` those that are added to what earlier
            ones left: each dies where autograd accumulates it.
        product: the first result of a matrix in the forward, if it has any.
    """

    num_tensors: int
    forward: tuple[TapeEvent, ...]
    result: int
    backward: tuple[TapeEvent, ...] = ()
    saved: frozenset[int] = frozenset()
    hidden: frozenset[int] = frozenset()
    copies: tuple[int, ...] = ()
    in_cache: tuple[int, ...] = ()
    result_gradient: int = -1
    gathered: tuple[int, ...] = ()
    input_gradient: int | None = None
    parameters: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    product: int | None = None


def block_events(
    tape: Tape,
    *,
    checkpointed: bool = False,
    reentrant: bool = False,
    accumulated: bool = False,
    frees_input: bool = False,
) -> BlockEvents:
    """What the block on `tape` makes and frees. Kind: exact, as the tape is.

    Args:
        frees_input: nobody else holds the input until the block returns.

    Source: torch 2.13 `Engine::evaluate_function`; `torch/utils/checkpoint.py`.
    """
    without_graph = checkpointed and reentrant
    first = tape.forward_events(
        saving=not checkpointed, hides=not without_graph, frees_input=frees_input
    )
    walk = None
    last = tape.num_storages
    if tape.has_graph:
        walk = tape.backward_walk(
            recomputed=checkpointed, early_stop=not reentrant, accumulated=accumulated
        )
        last += walk.num_made

    # temporaries of the forward come after all gradients
    forward = tuple(
        TapeEvent(tensor if tensor >= 0 else last - tensor - 1, form)
        for tensor, form in tape.unpacked_events(first)
    )
    num_tensors = 1 + max(last - 1, tape.result, *(event.tensor for event in forward))
    if walk is None:
        return BlockEvents(
            num_tensors=num_tensors,
            forward=forward,
            result=tape.result,
            copies=tuple(tape.cached_copies),
            in_cache=tuple(tape.in_cache),
            product=tape.product,
        )
    gradient = walk.input_gradient
    hidden = frozenset() if without_graph else tape.saved_storages(hidden=True)
    # a checkpoint repeats them, too, while those of the first forward are still there
    repeated = sorted(hidden - {0}) if checkpointed else []
    again = {tensor: num_tensors + place for place, tensor in enumerate(repeated)}

    def number(tensor: int) -> int:
        return again.get(tensor, tensor) if tensor >= 0 else tape.num_storages - tensor - 1

    return BlockEvents(
        num_tensors=num_tensors + len(again),
        forward=forward,
        backward=tuple(
            TapeEvent(number(tensor), form) for tensor, form in tape.unpacked_events(walk.events)
        ),
        result=tape.result,
        saved=frozenset() if checkpointed else tape.saved_storages(),
        hidden=hidden,
        copies=tuple(tape.cached_copies),
        result_gradient=number(walk.result_gradient),
        gathered=tuple(map(number, walk.gathered)),
        input_gradient=None if gradient is None else number(gradient),
        parameters=tuple(map(number, walk.parameters)),
        summed=tuple(map(number, walk.summed)),
        product=tape.product,
    )


@lru_cache(maxsize=512)
def layer_events(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    accumulated: bool,
    reentrant: bool,
    checkpointed: bool,
    stream: int,
    ragged: bool = False,
    needs_grad: bool = True,
) -> BlockEvents:
    """Args as of `layer_points`; `needs_grad`: the input needs a gradient. Kind: exact.

    Source: as of `layer_points`.
    """
    tape = _training_tape(
        layer,
        stream_width,
        targets,
        dtypes,
        method,
        masked=masked,
        checkpointed=checkpointed,
        stream=stream,
        ragged=ragged,
        needs_grad=needs_grad,
        reentrant=reentrant,
    )
    return block_events(
        tape,
        checkpointed=checkpointed,
        reentrant=reentrant,
        accumulated=accumulated,
    )


@lru_cache(maxsize=512)
def forward_events(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    stream: int,
    ragged: bool = False,
    decoding: bool = False,
    writes_cache: bool = False,
    reads_own: bool = False,
) -> BlockEvents:
    """Of a forward without gradients. Kind: exact. Source: as of `layer_points`.

    Args:
        writes_cache: keys and values are copied into new tensors; else there is no cache, or one
            that is as large as it will be.
        reads_own: attention reads what was copied, not the copies.
        others: as of `working_points`.
    """
    settings = (dtypes, targets, method, masked, stream)
    tape = Tape(no_grad=True, writes_cache=writes_cache, reads_own=reads_own)
    code = OpEmitter(tape, *settings, ragged=ragged, decoding=decoding)
    _tape_of(layer, stream_width, code, needs_grad=False)
    if layer.returns_probabilities:
        tape.keep_to_next("attention weights")
    tape.keep_to_next(CHOICE)
    return block_events(tape, checkpointed=True)  # which saves nothing


@lru_cache(maxsize=512)
def working_points(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    stream: int,
    ragged: bool = False,
    decoding: bool = False,
    fills_cache: bool = False,
    makes_bias: bool = False,
) -> tuple[LinearForm, ...]:
    """Points of a forward without gradients, the layer's input left out.

    Args:
        fills_cache: as of `Tape.forward`.
        targets: names of the matrices with an adapter; none of a merged model.
        decoding: one token of each sequence runs, and sees those in the cache.
        makes_bias: as of `OpEmitter`.
    """
    settings = (dtypes, targets, method, masked, stream)
    code = OpEmitter(
        Tape(no_grad=True), *settings, ragged=ragged, decoding=decoding, makes_bias=makes_bias
    )
    tape = _tape_of(layer, stream_width, code, needs_grad=False)
    return maximal(tape.forward(saving=False, fills_cache=fills_cache))


@lru_cache(maxsize=512)
def layer_traffic(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    reentrant: bool,
    checkpointed: bool,
    stream: int,
    ragged: bool = False,
) -> StepTraffic:
    """What the kernels of one layer move in a training step. Args: as of `layer_points`.

    Kind: estimate: each operator reads its inputs and writes its results once.
    Source: the code named above.
    """
    tape = _training_tape(
        layer,
        stream_width,
        targets,
        dtypes,
        method,
        masked=masked,
        checkpointed=checkpointed,
        stream=stream,
        ragged=ragged,
        needs_grad=True,
        reentrant=reentrant,
    )
    return tape.traffic(recomputed=checkpointed, early_stop=not reentrant)


@lru_cache(maxsize=512)
def forward_traffic(
    layer: Layer,
    stream_width: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    masked: bool,
    stream: int,
    ragged: bool = False,
    decoding: bool = False,
) -> Traffic:
    """So of a forward without gradients. Args: as of `working_points`."""
    settings = (dtypes, targets, method, masked, stream)
    code = OpEmitter(Tape(no_grad=True), *settings, ragged=ragged, decoding=decoding)
    return _tape_of(layer, stream_width, code, needs_grad=False).forward_traffic
