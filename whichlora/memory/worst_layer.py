"""At which depth a layer's backward is worst, where layers of several kinds alternate.

When a layer goes backward, those after it have released what they saved, and their gradients exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from whichlora.memory.layer_bytes import LayerBytes
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
    gradients: Sequence[Count],
) -> Count:
    """Bytes of the worst backward beside what all layers keep.

    Args:
        backward: of one layer of each kind, the gradients that later layers gathered included.
        saved: what autograd saves of one layer of each kind until its backward is done.
        gradients: of its parameters, which its backward makes.

    Kind: exact. Source: torch 2.13 `Engine::evaluate_function`: nodes go backward in reverse order.
    """
    if not has_one_order(model):
        return largest(*backward)
    last = model.num_hidden_layers - 1
    candidates: list[Count] = []
    for group, layer, layer_backward in zip(model.groups, layers, backward, strict=True):
        for place in group.positions[-2:]:
            if place == last:  # no later layer has gathered anything yet
                candidates.append(layer_backward - layer.gathered)
            else:
                candidates.append(
                    layer_backward - after(model, saved, place) + after(model, gradients, place)
                )
    return largest(*candidates)


def after(model: ModelSpec, num_bytes_by_kind: Sequence[Count], place: int) -> Count:
    """The sum of `num_bytes_by_kind` over all layers that stand after `place`.

    Kind: exact. Source: the positions of `LayerGroup`.
    """
    total: Count = 0
    for group, num_bytes in zip(model.groups, num_bytes_by_kind, strict=True):
        total = total + num_bytes * sum(position > place for position in group.positions)
    return total
