"""Which parameters ZeRO-3 gathers when: the modules of a micro-step in the order they run.

Source: deepspeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter

from whichlora.memory.images import TowerStep
from whichlora.memory.step import TrainingStep
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.numeric import ceil_div
from whichlora.spec.targets import adapted

SMALL, CONTAINER = -1, -2  # keys of modules that have no parameter to gather
Module = tuple[int, int, int]  # layer, key and elements, as of `live_parameters`


@dataclass(frozen=True, slots=True)
class Live:
    """Most gathered elements, or bytes, in a pass or a part of it.

    Args:
        forward: of the text; `seen` and `seen_backward` are of the tower before it.
        kinds: of each of those by its name, how many matrices of each kind are among them.
    """

    forward: int
    seen: int
    seen_backward: int
    loss: int
    last_layer: int
    first_layer: int
    table: int
    backward: int
    total: int
    kinds: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A vision tower before the text.

    Args:
        layers: the first so many are its blocks.
        goes_backward, checkpointed: whether they do, and are made again.
    """

    layers: int = 0
    goes_backward: bool = True
    checkpointed: bool = True


@lru_cache(maxsize=256)
def live_parameters(
    modules: tuple[Module, ...],
    *,
    checkpointed: bool,
    reads_table_again: bool,
    max_live: int,
    max_reuse: int,
    prefetch: int,
    widths: tuple[tuple[int, int], ...] = (),
    kinds: tuple[tuple[int, int], ...] = (),
    seen: Seen | None = None,
) -> Live:
    """Elements of gathered parameters through one micro-step.

    Args:
        modules: layer (-1 before, and the number of layers after them), key and elements of each
            module in the order of the forward; a tied table has one key, modules without large
            parameters have `SMALL` or, where they contain those after them, `CONTAINER`.
        reads_table_again: the embedding's backward runs.
        widths: bytes of an element by key, to count bytes in the place of elements.
        kinds: number of the kind by key, of keys that are to be counted.
        seen: the first layers are those of a tower; None: none of them.

    Kind: exact in the order of the given modules. Source: `gathers`.
    """
    forward = list(modules)
    seen = seen or Seen()
    trace = trace_of(
        modules, checkpointed=checkpointed, reads_table_again=reads_table_again, seen=seen
    )
    gathered = _Gathered(dict(widths), dict(kinds))
    by_step: list[_Held] = []
    for added, released in gathers(trace, max_live, max_reuse, prefetch):
        for key, size in added:
            gathered.add(key, size)
        by_step.append(gathered.held)
        if released is not None:
            gathered.release(released)
    width_of = dict(widths)
    sizes = {key: size * width_of.get(key, 1) for _, key, size in forward if key >= 0}
    return _peaks(trace, by_step, len(forward), sum(sizes.values()), seen.layers)


def trace_of(
    modules: Sequence[Module], *, checkpointed: bool, reads_table_again: bool, seen: Seen
) -> list[Module]:
    """Modules in the order of a micro-step: the forward, then the backward."""
    forward = list(modules)
    once = 0 if seen.checkpointed else seen.layers
    backward = _backward_order(forward, checkpointed=checkpointed, once=once)
    if not reads_table_again:
        backward = [step for step in backward if step[0] >= 0]
    if not seen.goes_backward:
        backward = [step for step in backward if not 0 <= step[0] < seen.layers]
    return forward + backward


def gathers(
    trace: Sequence[Module], max_live: int, max_reuse: int, prefetch: int
) -> Iterator[tuple[list[tuple[int, int]], int | None]]:
    """What each module of `trace` gathers: keys and elements, its own first; the key it releases.

    Kind: exact in this order, but for the first micro-step, which gathers nothing ahead. Source:
    deepspeed 0.19.8 `PartitionedParameterCoordinator`: `fetch_sub_module`, `__params_to_release`.
    """
    starts = [0, *accumulate(size for _, _, size in trace)]
    following = _next_uses(trace)
    held: dict[int, int] = {}
    elements = ahead = 0
    for index, (_, key, size) in enumerate(trace):
        added: list[tuple[int, int]] = []
        if key >= 0 and key not in held:
            added.append((key, size))
            held[key] = size
            elements += size
        ahead = max(ahead, index + 1)
        most = elements + min(max_live - elements, prefetch)
        while ahead < len(trace) and elements < most:
            _, next_key, next_size = trace[ahead]
            if next_key >= 0 and next_key not in held:
                added.append((next_key, next_size))
                held[next_key] = next_size
                elements += next_size
            ahead += 1
        again = following[index]
        skipped = again is not None and again < ahead
        near = again is not None and starts[again] - starts[index + 1] < max_reuse
        stays = key < 0 or skipped or near
        yield added, None if stays else key
        if not stays:
            elements -= held.pop(key)


_Held = tuple[int, tuple[int, ...]]  # bytes, or elements; how many matrices of each kind


class _Gathered:
    """What is gathered at one step of `live_parameters`, which says what `widths` and `kinds` are.

    `held` is a new value only where something is gathered or released: most steps do neither.
    """

    def __init__(self, widths: Mapping[int, int], kinds: Mapping[int, int]) -> None:
        self._widths, self._kinds = widths, kinds
        self._sizes: dict[int, int] = {}
        self._counts = [0] * (1 + max(kinds.values(), default=-1))
        self.elements = 0
        self.held: _Held = 0, tuple(self._counts)

    def add(self, key: int, size: int) -> None:
        if key not in self._sizes:
            self._sizes[key] = size
            self._change(key, size, 1)

    def release(self, key: int) -> None:
        self._change(key, -self._sizes.pop(key), -1)

    def _change(self, key: int, elements: int, number: int) -> None:
        self.elements += elements
        num_held, counts = self.held
        if key in self._kinds:
            self._counts[self._kinds[key]] += number
            counts = tuple(self._counts)
        self.held = num_held + elements * self._widths.get(key, 1), counts


def _peaks(
    trace: Sequence[tuple[int, int, int]],
    by_step: Sequence[_Held],
    num_forward: int,
    total: int,
    first: int,
) -> Live:
    """The largest of `by_step` in each part of `trace`, which begins with the forward."""
    last = max(layer for layer, _, _ in trace)
    none = 0, (0,) * len(by_step[0][1])
    of_layer: dict[int, _Held] = {}  # in the backward, whose layers come one after the other
    for (layer, _, _), held in zip(trace[num_forward:], by_step[num_forward:], strict=True):
        if layer not in of_layer or held[0] > of_layer[layer][0]:
            of_layer[layer] = held
    deepest = max((layer for layer in of_layer if 0 <= layer < last), default=last)
    in_forward = [(0 <= step[0] < first, held) for step, held in zip(trace, by_step, strict=True)]
    peaks = {
        "forward": _most((h for seen, h in in_forward[:num_forward] if not seen), none),
        "seen": _most((h for seen, h in in_forward[:num_forward] if seen), none),
        "seen_backward": _most((h for layer, h in of_layer.items() if 0 <= layer < first), none),
        "loss": by_step[num_forward - 1],
        "last_layer": of_layer.get(deepest, none),
        "first_layer": of_layer.get(first, none),
        "table": of_layer.get(-1, none),
        "backward": _most(of_layer.values(), none),
    }
    return Live(
        **{name: found[0] for name, found in peaks.items()},
        total=total,
        kinds={name: found[1] for name, found in peaks.items()},
    )


def _most(found: Iterable[_Held], none: _Held) -> _Held:
    return max(found, key=itemgetter(0), default=none)


def _backward_order(
    forward: Sequence[tuple[int, int, int]], *, checkpointed: bool, once: int
) -> list[tuple[int, int, int]]:
    order: list[tuple[int, int, int]] = []
    by_layer: dict[int, list[tuple[int, int, int]]] = {}
    for module in forward:
        by_layer.setdefault(module[0], []).append(module)
    last = max(by_layer)
    for layer in sorted(by_layer, reverse=True):
        of_layer = by_layer[layer]
        if checkpointed and once <= layer < last:
            order += of_layer  # made again
        order += [module for module in of_layer if module[1] == CONTAINER]
        order += [module for module in reversed(of_layer) if module[1] != CONTAINER]
    return order


def _next_uses(trace: Sequence[tuple[int, int, int]]) -> list[int | None]:
    seen: dict[int, int] = {}
    following: list[int | None] = [None] * len(trace)
    for index in range(len(trace) - 1, -1, -1):
        key = trace[index][1]
        following[index] = seen.get(key)
        seen[key] = index
    return following


def gathered_modules(step: TrainingStep) -> tuple[tuple[int, int, int], ...]:
    """Modules of the forward as `live_parameters` takes them: each gathers ahead when it begins.

    4-bit matrices are vectors of bytes, with two codes each.

    Kind: exact of layers with one attention and one MLP. Source: transformers 5.23
    `LlamaForCausalLM`; deepspeed 0.19.8 `_register_deepspeed_module` hooks every module.
    """
    model = step.model
    modules = [(-1, CONTAINER, 0)] * (2 if step.method.trains_base else 4)
    text = [(-1, key, int(table.num_params)) for key, table in enumerate(model.embeddings)]
    text.append((-1, SMALL, 0))  # rotary embedding
    tower = _tower_modules(step)
    attended = model.tower is not None and model.tower.attended
    modules += [*tower, *text] if attended else [*text, *tower]
    key = len(model.embeddings)
    place = seen_of(step).layers
    for group in model.groups:
        in_layer = _layer_modules(step, group.layer)
        step_of_key = int(not group.shared)
        for _ in range(group.count):
            modules += [
                (place, kind if kind < 0 else key + kind * step_of_key, size)
                for kind, size in in_layer
            ]
            key += len(group.layer.linears) * step_of_key
            place += 1
    modules.append((place, SMALL, 0))
    if model.head is not None:
        head_key = 0 if model.head_tied else key
        modules.append((place, head_key, int(model.head.num_weights)))
    return tuple(modules)


def seen_of(step: TrainingStep) -> Seen:
    """The tower of `step`, whose blocks come before the layers of the text."""
    tower = step.model.tower
    if tower is None:
        return Seen()
    return Seen(
        layers=tower.stack.num_hidden_layers,
        goes_backward=TowerStep.of(step, tower).goes_backward,
        checkpointed=step.remakes_tower,
    )


def _first_tower_key(step: TrainingStep) -> int:
    """Behind those of the text and of its head."""
    in_text = sum(len(g.layer.linears) * (1 if g.shared else g.count) for g in step.model.groups)
    return len(step.model.embeddings) + in_text + 1


def _tower_modules(step: TrainingStep) -> list[tuple[int, int, int]]:
    """What embeds the patches, the blocks, and the matrices behind the last one.

    Kind: estimate: kernels and tables beside the blocks are one module.
    """
    tower = step.model.tower
    if tower is None:
        return []
    key, place = _first_tower_key(step), 0
    modules = [(0, key, int(tower.stack.other_params))]
    key += 1
    for group in tower.stack.groups:
        in_layer = _layer_modules(step, group.layer)
        for _ in range(group.count):
            modules += [(place, kind if kind < 0 else key + kind, size) for kind, size in in_layer]
            key += len(group.layer.linears)
            place += 1
    for linear in tower.stack.head_linears:
        modules.append((place - 1, key, int(linear.num_weights)))
        key += 1
    return modules


def _layer_modules(step: TrainingStep, layer: Layer) -> list[tuple[int, int]]:
    """Elements of each module of one layer, after the number of its matrix, or what else it is."""
    in_attention = sum(len(attention.linears) for attention in layer.attentions)
    modules = [(CONTAINER, 0), (SMALL, 0), (SMALL, 0)]
    for number, linear in enumerate(layer.linears):
        if number == in_attention:
            modules += [(SMALL, 0), (CONTAINER, 0)]
        elif number == in_attention + 1:
            modules.append((SMALL, 0))  # activation
        around = 0 if step.method.trains_base else int(linear.name in step.targets)
        modules += [(SMALL, 0)] * around
        elements = int(linear.num_weights)
        codes = is_quantised(linear, step.dtypes)
        modules.append((number, ceil_div(elements, 2) if codes else elements))
        modules += [(SMALL, 0)] * (3 * around)  # dropout, A and B
    return modules


def element_widths(step: TrainingStep) -> tuple[tuple[int, int], ...]:
    """Bytes of an element of each key of `gathered_modules`.

    Kind: exact. Source: bitsandbytes 0.50.2 `Params4bit`, whose codes are bytes.
    """
    width = step.dtypes.base_bytes
    key = len(step.model.embeddings)
    widths = [(table, width) for table in range(key)]
    for group in step.model.groups:
        of_layer = [
            1 if is_quantised(linear, step.dtypes) else width for linear in group.layer.linears
        ]
        for _ in range(group.count):
            for each in of_layer:
                widths.append((key, each))
                key += not group.shared
    return (*widths, (key, width), *_tower_widths(step))


def _tower_widths(step: TrainingStep) -> Iterator[tuple[int, int]]:
    tower, width = step.model.tower, step.dtypes.base_bytes
    if tower is None:
        return
    linears = [linear for g in tower.stack.groups for linear in g.layer.linears * g.count]
    every: list[Linear | None] = [None, *linears, *tower.stack.head_linears]
    for key, linear in enumerate(every, start=_first_tower_key(step)):
        codes = linear is not None and is_quantised(linear, step.dtypes)
        yield key, 1 if codes else width


def adapted_kinds(step: TrainingStep) -> tuple[Linear, ...]:
    """Matrices of each distinct layer that have adapters."""
    if step.method.trains_base:
        return ()
    return tuple(
        linear for group in step.model.groups for linear in adapted(group.layer, step.targets)
    )


def adapted_keys(step: TrainingStep) -> tuple[tuple[int, int], ...]:
    """The place in `adapted_kinds` of each key of `gathered_modules` whose matrix is adapted."""
    kinds: list[tuple[int, int]] = []
    key, first = len(step.model.embeddings), 0
    for group in step.model.groups:
        of_layer = () if step.method.trains_base else adapted(group.layer, step.targets)
        places = [
            first + of_layer.index(linear) if linear in of_layer else None
            for linear in group.layer.linears
        ]
        for _ in range(group.count):
            for place in places:
                if place is not None:
                    kinds.append((key, place))
                key += not group.shared
        first += len(of_layer)
    return tuple(kinds)
