"""Births and deaths of tensors in order, and the blocks of a model that make them.

A block is what `symbolic` writes of it; a list has the blocks of one run, with its bytes.
`memory.allocator_simulator` replays it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.memory.allocator_simulator import SMALL_BYTES, Allocator, Requests, rounded
from whichlora.memory.exllama import scratch_bytes
from whichlora.memory.weights import linear_bytes, quantised_matrices, quantised_parts, weight_bytes
from whichlora.spec.architecture import ModelSpec, layers_in_order, parts_of
from whichlora.spec.dtypes import Dtypes, is_quantised, quantises_head
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.symbolic.graph import TapeEvent
from whichlora.symbolic.layer import BlockEvents
from whichlora.symbolic.linear_form import NOTHING, LinearForm, evaluate

_SCALAR_BYTES = 8  # of a loss and its gradients, at most


def block_bytes(num_bytes: int) -> int:
    """Bytes of the block that serves a request. Kind: exact. Source: `rounded`."""
    return rounded(num_bytes) if num_bytes > 0 else 0  # an empty tensor takes nothing


class Chunk:
    """Births and deaths of one block in a row, and what they change.

    Args:
        changes: tensors, and their bytes: positive at the birth, negative at the death.

    Attributes:
        large: those that are no small requests: tensor and bytes, or None where it dies.
        change, small_change: bytes alive at the end, beyond those at the start.
        most, large_most, small_most: the most bytes alive, beyond those at the start.
    """

    __slots__ = ("change", "large", "large_most", "most", "small_change", "small_most")

    def __init__(self, changes: Iterable[tuple[int, int]]) -> None:
        self.large: Requests = []
        self.change = self.small_change = self.most = self.large_most = self.small_most = 0
        for tensor, change in changes:
            self.change += change
            if -SMALL_BYTES <= change <= SMALL_BYTES:
                self.small_change += change
                if self.small_change > self.small_most:
                    self.small_most = self.small_change
            else:
                self.large.append((tensor, change if change > 0 else None))
                if self.change - self.small_change > self.large_most:
                    self.large_most = self.change - self.small_change
            if self.change > self.most:
                self.most = self.change


class EventList:
    """Large requests in order; small ones, which have a pool of their own, as a running sum.

    Attributes:
        plays: large requests of every chunk that has any, and the number of its first tensor.
        aside: those of another stream, whose blocks lie in segments of their own.
        peak_bytes, large_peak_bytes, small_peak_bytes: the most bytes alive at once, of all
            tensors, of large ones in `plays`, of small ones.
        workspace_bytes: of workspaces, which are born and stay.
        skips_steps: decoding steps are left out.
        num_early: of `plays`, after which most runs reserve nothing more; None where no such is
            known.
    """

    def __init__(self) -> None:
        self.plays: list[tuple[Requests, int]] = []
        self.aside: list[tuple[Requests, int]] = []
        self.peak_bytes = self.large_peak_bytes = self.small_peak_bytes = 0
        self.workspace_bytes = 0
        self.skips_steps = False
        self.num_early: int | None = None
        self._live_bytes = self._small_bytes = self._aside_bytes = 0
        self._next = 0
        self._sizes: dict[int, int] = {}
        self._single: dict[int, Chunk] = {}  # births and deaths of one tensor, by their bytes

    def __eq__(self, other: object) -> bool:
        """Whether the large requests of both are the same, in the same order."""
        return (
            isinstance(other, EventList) and self.plays == other.plays and self.aside == other.aside
        )

    def __hash__(self) -> int:
        return hash((len(self.plays), self.large_peak_bytes))

    @property
    def events(self) -> list[tuple[int, int | None]]:
        """Number of a tensor, and its bytes at its birth or None at its death."""
        return [
            (first + tensor, size) for requests, first in self.plays for tensor, size in requests
        ]

    def numbers(self, count: int) -> int:
        """The first of `count` numbers that nobody has."""
        first = self._next
        self._next += count
        return first

    def born(self, num_bytes: int) -> int:
        """The number of a new tensor."""
        number = self.numbers(1)
        self.start(number, block_bytes(num_bytes))
        return number

    def workspace_after(self, tensor: int, num_bytes: int) -> dict[int, int]:
        """Bytes of a workspace, by the number that it gets in a block; it is born once."""
        self.workspace_bytes += num_bytes
        return {tensor: block_bytes(num_bytes)}

    def start(self, number: int, size: int) -> None:
        self._sizes[number] = size
        self._play_single(size, number)

    def die(self, *numbers: int) -> None:
        for number in numbers:
            self._play_single(-self._sizes.pop(number), number)

    def _play_single(self, change: int, number: int) -> None:
        chunk = self._single.get(change)
        if chunk is None:
            chunk = self._single[change] = Chunk([(0, change)])
        self.play(chunk, number)

    def stay(self, sizes: Iterable[int], times: int = 1) -> None:
        """Births of tensors that live to the end, so many times."""
        blocks = [block_bytes(size) for size in sizes]
        self.play_again(Chunk(enumerate(blocks)), len(blocks), times)

    def pass_by(self, sizes: Iterable[int]) -> None:
        """Births of tensors, then their deaths."""
        blocks = list(enumerate(block_bytes(size) for size in sizes))
        deaths = [(tensor, -size) for tensor, size in blocks]
        self.play(Chunk(blocks + deaths), self.numbers(len(blocks)))

    def play_again(self, chunk: Chunk, num_tensors: int, times: int) -> None:
        """Play `chunk` so many times, its `num_tensors` tensors being others each time."""
        for _ in range(times):
            self.play(chunk, self.numbers(num_tensors))

    def play(self, chunk: Chunk, first: int) -> None:
        """Add the events of `chunk`, whose tensors are numbered from `first` on."""
        if chunk.large:
            self.plays.append((chunk.large, first))
        large = self._live_bytes - self._small_bytes - self._aside_bytes
        if large + chunk.large_most > self.large_peak_bytes:
            self.large_peak_bytes = large + chunk.large_most
        self._count(chunk)

    def born_aside(self, num_bytes: int) -> Callable[[], None]:
        """A tensor of another stream; what frees it."""
        number, size = self.numbers(1), block_bytes(num_bytes)
        self.play_aside([(number, size)])
        return lambda: self.play_aside([(number, -size)])

    def play_aside(self, changes: Iterable[tuple[int, int]]) -> None:
        """Add births and deaths in another stream, of tensors by their numbers."""
        chunk = Chunk(changes)
        if chunk.large:
            self.aside.append((chunk.large, 0))
        self._aside_bytes += chunk.change - chunk.small_change
        self._count(chunk)

    def let_go_aside(self, number: int, size: int) -> Callable[[], None]:
        """The death of a tensor that another stream still reads: it is no longer counted.

        Returns:
            gives its block back, once the kernels are done.

        Kind: exact. Source: torch 2.13 `CUDACachingAllocator.cpp`, `free`, `insert_events`.
        """
        chunk = Chunk([(number, -size)])
        self._aside_bytes += chunk.change - chunk.small_change
        self._count(chunk)
        return lambda: self.aside.append((chunk.large, 0)) if chunk.large else None

    def _count(self, chunk: Chunk) -> None:
        live, small = self._live_bytes, self._small_bytes
        if live + chunk.most > self.peak_bytes:
            self.peak_bytes = live + chunk.most
        if small + chunk.small_most > self.small_peak_bytes:
            self.small_peak_bytes = small + chunk.small_most
        self._live_bytes += chunk.change
        self._small_bytes += chunk.small_change


class Sizes:
    """Bytes of the tensors of one kind of block, in blocks of the allocator.

    Args:
        fixed: of tensors that are not as large as their form says.
    """

    def __init__(self, fixed: Mapping[int, int], **sizes: int) -> None:
        self._fixed = fixed
        self._sizes = sizes
        self._by_form: dict[LinearForm, int] = {}
        self.by_tensor: dict[int, int] = {}

    def note(self, tensor: int, form: LinearForm) -> None:
        if form not in self._by_form:
            num_bytes = evaluate(form, **self._sizes)
            self._by_form[form] = block_bytes(num_bytes)
        self.by_tensor[tensor] = self._fixed.get(tensor, self._by_form[form])


class Pass:
    """A forward or a backward of one block.

    Args:
        streams: tensors that other blocks hold, too, and gradients that a hook reads.
        kept: tensors that die later than the block says.
        pieces: into how many parts of as many events the rest is cut, for what comes between.

    Attributes:
        parts: changes of the block's own tensors in chunks, and of streams between them.
    """

    def __init__(
        self,
        events: Iterable[TapeEvent],
        sizes: Sizes,
        *,
        streams: frozenset[int],
        kept: frozenset[int],
        pieces: int = 1,
    ) -> None:
        self.parts: list[Chunk | tuple[int, int]] = []
        inside: list[tuple[int, int]] = []
        events = tuple(events)
        most = -(-len(events) // pieces)
        for tensor, form in events:
            if len(inside) == most and pieces > 1:
                self.parts.append(Chunk(inside))
                inside = []
            if form is not None:
                sizes.note(tensor, form)
            elif tensor in kept:
                continue
            size = sizes.by_tensor[tensor]
            change = tensor, -size if form is None else size
            if tensor in streams:
                self.parts += [Chunk(inside), change]
                inside = []
            else:
                inside.append(change)
        self.parts.append(Chunk(inside))


class Block:
    """One kind of block with the bytes of one run; `fixed` as of `Sizes`.

    Args:
        hooks: somebody is told of each gradient that autograd accumulates (`BlockPlayer._hook`).
        pieces: as of `Pass`.
    """

    def __init__(
        self,
        events: BlockEvents,
        sizes: Mapping[str, int],
        *,
        input_bytes: int,
        result_bytes: int,
        fixed: Mapping[int, int] | None = None,
        hooks: bool = False,
        pieces: int = 1,
    ) -> None:
        self.events = events
        self.sizes = Sizes(fixed or {}, **sizes)
        self.sizes.by_tensor |= {0: input_bytes, events.result_gradient: result_bytes}
        gradient = events.input_gradient
        ends = (0, events.result, events.result_gradient, *([] if gradient is None else [gradient]))
        hooked = events.summed if hooks else ()
        streams = frozenset((*ends, *events.in_cache, *hooked))
        self.forward = Pass(
            events.forward, self.sizes, streams=streams, kept=frozenset(), pieces=pieces
        )
        # the death of a checkpointed block's input is that of the checkpoint's frame
        kept = events.hidden - ({0} - events.saved)
        self.backward = Pass(events.backward, self.sizes, streams=streams, kept=kept, pieces=pieces)
        self._deaths: dict[tuple[int, ...], Chunk] = {}

    def deaths(self, tensors: tuple[int, ...]) -> Chunk:
        """What frees `tensors`, for all instances of the block."""
        if tensors not in self._deaths:
            sizes = self.sizes.by_tensor
            self._deaths[tensors] = Chunk([(tensor, -sizes[tensor]) for tensor in tensors])
        return self._deaths[tensors]


@dataclass(slots=True)
class Instance:
    """One block of a step: the numbers of its tensors, and of those that it shares."""

    block: Block
    first: int
    streams: dict[int, int]


class BlockPlayer:
    """Runs blocks one after another; a tensor between them lives as long as it has a holder."""

    def __init__(self) -> None:
        self.list = EventList()
        self._holders: dict[int, int] = {}  # of tensors that several blocks share
        self._parameters: list[tuple[Instance, tuple[int, ...]]] = []  # with gradients

    def _start(self, number: int, size: int) -> None:
        self._holders[number] = 1
        self.list.start(number, size)

    def _let_go(self, number: int) -> None:
        self._holders[number] -= 1
        if self._holders[number] == 0:
            self.list.die(number)

    def _play(self, done: Pass, instance: Instance) -> None:
        for part in done.parts:
            self._play_part(part, instance)

    def _play_part(self, part: Chunk | tuple[int, int], instance: Instance) -> None:
        if isinstance(part, Chunk):
            self.list.play(part, instance.first)
            return
        tensor, change = part
        number = instance.streams.get(tensor)
        if number is None:  # a gradient
            number = instance.first + tensor
            if change > 0:
                self.list.start(number, change)
            elif change < 0:
                self._hook(number, -change)
            return
        if change < 0:
            self._let_go(number)
            return
        if self._holders.get(number):  # a checkpoint repeats what is still held
            number = instance.streams[tensor] = self.list.numbers(1)
        self._start(number, change)

    def _hook(self, gradient: int, size: int) -> None:
        """What becomes of a trained parameter's `gradient` once autograd has accumulated it."""
        self.list.die(gradient)

    def _kill(self, instance: Instance, tensors: Iterable[int]) -> None:
        self.list.play(instance.block.deaths(tuple(tensors)), instance.first)

    def _forward(self, block: Block, stream: int) -> tuple[Instance, int]:
        """Run `block` on `stream`; its result's number."""
        events = block.events
        first = self.list.numbers(events.num_tensors)
        result = first + events.result
        instance = Instance(block, first, {0: stream, events.result: result})
        self._holders[stream] += 0 in events.saved | events.hidden
        self._play(block.forward, instance)
        if events.result == 0:
            return instance, stream
        self._holders[result] += events.result in events.saved
        return instance, result

    def _backward(self, instance: Instance, gradient: int) -> int:
        """Go back through `instance`; the number of the input's gradient."""
        events = instance.block.events
        instance.streams[events.result_gradient] = gradient
        made = events.input_gradient
        if made is not None and made != events.result_gradient:
            instance.streams[made] = instance.first + made
        self._play(instance.block.backward, instance)
        self._parameters.append((instance, events.parameters))
        return gradient if made is None else instance.streams[made]

    def _embedded(
        self,
        block: Block | None,
        model: ModelSpec,
        *,
        rows_bytes: int,
        keeps_rows: bool,
        look: Callable[[], list[int]] = list,
    ) -> tuple[int, int, Instance | None]:
        """Look the tokens up: a number that the model holds to the end of its forward, the stream.

        Args:
            block: what is made of the rows before the first layer, if anything.
            keeps_rows: somebody else holds them.
            look: plays the forward of a tower, which comes between; tensors that die with the rows.

        Source: transformers 5.23 `LlamaModel.forward`, `GPT2Model.forward`: `inputs_embeds`.
        """
        rows = self.list.numbers(1)
        self._start(rows, rows_bytes)
        temporaries = look()
        if block is None:
            self._holders[rows] += 1
            return rows, rows, None
        self._holders[rows] += keeps_rows
        instance, stream = self._forward(block, rows)
        self.list.die(*temporaries)
        if model.adds_positions and model.task == "causal-lm":
            return rows, stream, instance
        self._let_go(rows)
        self._holders[stream] += 1
        return stream, stream, instance

    def _rotary(self, num_bytes: int, *, stream_bytes: int) -> list[int]:
        """Cosines and sines that all layers read, of `num_bytes` together.

        Source: transformers 5.23 `LlamaRotaryEmbedding.forward`: in fp32, then in the stream's.
        """
        narrow = num_bytes // 2
        wide = narrow * 4 // stream_bytes
        angles = [self.list.born(wide // 2), self.list.born(wide)]
        tables = []
        for _ in range(2):
            value = self.list.born(wide)
            tables.append(self.list.born(wide))
            self.list.die(value)
        if stream_bytes < 4:
            angles += tables
            tables = [self.list.born(narrow), self.list.born(narrow)]
        self.list.die(*angles)
        return tables


def asks_in_forward(events: BlockEvents) -> BlockEvents:
    """`events` with a tensor more, which the first product of the forward asks for.

    Kind: exact where the block is the first that has a product. Source: torch 2.13
    `addmm_out_cuda_impl`, whose result is there before it gets a handle of cuBLAS;
    `getCurrentCUDABlasHandle`, which makes the workspace of a thread's handle.
    """
    births = (place for place, event in enumerate(events.forward, 1) if event[0] == events.product)
    forward = _with_birth(events.forward, next(births, 0), events.num_tensors)
    return replace(events, num_tensors=events.num_tensors + 1, forward=forward)


def asks_in_backward(events: BlockEvents, *, logits_bytes: int) -> BlockEvents:
    """`events` of a head with a tensor more, which the first product of the backward asks for.

    Kind: exact where the loss is one of logits. Source: as of `asks_in_forward`; autograd runs the
    backward in a thread of its own.

    Args:
        logits_bytes: of a token; what is narrower, and no scalar, is a product's result.
    """
    births = (
        place
        for place, (_, form) in enumerate(events.backward, 1)
        if form is not None and form.per_token < logits_bytes and max(form[:3]) > _SCALAR_BYTES
    )
    place = next(births, len(events.backward))
    backward = _with_birth(events.backward, place, events.num_tensors)
    return replace(events, num_tensors=events.num_tensors + 1, backward=backward)


def _with_birth(events: tuple[TapeEvent, ...], place: int, tensor: int) -> tuple[TapeEvent, ...]:
    return (*events[:place], TapeEvent(tensor, NOTHING), *events[place:])


def play_loading(events: EventList, model: ModelSpec, dtypes: Dtypes) -> None:
    """Weights in the order of the modules.

    Kind: exact as far as the sizes are. Source: transformers 5.23 `caching_allocator_warmup`: where
    it is called, one block of all weights that stay is asked for, and freed, before them.
    """
    modules = [(list(parts), times) for parts, times in _loaded(model, dtypes)]
    if dtypes.loads_at_once:
        events.pass_by([sum(sum(size for size, _ in blocks) * times for blocks, times in modules)])
    for blocks, times in modules:
        changes: list[tuple[int, int]] = []
        for number, (size, wide) in enumerate(blocks):
            if wide:
                changes += [(number, wide), (number, -wide)]
            changes.append((number, size))
        events.play_again(Chunk(changes), len(blocks), times)


def loaded_blocks(model: ModelSpec, dtypes: Dtypes) -> Iterator[int]:
    """Bytes of each tensor that `play_loading` leaves, in order.

    Kind: exact as far as the sizes are. Source: as of `play_loading`.
    """
    for parts, times in _loaded(model, dtypes):
        sizes = [size for size, _ in parts]
        for _ in range(times):
            yield from sizes


@lru_cache(maxsize=64)  # candidates share their base
def unsplit_weight_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """What the blocks of weights that are loaded one by one are larger than the weights.

    Kind: exact as far as the sizes are; what loads no quantised base has no wide tensors between.
    Source: `memory.allocator_simulator`; torch 2.13 `Module._apply`, parameter by parameter.
    """
    if dtypes.loads_at_once:
        return 0
    allocator = Allocator()
    num_bytes = 0
    for parts, times in _loaded(model, dtypes):
        blocks = [size for size, _ in parts if size > SMALL_BYTES]
        num_bytes += sum(blocks) * times
        for _ in range(times):
            for size in blocks:
                allocator.allocate(size)
    return allocator.allocated_bytes - num_bytes


def _loaded(model: ModelSpec, dtypes: Dtypes) -> Iterator[tuple[Iterable[tuple[int, int]], int]]:
    """Tensors of each module, and how many such modules follow one another.

    A tensor is the bytes that stay, and those of the wide one that it is quantised from.
    """
    around = model.outer_linears + model.idle_linears
    if model.tower is not None:
        yield from _loaded_linears(around, dtypes)
    tables = [table.num_elements * dtypes.embedding_bytes for table in model.embeddings]
    yield [(block_bytes(size), 0) for size in tables], 1
    shared = {group.layer for group in model.groups if group.shared}
    for part in parts_of(model):
        for layer, times in repeated(layers_in_order(part)):
            yield _layer_weights(layer, dtypes), 1 if layer in shared else times
    if model.head is not None and not model.head_tied:
        if quantises_head(model.head, dtypes):
            yield from _loaded_linears((model.head,), dtypes)
        else:
            yield [(block_bytes(model.head.num_weights * dtypes.head_bytes), 0)], 1
    if model.tower is None:
        yield from _loaded_linears(around, dtypes)
    stored = weight_bytes(model, dtypes)
    stored["other"] -= sum(linear_bytes(replace(linear, bias=False), dtypes) for linear in around)
    yield [(block_bytes(stored[name]), 0) for name in ("other", "buffers")], 1
    if scratch := scratch_bytes(model, dtypes):
        yield [(block_bytes(scratch), 0)], 1


def _loaded_linears(
    linears: Iterable[Linear], dtypes: Dtypes
) -> Iterator[tuple[Iterable[tuple[int, int]], int]]:
    """Those of each kind of block; as of `_loaded`."""
    for times, of_kind in itertools.groupby(linears, key=lambda linear: linear.count):
        of_block = (_stored(replace(linear, count=1), dtypes) for linear in of_kind)
        pairs = itertools.chain.from_iterable(of_block)
        yield [(block_bytes(size), block_bytes(wide)) for size, wide in pairs], times


def _layer_weights(layer: Layer, dtypes: Dtypes) -> Iterator[tuple[int, int]]:
    moe = layer.moe
    halves: tuple[Linear, ...] = ()
    if moe is not None and moe.one_by_one and len(moe.expert.linears) == 1 + moe.expert.gated:
        halves = moe.expert.linears[: int(moe.expert.gated)]
    for linear in layer.linears:
        stored = linear
        if linear in halves:  # gates and what they multiply are modules of their own
            stored = replace(linear, count=2 * linear.count, out_features=linear.out_features // 2)
        for size, wide in _stored(stored, dtypes):
            yield block_bytes(size), block_bytes(wide)
    in_linears = sum(linear.num_weights for linear in layer.linears)
    yield block_bytes((layer.num_params - in_linears) * dtypes.base_bytes), 0


def _stored(linear: Linear, dtypes: Dtypes) -> Iterator[tuple[int, int]]:
    if not linear.is_module and not is_quantised(linear, dtypes):
        yield linear.num_weights * dtypes.base_bytes, 0
        return
    matrices, rows, elements = quantised_matrices(linear)
    for _ in range(matrices):
        if is_quantised(linear, dtypes):
            wide = dtypes.half_bytes * elements * (dtypes.quant in FOUR_BIT_BNB)
            for part in quantised_parts(
                elements,
                dtypes.quant,
                out_features=rows,
                group_size=dtypes.quant_group_size,
                scale_block=dtypes.scale_block,
            ):
                yield part, wide
                wide = 0
        else:
            yield elements * dtypes.base_bytes, 0


def repeated(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    """Each of `layers` that differs from the one before it, and how many equal ones follow.

    Kind: exact. Source: the order of the forward.
    """
    return [(layer, len(list(equal))) for layer, equal in itertools.groupby(layers)]
