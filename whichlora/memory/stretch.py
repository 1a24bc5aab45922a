"""From the trace of a few layers to the trace of all: the layers in the middle are repeated.

A step passes the layers in sweeps: forwards, backwards, and once per list that the optimizer
makes. In each sweep the first and the last layers stay as they were traced, and one of the middle
stands for all of the middle, its tensors renamed. What no layer owns stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from whichlora.memory.replay import Event

TRACED_LAYERS = 4  # the fewest with a middle whose neighbours lie in the middle too


class TracedEvent(NamedTuple):
    """A storage is born with `num_bytes`, or dies (None).

    Args:
        layer: the layer whose forward or backward runs; outside of them, the layer that owns the
            storage. None where no layer does.
        inside: whether it happens in a layer's forward or backward.
        moment: "load", "forward", "backward" or "optimizer".
        operator: what made the storage.
    """

    storage: int
    num_bytes: int | None
    layer: int | None
    inside: bool
    moment: str
    operator: str = ""

    @property
    def event(self) -> Event:
        return Event(self.storage, self.num_bytes)


class DoesNotRepeatError(Exception):
    """The layers in the middle are not alike."""


# A storage by the place of its birth: (layer, number of the sweep, number within the block), or
# its own number where no sweep made it.
_Name = tuple[int, int, int] | tuple[int]


@dataclass(slots=True)
class _Block:
    layer: int | None
    events: list[TracedEvent]
    sweep: int = -1


@dataclass(slots=True)
class _Names:
    of: dict[int, _Name] = field(default_factory=dict)  # by traced storage
    numbers: dict[_Name, int] = field(default_factory=dict)  # alive in the result
    next_number: int = 0

    def born(self, name: _Name) -> int:
        self.next_number += 1
        self.numbers[name] = self.next_number
        return self.next_number

    def died(self, name: _Name) -> int:
        number = self.numbers.pop(name, None)
        if number is None:
            raise DoesNotRepeatError("a layer frees a tensor that its neighbour never made")
        return number


def stretch(
    events: Iterable[TracedEvent], *, traced_layers: int, num_layers: int
) -> list[TracedEvent]:
    """`events` as if `num_layers` layers had been traced, not `traced_layers`.

    Raises:
        DoesNotRepeatError: the middle layers differ, so that none can stand for the others.
    """
    if traced_layers < TRACED_LAYERS or num_layers < traced_layers:
        raise ValueError(f"can't stretch {traced_layers} layers to {num_layers}")
    blocks = _blocks(events)
    _number_sweeps(blocks, traced_layers)
    names = _Names()
    stretched: list[TracedEvent] = []
    for sweep, found in groupby(blocks, key=lambda block: block.sweep):
        for block in found:
            for serial, event in enumerate(block.events):
                if event.num_bytes is not None:
                    in_sweep = sweep >= 0 and block.layer is not None
                    place = (block.layer or 0, sweep, serial)
                    names.of[event.storage] = place if in_sweep else (event.storage,)
            for layer in _copies(block, traced_layers, num_layers):
                stretched.extend(_copy(block, layer, names, traced_layers, num_layers))
    return stretched


def _blocks(events: Iterable[TracedEvent]) -> list[_Block]:
    """Runs of events of one layer and moment, with the deaths of each run put in order.

    Deaths without a birth between them may come in any order: the allocator ends up the same.
    A table of casts or a Python list frees in an order of its own.
    """
    ordered: list[TracedEvent] = []
    for free, run in groupby(events, key=lambda one: not one.inside and one.num_bytes is None):
        ordered.extend(
            sorted(run, key=lambda one: -1 if one.layer is None else one.layer) if free else run
        )
    return [
        _Block(layer, list(found))
        for (layer, _), found in groupby(ordered, key=lambda one: (one.layer, one.moment))
    ]


def _number_sweeps(blocks: list[_Block], traced_layers: int) -> None:
    ascending = list(range(traced_layers))
    number = index = 0
    while index < len(blocks):
        window = blocks[index : index + traced_layers]
        layers = [block.layer for block in window]
        if layers in (ascending, ascending[::-1]):
            middle = (window[1].events, window[2].events)
            sizes = [[one.num_bytes for one in events if one.num_bytes] for events in middle]
            if sizes[0] != sizes[1]:
                raise DoesNotRepeatError("two layers of the middle make different tensors")
            for block in window:
                block.sweep = number
            if layers != ascending:
                # seen from the end of the sweep, the second block is the one that has settled
                window[1].sweep = number
            number += 1
            index += traced_layers
            continue
        if layers[0] is not None and 0 < layers[0] < traced_layers - 1 and traced_layers > 4:
            raise DoesNotRepeatError("a layer of the middle does something alone")
        index += 1


def _copies(block: _Block, traced_layers: int, num_layers: int) -> Iterator[int | None]:
    raise NotImplementedError


def _copy(
    block: _Block, layer: int | None, names: _Names, traced_layers: int, num_layers: int
) -> Iterator[TracedEvent]:
    raise NotImplementedError


_ = replace
