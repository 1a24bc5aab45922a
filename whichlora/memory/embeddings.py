"""What is saved around the layers: embeddings before the first, norms and heads after the last."""

from __future__ import annotations

from functools import lru_cache

from whichlora.memory.entries import Tensor, per_token
from whichlora.memory.layer_bytes import listed_tensors
from whichlora.methods.base import NO_ADAPTERS, Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Norm
from whichlora.spec.numeric import Count
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.gemma4 import LayerInputPoints
from whichlora.symbolic.graph import SavedTensor
from whichlora.symbolic.layer import stream_bytes
from whichlora.symbolic.linear_form import LinearForm, maximal, minus
from whichlora.symbolic.linear_form import per_token as elements_per_token
from whichlora.symbolic.masked_lm_head import saved_by_masked_head
from whichlora.symbolic.operators import OpEmitter

ENCODER_OUT = "encoder_out"  # what the cross attention of every decoder layer reads


def outside_saved(
    model: ModelSpec,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    *,
    embeddings_need_grad: bool,
    after_layers: bool,
    in_encoder: bool = False,
    has_leaf: bool = False,
    joins_rows: bool = False,
    keeps_head_input: bool = False,
    has_points: bool = False,
) -> list[Tensor]:
    """Tensors saved between the embedding and the first layer, and from the last layer on.

    Args:
        after_layers: true until the backward reaches the last layer.
        in_encoder: the backward is in the first of two stacks; the decoder's tensors are freed.
        has_leaf: the looked-up rows are a leaf of the graph.
        keeps_head_input: the vocabulary's head, or a copy of it, is trained and saves what it read.
        joins_rows: other rows are put before the looked-up ones.
        has_points: `label_points` has the last norms, the head and its loss.
        embeddings_need_grad: trained, or made to need a gradient so that checkpointing works.

    Kind: exact; the output of a tower, or of an encoder with a length of its own, is left out.
    """
    hidden = model.hidden_size
    saved: list[Tensor] = []
    # `merging_points` or `label_points` have them
    norms = () if has_points or model.streams is not None else model.final_norms
    dropped = () if has_points else model.final_dropouts
    if not after_layers:  # an encoder's end stands before the decoder
        norms, dropped = norms[: len(norms) // 2], dropped[: len(dropped) // 2]
    first_norms, first_dropped = model.embedding_norms, model.embedding_dropouts
    if in_encoder:
        norms, dropped = (), ()
        first_norms = first_norms[: len(first_norms) // 2]
        first_dropped = first_dropped[: len(first_dropped) // 2]
    if embeddings_need_grad:
        norms, dropped = norms + first_norms, dropped + first_dropped
    for norm in norms:
        saved += listed_tensors(norm_kept(norm, dtypes, targets), 1, tokens=0, span=0, r=0)
    # torch 2.13 `native_dropout` saves a boolean mask; a CPU's `dropout_impl` multiplies by a mask
    # in the dtype of the input
    mask_bytes = dtypes.stream_bytes if dtypes.backend.wide_dropout_masks else 1
    saved += [per_token("dropout mask", mask_bytes, width, "hidden_size") for width in dropped]
    has_head = model.head is not None or model.task != "causal-lm"
    has_head = has_head and model.masked_head is None and not has_points
    if keeps_head_input and after_layers and has_head:
        # the gradient of a trained weight reads the input: `mm` in derivatives.yaml
        saved.append(per_token("head: input", dtypes.compute_bytes, hidden, "hidden_size"))
    elif has_leaf and (joins_rows or _embeds_in_steps(model, dtypes)):
        # the looked-up rows are what was made to need a gradient: a leaf lives as long as the graph
        rows = (1 + model.has_two_stacks) * model.embeddings[0].width
        saved.append(per_token("looked-up embeddings", dtypes.embedding_bytes, rows, "hidden_size"))
    apart = model.tower is not None or bool(model.groups[0].layer.own_len)
    if not (in_encoder or apart) and saves_encoded(model, targets, dtypes):
        saved.append(per_token("encoder output", dtypes.stream_bytes, hidden, "hidden_size"))
    return saved


def saves_encoded(model: ModelSpec, targets: tuple[str, ...], dtypes: Dtypes) -> bool:
    """Whether the encoder's output is saved.

    `k_proj` and `v_proj` of every cross attention read this one tensor, and save it where they or
    their adapters are trained.
    """
    return any(
        linear.reads == ENCODER_OUT and (dtypes.trains_base or linear.name in targets)
        for layer, _ in model.layers()
        for linear in layer.linears
    )


def _embeds_in_steps(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether the first layer reads something else than the looked-up rows themselves.

    A norm of the rows keeps them anyway, unless positions are added or it widens them first.
    """
    if model.embedding_norms and not model.starts_in_layer_norm and dtypes.embedding_bytes < 4:
        return True
    return model.embeds_in_steps or model.adds_positions or bool(model.embedding_dropouts)


@lru_cache(maxsize=512)
def norm_kept(norm: Norm, dtypes: Dtypes, targets: tuple[str, ...] = ()) -> tuple[SavedTensor, ...]:
    """What a norm around the layers saves. Kind: exact. Source: `OpEmitter.norm`."""
    tape = Tape()
    x = tape.input(elements_per_token(norm.width * norm.rows), dtypes.stream_bytes, needs_grad=True)
    OpEmitter(tape, dtypes, targets, NO_ADAPTERS).norm(norm, x)
    return tape.saved_tensors()


@lru_cache(maxsize=512)
def norm_points(
    norm: Norm, dtypes: Dtypes, targets: tuple[str, ...] = ()
) -> tuple[LinearForm, ...]:
    """Points of such a norm beyond what it saves. Kind: exact. Source: `OpEmitter.norm`."""
    tape = Tape()
    x = tape.input(elements_per_token(norm.width * norm.rows), dtypes.stream_bytes, needs_grad=True)
    tape.returns(OpEmitter(tape, dtypes, targets, NO_ADAPTERS).norm(norm, x))
    return maximal(minus(point, tape.saved) for point in tape.forward(saving=True))


def layer_inputs_saved(
    inputs: LayerInputPoints | None, *, tokens: Count, span: Count, r: Count
) -> tuple[Tensor, ...]:
    """The inputs of all layers, which live until the first went backward, and what made them."""
    if inputs is None:
        return ()
    packed = Tensor("inputs of all layers", inputs.packed_bytes, dims="num_hidden_layers, width")
    return packed, *listed_tensors(inputs.saved_tensors, 1, tokens=tokens, span=span, r=r)


def masked_head_saved(
    model: ModelSpec, targets: tuple[str, ...], dtypes: Dtypes, method: Method, *, r: Count
) -> tuple[Tensor, ...]:
    """What an encoder keeps between its last layer and the logits. Kind: exact."""
    if model.masked_head is None:
        return ()
    last = model.groups[-1].layer
    after_norm = bool(model.embedding_norms) or bool(model.final_norms)
    saved = saved_by_masked_head(
        model.masked_head,
        model.hidden_size,
        model.vocab_size,
        targets,
        dtypes,
        method,
        stream=stream_bytes(last, dtypes, after_norm=after_norm),
    )
    return tuple(listed_tensors(saved, 1, tokens=0, span=0, r=r))
