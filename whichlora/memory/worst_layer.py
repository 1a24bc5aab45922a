"""At which depth a layer's backward is worst, where layers of several kinds alternate.

When a layer goes backward, those after it have given back what they kept and left gradients.
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
    own: Sequence[Count],
    kept: Sequence[Count],
    left: Sequence[Count],
) -> Count:
    """Bytes of the worst backward beside what all layers keep.

    Args:
        own: of one layer of each kind, the gradients that later layers gathered included.
        kept: what one layer of each kind keeps until its backward is done.
        left: gradients of its parameters, which it leaves then.

    Kind: exact. Source: torch 2.13 `Engine::evaluate_function`: nodes go backward in reverse order.
    """
    if not has_one_order(model):
        return largest(*own)
    last = model.num_hidden_layers - 1
    found: list[Count] = []
    for group, layer, one in zip(model.groups, layers, own, strict=True):
        for place in group.positions[-2:]:
            if place == last:  # no later layer has gathered anything yet
                found.append(one - layer.gathered)
            else:
                found.append(one - after(model, kept, place) + after(model, left, place))
    return largest(*found)


def after(model: ModelSpec, each: Sequence[Count], place: int) -> Count:
    """The sum of `each` over all layers that stand after `place`.

    Kind: exact. Source: the positions of `LayerGroup`.
    """
    total: Count = 0
    for group, one in zip(model.groups, each, strict=True):
        total = total + one * sum(other > place for other in group.positions)
    return total
