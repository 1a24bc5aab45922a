"""Every large request of a training run in order: loading, two optimizer steps.

The blocks of the model are the tapes of `symbolic`; what stands around them is written here, in the
order in which the libraries do it. `memory.allocator_simulator` replays the list, which says what
the caching allocator reserves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from whichlora.memory import activations, loss, optimizer
from whichlora.memory.allocator_simulator import SMALL_BYTES, rounded
from whichlora.memory.gradients import Trained
from whichlora.memory.layer_bytes import layer_cases
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import quantised_parts
from whichlora.spec.architecture import Embedding, Layer, Linear
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.spec.targets import adapted
from whichlora.symbolic.autograd import LinearForm, TapeEvent, evaluate
from whichlora.symbolic.language_head import head_events
from whichlora.symbolic.layer import BlockEvents, layer_events, stream_bytes
from whichlora.symbolic.token_embeddings import embedding_events

_STEPS = 2  # the optimizer's states are there from the second on


@dataclass(slots=True)
class EventList:
    """Large requests in order; small ones, which have a pool of their own, as a running sum."""

    events: list[tuple[int, int | None]] = field(default_factory=list)
    small_bytes: int = 0
    small_peak_bytes: int = 0
    _next: int = 0
    _small: dict[int, int] = field(default_factory=dict)
    _marks: list[tuple[int, int]] = field(default_factory=list)

    def numbers(self, count: int) -> int:
        """The first of `count` numbers that nobody has."""
        first = self._next
        self._next += count
        return first

    def born(self, num_bytes: int) -> int:
        number = self.numbers(1)
        size = rounded(num_bytes) if num_bytes > 0 else 0
        if size > SMALL_BYTES:
            self.events.append((number, size))
        else:
            self._small[number] = size
            self.small(size, size)
        return number

    def die(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._small:
                self.small(-self._small.pop(number), 0)
            else:
                self.events.append((number, None))

    def small(self, change: int, most: int) -> None:
        """Small requests that change what is alive by `change` bytes, and by `most` meanwhile."""
        self.small_peak_bytes = max(self.small_peak_bytes, self.small_bytes + most)
        self._marks.append((len(self.events), self.small_bytes + most))
        self.small_bytes += change

    def live_peaks(self) -> tuple[int, int]:
        """Most bytes alive at once: of large requests, and of all, small ones at their most."""
        sizes: dict[int, int] = {}
        marks = dict(self._marks)  # of several at one event the last, which the event follows
        small = live = large_peak = peak = 0
        for index, (number, size) in enumerate(self.events):
            small = marks.get(index, small)
            if size is None:
                live -= sizes.pop(number)
                continue
            sizes[number] = size
            live += size
            large_peak = max(large_peak, live)
            peak = max(peak, live + small)
        return large_peak, peak


class Sizes:
    """Bytes of the tensors of one kind of block, in blocks of the allocator."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes
        self._by_form: dict[LinearForm, int] = {}
        self.by_tensor: dict[int, int] = {}

    def note(self, tensor: int, form: LinearForm) -> None:
        if form not in self._by_form:
            num_bytes = evaluate(form, **self._sizes)
            self._by_form[form] = rounded(num_bytes) if num_bytes > 0 else 0
        self.by_tensor[tensor] = self._by_form[form]

    def small(self, tensors: Iterable[int]) -> int:
        """Bytes of the small ones among `tensors`."""
        found = (self.by_tensor[tensor] for tensor in tensors)
        return sum(size for size in found if size <= SMALL_BYTES)

    def large(self, tensors: Iterable[int]) -> list[int]:
        return [tensor for tensor in tensors if self.by_tensor[tensor] > SMALL_BYTES]


class Pass:
    """The large events of a forward or a backward of one block.

    Args:
        streams: tensors that other blocks hold, too; their events are large whatever their size.
        kept: tensors that die later than the block says.
    """

    def __init__(
        self,
        events: Iterable[TapeEvent],
        sizes: Sizes,
        *,
        streams: frozenset[int],
        kept: frozenset[int],
    ) -> None:
        self.large: list[tuple[int, int | None]] = []
        self.small_change = self.small_most = 0
        for tensor, form in events:
            if form is not None:
                sizes.note(tensor, form)
            elif tensor in kept:
                continue
            size = sizes.by_tensor[tensor]
            if size > SMALL_BYTES or tensor in streams:
                self.large.append((tensor, None if form is None else size))
                continue
            self.small_change += size if form is not None else -size
            self.small_most = max(self.small_most, self.small_change)


class Block:
    """One kind of block with the bytes of one run."""

    def __init__(self, events: BlockEvents, *, input_bytes: int, result_bytes: int, **sizes: int):
        self.events = events
        self.sizes = Sizes(**sizes)
        self.sizes.by_tensor |= {0: input_bytes, events.result_gradient: result_bytes}
        gradient = events.input_gradient
        ends = (0, events.result, events.result_gradient, *([] if gradient is None else [gradient]))
        streams = frozenset(ends)
        self.forward = Pass(events.forward, self.sizes, streams=streams, kept=frozenset())
        self.backward = Pass(events.backward, self.sizes, streams=streams, kept=events.hidden)


@dataclass(slots=True)
class _Instance:
    """One block of a step: the numbers of its tensors, and of those that it shares."""

    block: Block
    first: int
    streams: dict[int, int]


class StepEvents:
    """The events of loading and of `_STEPS` optimizer steps."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.list = EventList()
        self._holders: dict[int, int] = {}  # of tensors that several blocks share
        self._stream_sizes: dict[int, int] = {}
        self._parameters: list[tuple[_Instance, tuple[int, ...]]] = []  # with gradients
        self._table_gradients: list[int] = []
        self._named: _Instance | None = None  # the head whose outputs the caller still names

    # --- one block ------------------------------------------------------------------------------

    def _start(self, number: int, size: int, holders: int = 1) -> None:
        self._holders[number] = holders
        self._stream_sizes[number] = size
        if size > SMALL_BYTES:
            self.list.events.append((number, size))
        else:
            self.list.small(size, size)

    def _let_go(self, number: int) -> None:
        self._holders[number] -= 1
        if self._holders[number] == 0:
            size = self._stream_sizes[number]
            if size > SMALL_BYTES:
                self.list.events.append((number, None))
            else:
                self.list.small(-size, 0)

    def _play(self, done: Pass, instance: _Instance) -> None:
        first, streams, events = instance.first, instance.streams, self.list.events
        self.list.small(done.small_change, done.small_most)
        for tensor, size in done.large:
            number = streams.get(tensor)
            if number is None:
                events.append((first + tensor, size))
            elif size is None:
                self._let_go(number)
            else:
                self._start(number, size)

    def _kill(self, instance: _Instance, tensors: Iterable[int]) -> None:
        listed = tuple(tensors)
        sizes = instance.block.sizes
        self.list.small(-sizes.small(listed), 0)
        self.list.die(*(instance.first + tensor for tensor in sizes.large(listed)))

    def _forward(self, block: Block, stream: int) -> tuple[_Instance, int]:
        """Run `block` on `stream`; its result's number."""
        events = block.events
        first = self.list.numbers(events.num_tensors)
        result = first + events.result
        instance = _Instance(block, first, {0: stream, events.result: result})
        self._holders[stream] += (0 in events.saved) + (0 in events.hidden)
        self._play(block.forward, instance)
        if events.result == 0:
            return instance, stream
        self._holders[result] += events.result in events.saved
        return instance, result

    def _backward(self, instance: _Instance, gradient: int) -> int:
        """Go back through `instance`; the number of the input's gradient."""
        events = instance.block.events
        instance.streams[events.result_gradient] = gradient
        made = events.input_gradient
        if made is not None and made != events.result_gradient:
            instance.streams[made] = instance.first + made
        self._play(instance.block.backward, instance)
        self._parameters.append((instance, events.parameters))
        return gradient if made is None else instance.streams[made]

    # --- loading --------------------------------------------------------------------------------

    def load(self) -> None:
        """Weights in the order of the modules, then the adapters.

        Source: transformers 5.23 `caching_allocator_warmup`: one block of all weights that stay is
        asked for, and freed, before them.
        """
        blocks = list(self._loaded())
        warm_up = self.list.born(sum(size for size, _ in blocks))
        self.list.die(warm_up)
        for size, wide in blocks:
            if wide:
                self.list.die(self.list.born(wide))
            self.list.born(size)
        if not self.step.method.trains_base:
            for tensor in self.trained:
                self.list.born(tensor.num_params * tensor.param_bytes)

    def _loaded(self) -> Iterator[tuple[int, int]]:
        """Bytes of each tensor that stays, and of the wide one that it is quantised from."""
        step, model, dtypes = self.step, self.step.model, self.step.dtypes
        for embedding in model.embeddings:
            yield embedding.num_elements * dtypes.embedding_bytes, 0
        for layer in self.layers:
            for linear in layer.linears:
                yield from _stored(linear, step)
            in_linears = sum(linear.num_weights for linear in layer.linears)
            yield (layer.num_params - in_linears) * dtypes.base_bytes, 0
        if model.head is not None and not model.head_tied:
            yield model.head.num_weights * dtypes.embedding_bytes, 0
        yield model.other_params * dtypes.base_bytes, 0

    # --- what a step is made of -----------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer in the order of the forward."""
        groups = self.step.model.groups
        if not all(group.positions for group in groups):
            return tuple(group.layer for group in groups for _ in range(group.count))
        placed = {place: group.layer for group in groups for place in group.positions}
        return tuple(placed[place] for place in sorted(placed))

    @cached_property
    def trained(self) -> tuple[Trained, ...]:
        """Trained tensors one by one, in the order of the modules."""
        step = self.step
        found: list[Trained] = []
        if step.method.trains_base:
            return tuple(self._trained_base())
        for layer in self.layers:
            for linear in adapted(layer, step.targets):
                for _ in range(linear.count):
                    for rows, width in step.method.adapter_shapes(linear, step.r):
                        found.append(
                            Trained(rows=rows, width=width, param_bytes=step.dtypes.adapter_bytes)
                        )
        return (*found, *step.saved_modules)

    def _trained_base(self) -> Iterator[Trained]:
        model, size = self.step.model, self.step.param_bytes
        for table in self._trained_tables():
            yield Trained(rows=table.rows, width=table.width, param_bytes=size, is_embedding=True)
        for layer in self.layers:
            for linear in layer.linears:
                for rows in _rows_of_modules(linear):
                    yield Trained(rows=rows, width=linear.in_features, param_bytes=size)
            in_linears = sum(linear.num_weights for linear in layer.linears)
            yield Trained(rows=1, width=layer.num_params - in_linears, param_bytes=size)
        if model.head is not None and not model.head_tied:
            yield Trained(
                rows=model.head.out_features, width=model.head.in_features, param_bytes=size
            )

    def _trained_tables(self) -> tuple[Embedding, ...]:
        step = self.step
        tables = step.model.embeddings
        if step.method.trains_base:
            return tuple(table for table in tables if table.trains)
        return tuple(table for table in tables if table.name in step.run.modules_to_save)

    @cached_property
    def _sized(self) -> dict[str, int]:
        return {**self.step.sized, "r": self.step.r}

    def _stream_bytes(self, layer: Layer) -> int:
        model, dtypes = self.step.model, self.step.dtypes
        width = stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm)
        return int(width * model.hidden_size * self.step.tokens)

    def _layer_block(self, layer: Layer, *, needs_grad: bool, accumulated: bool) -> Block:
        step = self.step
        run, model = step.run, step.model
        ((_, masked, ragged),) = layer_cases(layer, step.dtypes, step.seq_len)
        events = layer_events(
            layer,
            model.hidden_size,
            step.targets,
            step.dtypes,
            step.method,
            masked=masked,
            ragged=ragged,
            accumulated=accumulated,
            reentrant=bool(run.use_reentrant),
            checkpointed=bool(run.gradient_checkpointing),
            stream=stream_bytes(layer, step.dtypes, after_norm=model.starts_in_layer_norm),
            needs_grad=needs_grad,
        )
        size = rounded(self._stream_bytes(layer))
        return Block(events, input_bytes=size, result_bytes=size, **self._sized)

    def _blocks(self, *, accumulated: bool) -> list[Block]:
        kinds: dict[tuple[Layer, bool], Block] = {}
        blocks = []
        for place, layer in enumerate(self.layers):
            key = layer, place > 0 or self.step.gives_input_gradient
            if key not in kinds:
                kinds[key] = self._layer_block(layer, needs_grad=key[1], accumulated=accumulated)
            blocks.append(kinds[key])
        return blocks

    def _head_block(self, *, accumulated: bool) -> Block:
        step = self.step
        last = self.layers[-1]
        events = head_events(
            step.model,
            step.dtypes,
            step.method,
            step.targets,
            stream=stream_bytes(last, step.dtypes, after_norm=step.model.starts_in_layer_norm),
            loss_bytes=loss.loss_element_bytes(step.model, step.dtypes),
            trains_head=bool(step.head_gradient),
            loss_head=step.run.loss_head,
            holds_outputs=step.trainer.outputs_held(step.run) != "until_loss",
            widens_outputs=step.trainer.widens_outputs,
            accumulated=accumulated and not step.tied_gradients_wait,
        )
        return Block(
            events, input_bytes=rounded(self._stream_bytes(last)), result_bytes=512, **self._sized
        )

    # --- one step -------------------------------------------------------------------------------

    def micro_step(self, *, accumulated: bool) -> None:
        """A forward and a backward."""
        step = self.step
        batch = [self.list.born(8 * step.tokens) for _ in range(3)]
        rows, stream, embedded = self._embed()
        around = self._shared()
        unnamed = self.list.born(step.unnamed_mask_bytes)
        instances: list[_Instance] = []
        for block in self._blocks(accumulated=accumulated):
            if step.run.gradient_checkpointing:
                self._holders[stream] += 1
            instance, result = self._forward(block, stream)
            instances.append(instance)
            self._let_go(stream)
            stream = result
        self.list.die(unnamed)
        self._let_go(rows)
        head, loss_number = self._forward(self._head_block(accumulated=accumulated), stream)
        if self._named is not None:
            self._drop_outputs(self._named)
        for instance in instances:
            events = instance.block.events
            self._kill(instance, [copy for copy in events.copies if copy not in events.saved])
        gradient = self.list.numbers(1)
        self._start(gradient, 512)
        gradient = self._backward(head, gradient)
        self._let_go(loss_number)
        for instance in reversed(instances):
            gradient = self._backward(instance, gradient)
            self._after_layer(instance)
        if embedded is not None and embedded.block.events.backward:
            gradient = self._backward(embedded, gradient)
        if self._holders.get(gradient):
            self._let_go(gradient)
        for instance in instances:
            hidden = instance.block.events.hidden
            if 0 in hidden:
                self._let_go(instance.streams[0])
            self._kill(instance, hidden - {0})
        self._embedding_backward(head, accumulated=accumulated)
        if embedded is not None and step.needs_grad:
            self._let_go(embedded.streams[0])
        if step.trainer.outputs_held(step.run) == "until_next_outputs":
            self._named = head
        else:
            self._drop_outputs(head)
        self.list.die(*around, *batch)

    def _drop_outputs(self, head: _Instance) -> None:
        """A caller's variable lets go of the logits."""
        events = head.block.events
        self._kill(head, [copy for copy in events.copies if copy not in events.saved])

    def _embed(self) -> tuple[int, int, _Instance | None]:
        """Look the tokens up: a number that the model holds to the end of its forward, the stream.

        Source: transformers 5.23 `LlamaModel.forward`, `GPT2Model.forward`: `inputs_embeds`.
        """
        step, model = self.step, self.step.model
        table = model.embeddings[0]
        rows = self.list.numbers(1)
        size = rounded(step.tokens * table.width * step.dtypes.embedding_bytes)
        self._start(rows, size)
        events = embedding_events(
            model, step.dtypes, step.method, step.targets, needs_grad=step.needs_grad
        )
        if events is None:
            self._holders[rows] += 1
            return rows, rows, None
        result_bytes = rounded(self._stream_bytes(self.layers[0]))
        block = Block(events, input_bytes=size, result_bytes=result_bytes, **self._sized)
        if step.needs_grad:  # a leaf, or what the table's gradient is made for
            self._holders[rows] += 1
        instance, stream = self._forward(block, rows)
        if model.adds_positions and model.task == "causal-lm":
            return rows, stream, instance
        self._let_go(rows)
        self._holders[stream] += 1
        return stream, stream, instance

    def _after_layer(self, instance: _Instance) -> None:
        """A reentrant checkpoint names its result and the gradient of it until it returns."""
        if not (self.step.run.gradient_checkpointing and self.step.run.use_reentrant):
            return
        events = instance.block.events
        self._let_go(instance.streams[events.result])
        if events.input_gradient != events.result_gradient:
            self._let_go(instance.streams[events.result_gradient])

    def _embedding_backward(self, head: _Instance, *, accumulated: bool) -> None:
        """Gradients of the looked-up tables, and the sum with that of a tied head.

        Source: torch 2.13 `InputBuffer::accumulate`: in place, unless the head's is a view.
        """
        step = self.step
        for table in self._trained_tables():
            size = table.num_elements * step.param_bytes
            gradient = self.list.born(size)
            if step.tied_gradients_wait and table is step.model.embeddings[0]:
                gradient = self._sum_of_tied(head, gradient, size, accumulated=accumulated)
            if accumulated:
                self.list.die(gradient)
            else:
                self._table_gradients.append(gradient)

    def _sum_of_tied(self, head: _Instance, gradient: int, size: int, *, accumulated: bool) -> int:
        """The number of the sum of `gradient` and of the head's."""
        is_cast = self.step.dtypes.under_autocast and self.step.param_bytes == 4
        result = gradient if is_cast else self.list.born(size)
        self._parameters = [pair for pair in self._parameters if pair[0] is not head]
        self._kill(head, head.block.events.parameters)
        if not is_cast:
            self.list.die(gradient)
        return result

    def _shared(self) -> list[int]:
        """Rotary tables and masks, which live to the end of the backward.

        Source: transformers 5.23 `LlamaRotaryEmbedding.forward`: in fp32, then in the stream's.
        """
        step = self.step
        narrow = activations.rotary_bytes(step.model, step.dtypes, span=step.seq_len) // 2
        wide = narrow * 4 // step.dtypes.stream_bytes
        angles = [self.list.born(wide // 2), self.list.born(wide)]
        tables = []
        for _ in range(2):
            value = self.list.born(wide)
            tables.append(self.list.born(wide))
            self.list.die(value)
        if step.dtypes.stream_bytes < 4:
            angles += tables
            tables = [self.list.born(narrow), self.list.born(narrow)]
        self.list.die(*angles)
        return [*tables, self.list.born(step.kept_mask_bytes)]

    def optimizer_step(self, *, first: bool) -> None:
        """States are made by the first step; gradients go after it."""
        step = self.step
        kind, name = step.gpu.kind, step.run.optimizer
        if first:
            for tensor in self.trained:
                for size in optimizer.state_blocks(tensor, optimizer=name, device_kind=kind):
                    self.list.born(size)
        for temporaries in optimizer.temporary_blocks(
            self.trained, optimizer=name, device_kind=kind
        ):
            self.list.die(*[self.list.born(size) for size in temporaries])
        for instance, parameters in self._parameters:
            self._kill(instance, parameters)
        self._parameters.clear()
        self.list.die(*self._table_gradients)
        self._table_gradients.clear()

    def whole_run(self) -> EventList:
        self.load()
        for number in range(_STEPS):
            self.micro_step(accumulated=False)
            if self.step.accumulates:
                self.micro_step(accumulated=True)
            self.optimizer_step(first=number == 0)
        return self.list


def _rows_of_modules(linear: Linear) -> list[int]:
    """Rows of each weight tensor of this name: experts in one parameter are one."""
    if linear.is_module:
        return [linear.out_features] * linear.count
    return [linear.count * linear.out_features]


def _stored(linear: Linear, step: TrainingStep) -> Iterator[tuple[int, int]]:
    dtypes = step.dtypes
    if not linear.is_module:
        yield linear.num_weights * dtypes.base_bytes, 0
        return
    elements = linear.in_features * linear.out_features
    for _ in range(linear.count):
        if is_quantised(linear, dtypes):
            wide = dtypes.four_bit_bytes * elements * (dtypes.quant in FOUR_BIT_BNB)
            for part in quantised_parts(
                elements,
                dtypes.quant,
                out_features=linear.out_features,
                group_size=dtypes.quant_group_size,
            ):
                yield part, wide
                wide = 0
        else:
            yield elements * dtypes.base_bytes, 0


def has_events(step: TrainingStep) -> bool:
    """Whether all of a step is written as events: one stack of layers that share nothing.

    Kind: exact. Source: what `StepEvents` leaves out.
    """
    model = step.model
    attentions = (attention for layer, _ in model.layers() for attention in layer.attentions)
    return (
        len({group.stack for group in model.groups}) == 1
        and not any(attention.keeps_keys for attention in attentions)
        and not any(group.shared for group in model.groups)
        and model.layer_input_norm is None
        and step.run.loss_head in ("hf", "raw")
    )


def training_events(step: TrainingStep) -> EventList:
    """Large requests of loading and two steps in order; small ones as a sum.

    Kind: exact as far as the blocks are. Source: the libraries' functions named above.
    """
    return StepEvents(step).whole_run()
