"""Stretch the trace of four layers to all layers: the layers in the middle are repeated.

A step passes the layers in sweeps: forwards, backwards, and once per list of tensors that an
optimizer makes. In each sweep the first, the second and the last layer stay as traced. The third
is repeated for all middle layers, its tensors renamed. Tensors without a layer stay as traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from whichlora.memory.allocator_simulator import Event

TRACED_LAYERS = 4  # the fewest with a layer in the middle whose neighbours are in the middle too
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_STACK_KEYS = ("num_decoder_layers", "encoder_layers", "decoder_layers")  # of two stacks
_KINDS_KEY = "layers_block_type"  # Nemotron 3 lists what its layers are, and no depth

_TOLERANCE = 1e-3


class TracedEvent(NamedTuple):
    """A storage is born with `num_bytes`, or dies (None).

    Args:
        layer: the layer whose forward or backward runs; outside of both, the layer that owns the
            storage, or None.
        inside: whether it happens in a layer's forward or backward.
        moment: "load", "adapters", "forward", "backward" or "optimizer".
        operator: the operator that made the storage.
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
    if not keys and isinstance(config.get(_KINDS_KEY), list):
        config[_KINDS_KEY] = config[_KINDS_KEY][:num_layers]
        return config
    if not keys:
        raise KeyError(DEPTH_KEYS[0])
    depth = config[keys[0]]
    for key in keys:
        config[key] = min(num_layers, config[key])
    if config.get("num_kv_shared_layers"):  # Gemma's last layers, which read keys of earlier ones
        left_out = max(depth - num_layers, 0)
        config["num_kv_shared_layers"] = max(config["num_kv_shared_layers"] - left_out, 0)
    if "attention_types" in config:  # GPT-Neo: kinds, and how often they repeat
        kinds = [kind for block, count in config["attention_types"] for kind in block * count]
        config["attention_types"] = [[kinds[:num_layers], 1]]
    for name, value in config.items():
        if isinstance(value, list) and len(value) == depth and depth > 1:
            config[name] = value[:num_layers]
    return config


class DoesNotRepeatError(Exception):
    """No middle layer can represent the others."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A storage by its birth: the sweep, the layer, and the number within that block."""

    sweep: int
    layer: int
    serial: int


def stretch(events: Iterable[TracedEvent], *, num_layers: int) -> list[TracedEvent]:
    """`events` of four layers as if `num_layers` had been traced.

    Raises:
        DoesNotRepeatError: a tensor of one layer has no counterpart in its neighbour, or a layer
            is passed over, as those that attend to images are without any.
    """
    events = list(events)
    if {event.layer for event in events if event.inside} != set(range(TRACED_LAYERS)):
        raise DoesNotRepeatError("a layer is passed over")
    if num_layers < TRACED_LAYERS:
        raise ValueError(f"{TRACED_LAYERS} layers can't be stretched to {num_layers}")
    blocks = _blocks(events)
    names: dict[int, _Name] = {}  # by traced storage; others keep their number
    numbers: dict[_Name | int, int] = {}  # by name, of the storages alive in the result
    next_number = 0
    stretched: list[TracedEvent] = []
    sweep = index = 0
    while index < len(blocks):
        in_sweep = _is_sweep(blocks[index : index + TRACED_LAYERS])
        sweep_blocks = blocks[index : index + (TRACED_LAYERS if in_sweep else 1)]
        for position, block in enumerate(sweep_blocks):
            births = [event for event in block.events if event.num_bytes is not None]
            if in_sweep:
                for serial, birth in enumerate(births):
                    names[birth.storage] = _Name(sweep, _layer(block), serial)
            for layer in _targets(block, position, in_sweep, num_layers):
                for event in block.events:
                    name: _Name | int = names.get(event.storage, event.storage)
                    if isinstance(name, _Name):
                        name = _renamed(name, block.layer, layer, num_layers)
                    if event.num_bytes is not None:
                        next_number += 1
                        numbers[name] = next_number
                    elif name not in numbers:
                        raise DoesNotRepeatError(f"{event.moment}: layer {layer} frees what is not")
                    number = numbers[name] if event.num_bytes is not None else numbers.pop(name)
                    stretched.append(event._replace(storage=number, layer=layer))
        sweep += 1
        index += len(sweep_blocks)
    _check_alike(numbers, num_layers)
    return stretched


@dataclass(frozen=True, slots=True)
class _Block:
    layer: int | None
    events: tuple[TracedEvent, ...]


def _blocks(events: Iterable[TracedEvent]) -> list[_Block]:
    """Runs of events of one layer and moment, with the deaths outside the layers sorted.

    Deaths without a birth between them may come in any order: the allocator ends up the same.
    Autocast's cache of casts frees in its own order, a list of tensors from either end.
    """
    ordered: list[TracedEvent] = []
    for are_deaths, run in groupby(events, key=lambda e: not e.inside and e.num_bytes is None):
        run_events = list(run)
        if are_deaths:
            run_events.sort(key=lambda e: (e.moment, -1 if e.layer is None else e.layer))
        ordered += run_events
    runs = groupby(ordered, key=lambda event: (event.layer, event.moment))
    return [_Block(layer, tuple(run)) for (layer, _), run in runs]


def _is_sweep(blocks: list[_Block]) -> bool:
    layers = [block.layer for block in blocks]
    upward = list(range(TRACED_LAYERS))
    return layers in (upward, upward[::-1])


def _layer(block: _Block) -> int:
    assert block.layer is not None
    return block.layer


def _targets(block: _Block, position: int, in_sweep: bool, num_layers: int) -> Iterable[int | None]:
    """Layers of the stretched trace that repeat `block`, in the order of its sweep."""
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
    """`name` as used in layer `traced`, for the copy in `layer`; neighbours move along."""
    if traced is None or layer is None or abs(name.layer - traced) > 1:
        return _Name(name.sweep, _edge(name.layer, num_layers), name.serial)
    return _Name(name.sweep, layer + name.layer - traced, name.serial)


def _check_alike(numbers: Iterable[_Name | int], num_layers: int) -> None:
    """Check that all middle layers keep the same tensors, so that none was never freed."""
    alive = Counter(
        (name.sweep, name.serial)
        for name in numbers
        if isinstance(name, _Name) and 0 < name.layer < num_layers - 1
    )
    odd = [place for place, count in alive.items() if count != num_layers - 2]
    if odd:
        raise DoesNotRepeatError("a tensor of a middle layer lives on in some layers only")


def check_growth(
    few: Iterable[TracedEvent],
    some: Iterable[TracedEvent],
    stretched: Iterable[TracedEvent],
    *,
    num_layers: int,
) -> None:
    """Check that stretching adds the same bytes per layer as two more traced layers add.

    Raises:
        DoesNotRepeatError: the bytes ever born differ by more than 0.1 %.
    """
    at_2, at_4, at_all = (
        sum(event.num_bytes or 0 for event in events) for events in (few, some, stretched)
    )
    expected = at_4 + (num_layers - TRACED_LAYERS) * (at_4 - at_2) / 2
    if abs(at_all / expected - 1) > _TOLERANCE:
        raise DoesNotRepeatError("two more layers add other tensors than the repeated one")


def with_warm_up(events: list[TracedEvent]) -> list[TracedEvent]:
    """`events` after the one block that transformers asks for, and frees, before it loads.

    Source: transformers 5.23 `caching_allocator_warmup`: the bytes of all weights that stay.
    """
    loading = [event for event in events if event.moment == "load"]
    freed = {event.storage for event in loading if event.num_bytes is None}
    total = sum(event.num_bytes or 0 for event in loading if event.storage not in freed)
    birth = TracedEvent(0, total, moment="load", operator="warm-up block")
    return [birth, birth._replace(num_bytes=None), *events]


_PARTS = {"load": "weights", "adapters": "adapters", "optimizer": "optimizer_states"}


def at_peak(events: Iterable[TracedEvent]) -> tuple[str, dict[str, int]]:
    """The moment with the most live bytes, and these bytes by part.

    Storages other than weights, adapters and optimizer states are "traced".
    """
    sizes: dict[int, tuple[str, int]] = {}
    parts: Counter[str] = Counter()
    most, peak, moment = 0, dict[str, int](), ""
    total = 0
    for event in events:
        if event.num_bytes is None:
            part, size = sizes.pop(event.storage)
            parts[part] -= size
            total -= size
            continue
        part = _PARTS.get(event.moment, "traced")
        sizes[event.storage] = part, event.num_bytes
        parts[part] += event.num_bytes
        total += event.num_bytes
        if total > most:
            most, peak, moment = total, dict(parts), event.moment
    return moment, peak
