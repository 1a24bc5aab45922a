"""From the trace of four layers to the trace of all: the layers in the middle are repeated.

A step passes the layers in sweeps: forwards, backwards, and once per list of tensors that an
optimizer makes. In each sweep the first, the second and the last layer stay as they were traced,
and the third stands for all of the middle, its tensors renamed. What no layer owns stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from whichlora.memory.allocator_simulator import Event

TRACED_LAYERS = 4  # the fewest with a layer in the middle whose neighbours are in the middle too
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_STACK_KEYS = ("num_decoder_layers", "encoder_layers", "decoder_layers")  # of two stacks

_TOLERANCE = 1e-3


class TracedEvent(NamedTuple):
    """A storage is born with `num_bytes`, or dies (None).

    Args:
        layer: the layer whose forward or backward runs; outside of them, the layer that owns the
            storage. None where no layer does.
        inside: whether it happens in a layer's forward or backward.
        moment: "load", "adapters", "forward", "backward" or "optimizer".
        operator: what made the storage.
    """

    storage: int
    num_bytes: int | None
    layer: int | None = None
    inside: bool = False
    moment: str = ""
    operator: str = ""

    @property
    def event(self) -> Event:
        return Event(self.storage, self.num_bytes)


def shallow(model_config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """`model_config` with its first `num_layers` layers only.

    Raises:
        KeyError: the config does not say its depth by one of the usual names.
    """
    config = dict(model_config)
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = shallow(config["text_config"], num_layers)
        return config
    keys = [key for key in (*DEPTH_KEYS, *_STACK_KEYS) if key in config]
    if not keys:
        raise KeyError(DEPTH_KEYS[0])
    depth = config[keys[0]]
    for key in keys:
        config[key] = min(num_layers, config[key])
    if "attention_types" in config:  # GPT-Neo: kinds, and how often they repeat
        kinds = [kind for block, count in config["attention_types"] for kind in block * count]
        config["attention_types"] = [[kinds[:num_layers], 1]]
    for name, value in config.items():
        if isinstance(value, list) and len(value) == depth and depth > 1:
            config[name] = value[:num_layers]
    return config


class DoesNotRepeatError(Exception):
    """No layer of the middle can stand for the others."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A storage by its birth: in which sweep and layer, and the how manieth of that block."""

    sweep: int
    layer: int
    serial: int


def stretch(events: Iterable[TracedEvent], *, num_layers: int) -> list[TracedEvent]:
    """`events` of four layers as if `num_layers` had been traced.

    Raises:
        DoesNotRepeatError: a tensor of one layer has no counterpart in its neighbour.
    """
    if num_layers < TRACED_LAYERS:
        raise ValueError(f"{TRACED_LAYERS} layers can't be stretched to {num_layers}")
    blocks = _blocks(events)
    names: dict[int, _Name] = {}  # by traced storage; what no sweep made keeps its number
    numbers: dict[_Name | int, int] = {}  # by name, of what lives in the result
    next_number = 0
    result: list[TracedEvent] = []
    sweep = index = 0
    while index < len(blocks):
        in_sweep = _is_sweep(blocks[index : index + TRACED_LAYERS])
        found = blocks[index : index + (TRACED_LAYERS if in_sweep else 1)]
        for position, block in enumerate(found):
            births = [one for one in block.events if one.num_bytes is not None]
            if in_sweep:
                for serial, one in enumerate(births):
                    names[one.storage] = _Name(sweep, _layer(block), serial)
            for layer in _targets(block, position, in_sweep, num_layers):
                for one in block.events:
                    name: _Name | int = names.get(one.storage, one.storage)
                    if isinstance(name, _Name):
                        name = _renamed(name, block.layer, layer, num_layers)
                    if one.num_bytes is not None:
                        next_number += 1
                        numbers[name] = next_number
                    elif name not in numbers:
                        raise DoesNotRepeatError(f"{one.moment}: layer {layer} frees what is not")
                    number = numbers[name] if one.num_bytes is not None else numbers.pop(name)
                    result.append(one._replace(storage=number, layer=layer))
        sweep += 1
        index += len(found)
    _check_alike(numbers, num_layers)
    return result


@dataclass(frozen=True, slots=True)
class _Block:
    layer: int | None
    events: tuple[TracedEvent, ...]


def _blocks(events: Iterable[TracedEvent]) -> list[_Block]:
    """Runs of events of one layer and moment, the deaths outside the layers put in order.

    Deaths without a birth between them may come in any order: the allocator ends up the same. A
    table of casts frees in an order of its own, a list of tensors from either end.
    """
    ordered: list[TracedEvent] = []
    for free, run in groupby(events, key=lambda one: not one.inside and one.num_bytes is None):
        found = list(run)
        if free:
            found.sort(key=lambda one: (one.moment, -1 if one.layer is None else one.layer))
        ordered += found
    runs = groupby(ordered, key=lambda one: (one.layer, one.moment))
    return [_Block(layer, tuple(run)) for (layer, _), run in runs]


def _is_sweep(blocks: list[_Block]) -> bool:
    layers = [block.layer for block in blocks]
    upward = list(range(TRACED_LAYERS))
    return layers in (upward, upward[::-1])


def _layer(block: _Block) -> int:
    assert block.layer is not None
    return block.layer


def _targets(block: _Block, position: int, in_sweep: bool, num_layers: int) -> Iterable[int | None]:
    """Layers of the result that `block` is written for, in the order of its sweep."""
    if block.layer is None:
        return (None,)
    if not in_sweep or position != 2:
        return (_edge(block.layer, num_layers),)
    if block.layer == 2:  # upward
        return range(2, num_layers - 1)
    return range(num_layers - 3, 0, -1)


def _edge(layer: int, num_layers: int) -> int:
    """The first two layers count from the start, the last two from the end."""
    return layer if layer < TRACED_LAYERS // 2 else num_layers - TRACED_LAYERS + layer


def _renamed(name: _Name, traced: int | None, layer: int | None, num_layers: int) -> _Name:
    """`name` as a block of `traced` uses it, for its copy in `layer`: neighbours stay so."""
    if traced is None or layer is None or abs(name.layer - traced) > 1:
        return _Name(name.sweep, _edge(name.layer, num_layers), name.serial)
    return _Name(name.sweep, layer + name.layer - traced, name.serial)


def _check_alike(numbers: Iterable[_Name | int], num_layers: int) -> None:
    """What lives on must be alike in all layers of the middle: else one was never freed."""
    left = Counter(
        (name.sweep, name.serial)
        for name in numbers
        if isinstance(name, _Name) and 0 < name.layer < num_layers - 1
    )
    odd = [place for place, count in left.items() if count != num_layers - 2]
    if odd:
        raise DoesNotRepeatError("a tensor of a middle layer lives on in some layers only")


def check_growth(
    few: Iterable[TracedEvent],
    some: Iterable[TracedEvent],
    stretched: Iterable[TracedEvent],
    *,
    num_layers: int,
) -> None:
    """Whether stretching adds per layer what two more layers added: traces of 2 and 4 layers.

    Raises:
        DoesNotRepeatError: the bytes ever born differ by more than 0.1 %.
    """
    at_2, at_4, at_all = (
        sum(one.num_bytes or 0 for one in events) for events in (few, some, stretched)
    )
    expected = at_4 + (num_layers - TRACED_LAYERS) * (at_4 - at_2) / 2
    if abs(at_all / expected - 1) > _TOLERANCE:
        raise DoesNotRepeatError("two more layers add other tensors than the repeated one")


def with_warm_up(events: list[TracedEvent]) -> list[TracedEvent]:
    """`events` after the one block that transformers asks for, and frees, before it loads.

    Source: transformers 5.23 `caching_allocator_warmup`: the bytes of all weights that stay.
    """
    loading = [one for one in events if one.moment == "load"]
    freed = {one.storage for one in loading if one.num_bytes is None}
    total = sum(one.num_bytes or 0 for one in loading if one.storage not in freed)
    birth = TracedEvent(0, total, moment="load", operator="warm-up block")
    return [birth, birth._replace(num_bytes=None), *events]


def live_bytes(events: Iterable[TracedEvent]) -> Iterator[tuple[TracedEvent, int]]:
    """Every event with the bytes alive after it."""
    sizes: dict[int, int] = {}
    total = 0
    for one in events:
        if one.num_bytes is None:
            total -= sizes.pop(one.storage)
        else:
            sizes[one.storage] = one.num_bytes
            total += one.num_bytes
        yield one, total


_PARTS = {"load": "weights", "adapters": "adapters", "optimizer": "optimizer_states"}


def at_peak(events: Iterable[TracedEvent]) -> tuple[str, dict[str, int]]:
    """The moment with most bytes alive, and these bytes by part; what is no weight is "traced"."""
    sizes: dict[int, tuple[str, int]] = {}
    parts: Counter[str] = Counter()
    most, peak, moment = 0, dict[str, int](), ""
    total = 0
    for one in events:
        if one.num_bytes is None:
            part, size = sizes.pop(one.storage)
            parts[part] -= size
            total -= size
            continue
        part = _PARTS.get(one.moment, "traced")
        sizes[one.storage] = part, one.num_bytes
        parts[part] += one.num_bytes
        total += one.num_bytes
        if total > most:
            most, peak, moment = total, dict(parts), one.moment
    return moment, peak
