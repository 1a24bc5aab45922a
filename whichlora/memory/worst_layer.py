"""At which depth a layer's backward is worst, where layers of several kinds alternate.

When a layer goes backward, those after it have released what they saved, and their gradients exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from whichlora.memory.layer_bytes import LayerBytes, keeps_keys
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.numeric import Count, largest


def has_one_order(model: ModelSpec) -> bool:
    """Whether it is known which layers stand before and after each other."""
    stacks = {group.stack for group in model.groups}
    return len(stacks) == 1 and all(group.positions for group in model.groups)


def worst_backward(
    model: ModelSpec,
    layers: Sequence[LayerBytes],
    backward: Sequence[Count],
    saved: Sequence[Count],
    left: Sequence[Count],
    *,
    num_idle: int = 0,
) -> Count:
    """Bytes of the worst backward beside what all layers keep.

    Args:
        backward: of one layer of each kind, the gradients that later layers gathered included.
        saved: what autograd saves of one layer of each kind until its backward is done.
        left: what its backward leaves: gradients of its parameters, the graph of shared keys.
        num_idle: first layers, which have no backward, or are asked for elsewhere.

    Kind: exact. Source: torch 2.13 `Engine::evaluate_function`: nodes go backward in reverse order.
    """
    if not has_one_order(model):
        return largest(*backward)
    # later layers release more than they leave, so that the last of a kind is worst, or the one
    # before it, where the last of all finds nothing gathered. Where they leave more, see
    # `moments.layers_backward_at_depth`
    return largest(
        *(
            layer_backward
            - layer.gathered
            + gathered_after(model, layers, place, of_keys=layer.gathered)
            - after(model, saved, place)
            + after(model, left, place)
            + leaves_behind_keys(model, layers, place)
            + _waiting(model, layers, place)
            for group, layer, layer_backward in zip(model.groups, layers, backward, strict=True)
            for place in [each for each in group.positions if each >= num_idle][-2:]
        )
    )


def gathered_after(
    model: ModelSpec, layers: Sequence[LayerBytes], place: int, *, of_keys: Count = 0
) -> Count:
    """Gradients that layers after `place` have summed, of what earlier ones may read, too.

    Args:
        of_keys: so where layers lend their keys to later ones, unless `place` is the last.

    Kind: exact where kinds of layers read the same. Source: torch 2.13 `InputBuffer::accumulate`.
    """
    if any(keeps_keys(layer) for layer, _ in model.layers()):
        return of_keys if place < model.num_hidden_layers - 1 else 0
    later = [
        layer.gathered
        for group, layer in zip(model.groups, layers, strict=True)
        if any(position > place for position in group.positions)
    ]
    return largest(*later) if later else 0


def leaves_behind_keys(model: ModelSpec, layers: Sequence[LayerBytes], place: int) -> Count:
    """Inputs of reentrant checkpoints, and their gradients, that shared keys hold at `place`.

    The graph of keys that later layers have read ends in a leaf, whose `AccumulateGrad` keeps both;
    the gradient of the layer after `place` is the one that goes on.

    Kind: exact. Source: torch 2.13 `CheckpointFunction.backward`, `detach_variable`.
    """
    leaves = [layer.leaf_behind_held for layer in layers]
    return after(model, leaves, place) + after(model, leaves, place + 1)


def _waiting(model: ModelSpec, layers: Sequence[LayerBytes], place: int) -> Count:
    """Gradients that earlier layers wait for, of keys and values that only later ones have read.

    Where no such layer is at `place` or after it, later layers have still to add to them.
    """
    kept = [
        (position, layer.held_by_later_layers)
        for group, layer in zip(model.groups, layers, strict=True)
        if keeps_keys(group.layer)
        for position in group.positions
    ]
    if all(position < place for position, _ in kept):
        return 0
    return sum(num_bytes for position, num_bytes in kept if position < place)


def after(model: ModelSpec, num_bytes_by_kind: Sequence[Count], place: int) -> Count:
    """The sum of `num_bytes_by_kind` over all layers that stand after `place`.

    Kind: exact. Source: the positions of `LayerGroup`.
    """
    total: Count = 0
    for group, num_bytes in zip(model.groups, num_bytes_by_kind, strict=True):
        total = total + num_bytes * sum(position > place for position in group.positions)
    return total
