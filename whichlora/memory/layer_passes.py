"""What the layers of a training step keep for the backward, and what a pass needs beside it.

With checkpointing a layer keeps its input and makes the rest again; without it, all that autograd
saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whichlora.memory.entries import Fact, Group, Tensor, tensor_bytes
from whichlora.memory.layer_bytes import LayerBytes, choice_bytes
from whichlora.memory.weights import unconverted_copy_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count, largest
from whichlora.symbolic.graph import LAYER_INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPasses:
    """One value for each group of equal layers, in the order of `ModelSpec.groups`.

    Args:
        fact: what `groups` are.
        groups: kept by all layers; those of `ModelSpec.groups` come first, one for one.
        forward: worst point of any layer's forward, beyond what all layers keep.
        saved: what autograd keeps of one layer until its backward is done.
        backward: worst point of its backward, beyond what it keeps.
        last_backward: so when it is the last to go backward, what it keeps included.
    """

    fact: Fact
    groups: tuple[Group, ...]
    forward: Count
    saved: tuple[Count, ...]
    backward: tuple[Count, ...]
    last_backward: tuple[Count, ...]


CHECKPOINTS = Fact(
    part="activations",
    what="checkpoints",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    count="num_hidden_layers",
    why="each layer's input, from which backward recomputes it",
    source="torch.utils.checkpoint; saved-tensor hooks",
)


OFFLOADED = Fact(
    part="activations",
    what="inputs of the first and the last layer",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    count="2",
    why="the other layers' inputs lie in pinned host memory; embeddings that need a gradient are a "
    "leaf of the graph, which holds them",
    source="unsloth_zoo 2026.10.9 gradient_checkpointing.py, UnslothCheckpointFunction",
)
STAGING = Fact(
    part="activations",
    what="buffers through which inputs of layers come back from the host",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="bf16",
    count="2",
    why="they are made once, and stay",
    source="unsloth_zoo 2026.10.9 gradient_checkpointing.py, GPU_BUFFERS, GPU_BUFFERS_B",
    kind="upper bound",
)
LEAST_OFFLOADED_BYTES = 2 * 1024**2  # `MINIMUM_SIZE`; no staging buffer is smaller


def offloaded_bytes(model: ModelSpec, *, tokens: Count) -> Count:
    """Inputs of layers in pinned host memory: of all but the last, where they exceed 2 MiB.

    Kind: exact; host buffers that are there before, 50 MiB, are left out. Source: unsloth_zoo
    2026.10.9 gradient_checkpointing.py, lines 1403 to 1410: fp32 is stored as bf16.
    """
    size = 2 * model.stream_width * tokens
    return (model.num_hidden_layers - 1) * size * (size > LEAST_OFFLOADED_BYTES)


def staging_bytes(model: ModelSpec, *, tokens: Count, buffers: int) -> Count:
    """Buffers as large as one input that goes to the host; none where none does.

    Kind: upper bound: the second is there where 512 MiB are free after the first step. Source: as
    of `STAGING`.
    """
    size = 2 * model.stream_width * tokens
    return buffers * size * (size > LEAST_OFFLOADED_BYTES)


def offloaded_passes(
    model: ModelSpec, layers: Sequence[LayerBytes], *, masks: Group, sized: Mapping[str, Count]
) -> LayerPasses:
    """Checkpoints that go to the host: the device has those of the first and the last layer.

    Kind: exact. Source: `OFFLOADED`.
    """
    plain = checkpointed_passes(model, layers, masks=masks, sized=sized)
    stays = 1 - (2 * model.stream_width * sized["tokens"] > LEAST_OFFLOADED_BYTES)
    stream = plain.saved[-1]
    many = sum(layer.count for layer in layers) - 2
    held = Tensor(LAYER_INPUT, constant=stream * (2 + many * stays), dims="hidden_size")
    inputs = [Group(tensors=(), count=layer.count, **sized) for layer in layers]
    inputs[-1] = Group(tensors=(held,), **sized)
    return replace(
        plain,
        fact=OFFLOADED,
        groups=(*inputs, *plain.groups[len(layers) :]),
        saved=tuple(saved * stays for saved in plain.saved),
    )


def checkpointed_passes(
    model: ModelSpec, layers: Sequence[LayerBytes], *, masks: Group, sized: Mapping[str, Count]
) -> LayerPasses:
    """Every layer keeps its input; backward runs its forward again, and all of it is there then.

    transformers 5.23 `GradientCheckpointingLayer.__init_subclass__` wraps the forward of one layer,
    so that never more than one is made again. Kind: exact.
    Source: torch 2.13 `torch/utils/checkpoint.py`, `_CheckpointFrame` and `CheckpointFunction`.
    """
    # `_CheckpointFrame.save_inputs` (reentrant: `ctx.save_for_backward`) keeps the positional
    # arguments, the input among them. The first tensor that backward unpacks makes all of the layer
    # again (`unpack_hook` of `_checkpoint_hook`); a tensor goes with the last node that reads it
    inputs = [_layer_input(model, layer) for layer in layers]
    groups = (
        *(
            Group(
                tensors=() if _holds_input(layer) else (stream,), count=layer.count, **layer.sized
            )
            for layer, stream in zip(layers, inputs, strict=True)
        ),
        masks,  # keyword arguments: the `partial` of `forward_with_checkpointing` holds them
        # nodes of the graph hold these themselves: no saved-tensor hook sees or frees them
        *(Group(tensors=layer.held, count=layer.count, **layer.sized) for layer in layers),
        # an argument of the later layers' checkpoints keeps them alive (Gemma 4)
        *(
            Group(tensors=(_held_by_later_layers(layer),), count=layer.count, **sized)
            for layer in layers
        ),
        *_choices(model, sized),
    )
    # the recomputed keys replace those that later layers hold: `Gemma4TextAttention.forward`, run
    # again, writes `shared_kv_states[self.layer_type]` of the one dict that all layers were given
    backward = tuple(layer.backward - layer.held_by_later_layers for layer in layers)
    saved = tuple(
        Group(tensors=(stream,), **layer.sized).num_bytes
        for layer, stream in zip(layers, inputs, strict=True)
    )
    return LayerPasses(
        fact=CHECKPOINTS,
        groups=groups,
        forward=largest(*(layer.forward for layer in _last_stack(model, layers))),
        saved=saved,
        backward=backward,
        last_backward=tuple(a + b for a, b in zip(backward, saved, strict=True)),
    )


def _last_stack(model: ModelSpec, layers: Sequence[LayerBytes]) -> Sequence[LayerBytes]:
    """Layers that run when all others have saved what they keep: all, or those of a decoder.

    The encoder before it may need more: `moments.encoder_forward` has it.
    """
    last = model.groups[-1].stack
    return [layer for group, layer in zip(model.groups, layers, strict=True) if group.stack == last]


def _layer_input(model: ModelSpec, layer: LayerBytes) -> Tensor:
    """The argument that `torch.utils.checkpoint` saves."""
    return Tensor(
        LAYER_INPUT,
        layer.stream_bytes * model.stream_width,
        dims="hidden_size" if model.streams is None else "states, hidden_size",
        element_bytes=layer.stream_bytes,
    )


def _holds_input(layer: LayerBytes) -> bool:
    """Whether its first matrix, quantised to 8 bit, holds the very tensor that is checkpointed."""
    return any(tensor.what == LAYER_INPUT for tensor in layer.held)


def _held_by_later_layers(layer: LayerBytes) -> Tensor:
    return Tensor("keys and values that later layers read", constant=layer.held_by_later_layers)


SAVED = Fact(
    part="activations",
    what="saved by all layers",
    shape="listed below",
    dtype="listed below",
    count="num_hidden_layers",
    why="no checkpointing: backward reads what forward kept",
    source="saved-tensor hooks on transformers and peft",
)


def saved_passes(
    model: ModelSpec,
    layers: Sequence[LayerBytes],
    dtypes: Dtypes,
    *,
    freezes_input: bool,
    num_idle: int,
    unnamed_mask_bytes: Count,
    masks: Group,
    sized: Mapping[str, Count],
) -> LayerPasses:
    """Every layer keeps what its backward reads.

    Args:
        freezes_input: the first layer's input needs no gradient, nor does any norm's bias.
        num_idle: layers before that one, which keep nothing.
        unnamed_mask_bytes: masks that only the model's loop holds, until its forward is done.

    Kind: exact.
    Source: torch 2.13 `torch/csrc/autograd/saved_variable.cpp`.
    """
    # a `SavedVariable` keeps the tensor itself: what several nodes read is there, and listed, once
    unsaved = _unsaved(
        model, layers, freezes_input=freezes_input, num_idle=num_idle, tokens=sized["tokens"]
    )
    corrections = (
        Tensor(
            "not kept by the first layer, whose input is frozen",
            constant=-sum(unsaved.values(), start=0 * sized["tokens"]),
        ),
        Tensor(
            "weights of shared layers, copied once",
            constant=-_repeated_copies(model, layers, sized),
        ),
        Tensor(
            "copy of the matrix that is not quantised",
            constant=unconverted_copy_bytes(model, dtypes),
        ),
    )
    # the loop of transformers 5.23 `LlamaModel.forward` names the looked-up rows
    # (`inputs_embeds`), the layer's input (`hidden_states`) and the masks (`causal_mask`)
    streams = 2 * model.hidden_size * max(layer.stream_bytes for layer in layers)
    if model.streams is not None:  # what else is named then, see `TrainingStep.passes`
        streams = model.stream_width * layers[-1].stream_bytes
    in_layer = largest(_largest_forward(model, layers), 0 * sized["tokens"])
    return LayerPasses(
        fact=SAVED,
        groups=(
            *(Group(tensors=layer.tensors, count=layer.count, **layer.sized) for layer in layers),
            Group(tensors=corrections + masks.tensors, **sized),
        ),
        forward=in_layer + sized["tokens"] * streams + unnamed_mask_bytes,
        saved=tuple(layer.saved for layer in layers),
        backward=tuple(layer.backward - layer.saved for layer in layers),
        last_backward=tuple(
            layer.backward - unsaved[group.stack]
            for group, layer in zip(model.groups, layers, strict=True)
        ),
    )


def _choices(model: ModelSpec, sized: Mapping[str, Count]) -> tuple[Group, ...]:
    """What indexers have chosen, an argument of the next layers' checkpoints.

    Kind: exact. Source: transformers 5.23 `GlmMoeDsaDecoderLayer.forward`.
    """
    if not model.chooses_keys:
        return ()
    last = model.num_hidden_layers - 1  # whose choice nobody takes
    total: Count = 0 * sized["tokens"]
    for group in model.groups:
        for sparse in (each.sparse for each in group.layer.attentions if each.sparse):
            if sparse.hands_on and sparse.num_heads:
                taken = group.count - (last in group.positions)
                total = total + taken * choice_bytes(sparse, **sized)
    chosen = Tensor("keys that indexers have chosen", constant=total)
    return (Group(tensors=(chosen,), **sized),)


def _largest_forward(model: ModelSpec, layers: Sequence[LayerBytes]) -> Count:
    """What the layer that runs makes beyond what all layers keep."""
    return largest(
        *(
            layer.forward - layer.saved - _saved_behind(model, layers, layer)
            for layer in _last_stack(model, layers)
        )
    )


def _saved_behind(model: ModelSpec, layers: Sequence[LayerBytes], layer: LayerBytes) -> Count:
    """What layers behind the last of a kind save, which is not there when that one runs.

    Nothing where nobody said which layers stand behind each other.

    Kind: exact. Source: the positions of `LayerGroup`.
    """
    stack = model.groups[-1].stack
    of_stack = [
        (group.positions, each)
        for group, each in zip(model.groups, layers, strict=True)
        if group.stack == stack
    ]
    if not all(positions for positions, _ in of_stack):
        return 0
    last = next(max(positions) for positions, each in of_stack if each is layer)
    return sum(
        each.saved * sum(position > last for position in positions) for positions, each in of_stack
    )


def _unsaved(
    model: ModelSpec,
    layers: Sequence[LayerBytes],
    *,
    freezes_input: bool,
    num_idle: int,
    tokens: Count,
) -> dict[str, Count]:
    """What the first layer of each stack that has a graph keeps less than the others.

    Autograd saves an operand only for an input that needs a gradient.
    Source: torch 2.13 `VariableType.cpp`, `should_compute_output` before each `SavedVariable`.
    """
    by_stack: dict[str, Count] = {}
    for group, layer in zip(model.groups[::-1], layers[::-1], strict=True):
        if not num_idle or num_idle in group.positions:
            by_stack[group.stack] = 0 * tokens + layer.unsaved * freezes_input
    return by_stack


def _repeated_copies(
    model: ModelSpec, layers: Sequence[LayerBytes], sized: Mapping[str, Count]
) -> Count:
    """Autocast copies a weight once, however many layers read it: its cache has it by address."""
    total: Count = 0 * sized["tokens"]
    for group, layer in zip(model.groups, layers, strict=True):
        if group.shared:
            total = total + (layer.count - 1) * tensor_bytes(layer.copies, **sized)
    return total
