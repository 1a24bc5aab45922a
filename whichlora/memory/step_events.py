"""Every large request of a training run in order: loading, two optimizer steps.

The blocks of the model are the tapes of `symbolic`; what stands around them is written here, in the
order in which the libraries do it. `memory.allocator_simulator` replays the list, which says what
the caching allocator reserves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory import activations, loss, optimizer
from whichlora.memory.allocator_simulator import SMALL_BYTES, rounded
from whichlora.memory.embeddings import ENCODER_OUT
from whichlora.memory.gradients import Trained
from whichlora.memory.layer_bytes import layer_cases
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import quantised_parts, weight_bytes
from whichlora.spec.architecture import Embedding, Layer, Linear, ModelSpec
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.spec.targets import adapted
from whichlora.symbolic.autograd import LinearForm, TapeEvent, evaluate
from whichlora.symbolic.language_head import head_events, stack_end_events
from whichlora.symbolic.layer import BlockEvents, layer_events, stream_bytes
from whichlora.symbolic.token_embeddings import embedding_events

_STEPS = 2  # the optimizer's states are there from the second on


def _block_bytes(num_bytes: int) -> int:
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
        self.large: list[tuple[int, int | None]] = []
        self.change = self.small_change = self.most = self.large_most = self.small_most = 0
        for tensor, change in changes:
            self.change += change
            if abs(change) > SMALL_BYTES:
                self.large.append((tensor, change if change > 0 else None))
            else:
                self.small_change += change
            if self.change > self.most:
                self.most = self.change
            if self.small_change > self.small_most:
                self.small_most = self.small_change
            if self.change - self.small_change > self.large_most:
                self.large_most = self.change - self.small_change


class EventList:
    """Large requests in order; small ones, which have a pool of their own, as a running sum.

    Attributes:
        peak_bytes, large_peak_bytes, small_peak_bytes: the most bytes alive at once, of all
            tensors, of large ones, of small ones.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int | None]] = []
        self.peak_bytes = self.large_peak_bytes = self.small_peak_bytes = 0
        self._live_bytes = self._small_bytes = 0
        self._next = 0
        self._sizes: dict[int, int] = {}

    def numbers(self, count: int) -> int:
        """The first of `count` numbers that nobody has."""
        first = self._next
        self._next += count
        return first

    def born(self, num_bytes: int) -> int:
        """The number of a new tensor."""
        number = self.numbers(1)
        self.start(number, _block_bytes(num_bytes))
        return number

    def start(self, number: int, size: int) -> None:
        self._sizes[number] = size
        self.play(Chunk([(0, size)]), number)

    def die(self, *numbers: int) -> None:
        self.play(Chunk([(number, -self._sizes.pop(number)) for number in numbers]), 0)

    def stay(self, sizes: Iterable[int]) -> None:
        """Births of tensors that live to the end."""
        blocks = [_block_bytes(size) for size in sizes]
        self.play(Chunk(enumerate(blocks)), self.numbers(len(blocks)))

    def pass_by(self, sizes: Iterable[int]) -> None:
        """Births of tensors, then their deaths."""
        blocks = list(enumerate(_block_bytes(size) for size in sizes))
        deaths = [(tensor, -size) for tensor, size in blocks]
        self.play(Chunk(blocks + deaths), self.numbers(len(blocks)))

    def play(self, chunk: Chunk, first: int) -> None:
        """Add the events of `chunk`, whose tensors are numbered from `first` on."""
        self.events.extend([(first + tensor, size) for tensor, size in chunk.large])
        live, small = self._live_bytes, self._small_bytes
        self.peak_bytes = max(self.peak_bytes, live + chunk.most)
        self.large_peak_bytes = max(self.large_peak_bytes, live - small + chunk.large_most)
        self.small_peak_bytes = max(self.small_peak_bytes, small + chunk.small_most)
        self._live_bytes += chunk.change
        self._small_bytes += chunk.small_change


class Sizes:
    """Bytes of the tensors of one kind of block, in blocks of the allocator."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes
        self._by_form: dict[LinearForm, int] = {}
        self.by_tensor: dict[int, int] = {}

    def note(self, tensor: int, form: LinearForm) -> None:
        if form not in self._by_form:
            num_bytes = evaluate(form, **self._sizes)
            self._by_form[form] = _block_bytes(num_bytes)
        self.by_tensor[tensor] = self._by_form[form]


class Pass:
    """A forward or a backward of one block.

    Args:
        streams: tensors that other blocks hold, too.
        kept: tensors that die later than the block says.

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
    ) -> None:
        self.parts: list[Chunk | tuple[int, int]] = []
        inside: list[tuple[int, int]] = []
        for tensor, form in events:
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
    """One kind of block with the bytes of one run."""

    def __init__(self, events: BlockEvents, *, input_bytes: int, result_bytes: int, **sizes: int):
        self.events = events
        self.sizes = Sizes(**sizes)
        self.sizes.by_tensor |= {0: input_bytes, events.result_gradient: result_bytes}
        gradient = events.input_gradient
        ends = (0, events.result, events.result_gradient, *([] if gradient is None else [gradient]))
        streams = frozenset(ends)
        self.forward = Pass(events.forward, self.sizes, streams=streams, kept=frozenset())
        # the death of a checkpointed block's input is that of the checkpoint's frame
        kept = events.hidden - ({0} - events.saved)
        self.backward = Pass(events.backward, self.sizes, streams=streams, kept=kept)


@dataclass(slots=True)
class _Instance:
    """One block of a step: the numbers of its tensors, and of those that it shares."""

    block: Block
    first: int
    streams: dict[int, int]


@dataclass(slots=True)
class _Stack:
    """The forward of an encoder or a decoder in one micro-step.

    Args:
        step: that of its part of the model.
        embedded, end: blocks before and after the layers.
        around: rotary tables and masks.
        result: number of what it hands on, of `result_bytes`.
    """

    step: TrainingStep
    embedded: _Instance | None
    instances: list[_Instance]
    end: _Instance | None
    around: list[int]
    result: int
    result_bytes: int


class StepEvents:
    """The events of loading and of `_STEPS` optimizer steps."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.list = EventList()
        self._holders: dict[int, int] = {}  # of tensors that several blocks share
        self._parameters: list[tuple[_Instance, tuple[int, ...]]] = []  # with gradients
        self._table_gradients: list[int] = []
        self._waiting_gradient: int | None = None  # of a table that two stacks look up
        self._named: _Instance | None = None  # the head whose outputs the caller still names

    # --- one block ------------------------------------------------------------------------------

    def _start(self, number: int, size: int) -> None:
        self._holders[number] = 1
        self.list.start(number, size)

    def _let_go(self, number: int) -> None:
        self._holders[number] -= 1
        if self._holders[number] == 0:
            self.list.die(number)

    def _play(self, done: Pass, instance: _Instance) -> None:
        for part in done.parts:
            if isinstance(part, Chunk):
                self.list.play(part, instance.first)
                continue
            tensor, change = part
            number = instance.streams[tensor]
            if change < 0:
                self._let_go(number)
                continue
            if self._holders.get(number):  # a checkpoint repeats what is still held
                number = instance.streams[tensor] = self.list.numbers(1)
            self._start(number, change)

    def _kill(self, instance: _Instance, tensors: Iterable[int]) -> None:
        sizes = instance.block.sizes.by_tensor
        self.list.play(Chunk((tensor, -sizes[tensor]) for tensor in tensors), instance.first)

    def _forward(self, block: Block, stream: int) -> tuple[_Instance, int]:
        """Run `block` on `stream`; its result's number."""
        events = block.events
        first = self.list.numbers(events.num_tensors)
        result = first + events.result
        instance = _Instance(block, first, {0: stream, events.result: result})
        self._holders[stream] += 0 in events.saved | events.hidden
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
        self.list.pass_by([sum(size for size, _ in blocks)])
        changes: list[tuple[int, int]] = []
        for number, (size, wide) in enumerate(blocks):
            if wide:
                changes += [(number, wide), (number, -wide)]
            changes.append((number, size))
        self.list.play(Chunk(changes), self.list.numbers(len(blocks)))
        if not self.step.method.trains_base:
            self.list.stay(tensor.num_params * tensor.param_bytes for tensor in self.trained)

    def _loaded(self) -> Iterator[tuple[int, int]]:
        """Bytes of each tensor that stays, and of the wide one that it is quantised from."""
        model, dtypes = self.step.model, self.step.dtypes
        for embedding in model.embeddings:
            yield _block_bytes(embedding.num_elements * dtypes.embedding_bytes), 0
        weights = {layer: list(self._layer_weights(layer)) for layer in set(self.layers)}
        for layer in self.layers:
            yield from weights[layer]
        if model.head is not None and not model.head_tied:
            yield _block_bytes(model.head.num_weights * dtypes.embedding_bytes), 0
        stored = weight_bytes(model, dtypes)
        yield _block_bytes(stored["other"]), 0
        yield _block_bytes(stored["buffers"]), 0

    def _layer_weights(self, layer: Layer) -> Iterator[tuple[int, int]]:
        for linear in layer.linears:
            for size, wide in _stored(linear, self.step):
                yield _block_bytes(size), _block_bytes(wide)
        in_linears = sum(linear.num_weights for linear in layer.linears)
        yield _block_bytes((layer.num_params - in_linears) * self.step.dtypes.base_bytes), 0

    # --- what a step is made of -----------------------------------------------------------------

    @cached_property
    def stacks(self) -> tuple[TrainingStep, ...]:
        """The step of an encoder and of its decoder, or of all layers."""
        model = self.step.model
        names = list(dict.fromkeys(group.stack for group in model.groups))
        if len(names) == 1:
            return (self.step,)
        return tuple(
            replace(self.step, model=_part(model, name, number))
            for number, name in enumerate(names)
        )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer in the order of the forward."""
        return tuple(layer for stack in self.stacks for layer in _layers(stack.model))

    @cached_property
    def trained(self) -> tuple[Trained, ...]:
        """Trained tensors one by one, in the order of the modules."""
        step = self.step
        if step.method.trains_base:
            return tuple(self._trained_base())
        adapters = {layer: self._adapters(layer) for layer in set(self.layers)}
        of_layers = itertools.chain.from_iterable(adapters[layer] for layer in self.layers)
        return (*of_layers, *step.saved_modules)

    def _adapters(self, layer: Layer) -> list[Trained]:
        step = self.step
        tensors: list[Trained] = []
        for linear in adapted(layer, step.targets):
            shapes = step.method.adapter_shapes(linear, step.r)
            size = step.dtypes.adapter_bytes
            tensors += [
                Trained(rows=rows, width=width, param_bytes=size) for rows, width in shapes
            ] * linear.count
        return tensors

    def _trained_base(self) -> Iterator[Trained]:
        model, size = self.step.model, self.step.param_bytes
        for table in self._trained_tables(model):
            yield Trained(rows=table.rows, width=table.width, param_bytes=size, is_embedding=True)
        weights = {layer: list(self._trained_weights(layer)) for layer in set(self.layers)}
        for layer in self.layers:
            yield from weights[layer]
        if model.head is not None and not model.head_tied:
            yield Trained(
                rows=model.head.out_features, width=model.head.in_features, param_bytes=size
            )

    def _trained_weights(self, layer: Layer) -> Iterator[Trained]:
        size = self.step.param_bytes
        for linear in layer.linears:
            for rows in _rows_of_modules(linear):
                yield Trained(rows=rows, width=linear.in_features, param_bytes=size)
        in_linears = sum(linear.num_weights for linear in layer.linears)
        yield Trained(rows=1, width=layer.num_params - in_linears, param_bytes=size)

    def _trained_tables(self, model: ModelSpec) -> tuple[Embedding, ...]:
        step, tables = self.step, model.embeddings
        if step.method.trains_base:
            return tuple(table for table in tables if table.trains)
        return tuple(table for table in tables if table.name in step.run.modules_to_save)

    @cached_property
    def _sized(self) -> dict[str, int]:
        return {**self.step.sized, "r": self.step.r}

    def _stream_bytes(self, step: TrainingStep, layer: Layer) -> int:
        width = stream_bytes(layer, step.dtypes, after_norm=step.model.starts_in_layer_norm)
        return rounded(width * step.model.hidden_size * step.tokens)

    def _layer_block(
        self, step: TrainingStep, layer: Layer, *, needs_grad: bool, accumulated: bool
    ) -> Block:
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
        size = self._stream_bytes(step, layer)
        return Block(events, input_bytes=size, result_bytes=size, **self._sized)

    def _blocks(self, step: TrainingStep, *, accumulated: bool) -> list[Block]:
        kinds: dict[tuple[Layer, bool], Block] = {}
        blocks = []
        for place, layer in enumerate(_layers(step.model)):
            needs_grad = place > 0 or step.gives_input_gradient
            if (layer, needs_grad) not in kinds:
                kinds[layer, needs_grad] = self._layer_block(
                    step, layer, needs_grad=needs_grad, accumulated=accumulated
                )
            blocks.append(kinds[layer, needs_grad])
        return blocks

    def _head_block(self, *, accumulated: bool) -> Block:
        step = self.stacks[-1]
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
        size = self._stream_bytes(step, last)
        return Block(events, input_bytes=size, result_bytes=512, **self._sized)

    # --- one step -------------------------------------------------------------------------------

    def micro_step(self, *, accumulated: bool) -> None:
        """A forward and a backward."""
        step = self.step
        outputs_held = step.trainer.outputs_held(step.run)
        if outputs_held == "until_step_ends":
            self._drop_outputs()
        batch = [self.list.born(8 * step.tokens) for _ in range(3)]
        stacks = [self._stack_forward(stack, accumulated=accumulated) for stack in self.stacks]
        stream = stacks[-1].result
        head, loss_number = self._forward(self._head_block(accumulated=accumulated), stream)
        if 0 in head.block.events.saved:
            self._let_go(stream)
        if not self._keeps_encoder_out:
            for encoder in stacks[:-1]:
                self._let_go(encoder.result)
        self._drop_outputs()
        self._named = head
        for instance in _instances(stacks):
            events = instance.block.events
            self._kill(instance, [copy for copy in events.copies if copy not in events.saved])
        gradient = self.list.numbers(1)
        self._start(gradient, 512)
        gradient = self._backward(head, gradient)
        self._let_go(loss_number)
        for number, stack in reversed(list(enumerate(stacks))):
            of_encoder = self.list.numbers(1)
            if number:  # cross attention adds to its gradient, layer by layer
                self._start(of_encoder, stacks[number - 1].result_bytes)
            self._stack_backward(stack, gradient)
            gradient = of_encoder
            if number == 0:
                self._free_hidden(stacks)
            elif self._keeps_encoder_out:
                self._let_go(stacks[number - 1].result)
            self._embedding_backward(stack.step.model, head, accumulated=accumulated)
            if stack.embedded is not None and step.needs_grad:
                self._let_go(stack.embedded.streams[0])
            self.list.die(*stack.around)
        if outputs_held in ("until_loss", "until_backward"):
            self._drop_outputs()
        self.list.die(*batch)

    @cached_property
    def _keeps_encoder_out(self) -> bool:
        """Whether an encoder's result lives while its decoder goes backward.

        It is an argument of checkpointed layers, and what trained cross attention saves.
        """
        step = self.step
        return bool(step.run.gradient_checkpointing) or any(
            linear.reads == ENCODER_OUT and (step.method.trains_base or linear.name in step.targets)
            for linear in self.layers[-1].linears
        )

    def _stack_forward(self, step: TrainingStep, *, accumulated: bool) -> _Stack:
        """Embeddings, layers and, of an encoder, what ends it."""
        rows, stream, embedded = self._embed(step)
        around = self._shared(step)
        unnamed = self.list.born(step.unnamed_mask_bytes)
        instances: list[_Instance] = []
        for block in self._blocks(step, accumulated=accumulated):
            if step.run.gradient_checkpointing:
                self._holders[stream] += 1
            instance, result = self._forward(block, stream)
            instances.append(instance)
            self._let_go(stream)
            stream = result
        self.list.die(unnamed)
        self._let_go(rows)
        last = _layers(step.model)[-1]
        size, end = self._stream_bytes(step, last), None
        if step is not self.stacks[-1]:
            events = stack_end_events(
                step.model,
                step.dtypes,
                step.method,
                step.targets,
                stream=stream_bytes(last, step.dtypes, after_norm=step.model.starts_in_layer_norm),
                accumulated=accumulated,
            )
            if events is not None:
                block = Block(events, input_bytes=size, result_bytes=size, **self._sized)
                end, result = self._forward(block, stream)
                self._let_go(stream)
                stream, size = result, block.sizes.by_tensor[events.result]
                block.sizes.by_tensor[events.result_gradient] = size
        return _Stack(step, embedded, instances, end, around, stream, size)

    def _stack_backward(self, stack: _Stack, gradient: int) -> None:
        """From the `gradient` of its result to that of the looked-up rows."""
        if stack.end is not None:
            gradient = self._backward(stack.end, gradient)
        for instance in reversed(stack.instances):
            gradient = self._backward(instance, gradient)
            self._after_layer(instance)
        if stack.embedded is not None and stack.embedded.block.events.backward:
            gradient = self._backward(stack.embedded, gradient)
        if self._holders.get(gradient):
            self._let_go(gradient)

    def _free_hidden(self, stacks: list[_Stack]) -> None:
        """The graph goes, with what bypasses the saved-tensor hooks."""
        for instance in _instances(stacks):
            hidden = instance.block.events.hidden
            if 0 in hidden:
                self._let_go(instance.streams[0])
            self._kill(instance, hidden - {0})

    def _drop_outputs(self) -> None:
        """The caller's variable lets go of the logits, where it names any."""
        if self._named is None:
            return
        events = self._named.block.events
        self._kill(self._named, [copy for copy in events.copies if copy not in events.saved])
        self._named = None

    def _embed(self, step: TrainingStep) -> tuple[int, int, _Instance | None]:
        """Look the tokens up: a number that the model holds to the end of its forward, the stream.

        Source: transformers 5.23 `LlamaModel.forward`, `GPT2Model.forward`: `inputs_embeds`.
        """
        model = step.model
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
        result_bytes = self._stream_bytes(step, _layers(model)[0])
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

    def _embedding_backward(self, model: ModelSpec, head: _Instance, *, accumulated: bool) -> None:
        """Gradients of a stack's tables, and the sum with that of a tied head, then an encoder's.

        Source: torch 2.13 `InputBuffer::accumulate`: in place, unless the head's is a view.
        """
        step, is_last = self.step, model is self.stacks[-1].model
        is_shared = len(self.stacks) > 1 and not model.splits_embeddings
        for table in self._trained_tables(model):
            size = table.num_elements * step.param_bytes
            gradient = self.list.born(size)
            if table is model.embeddings[0]:
                if is_last and step.tied_gradients_wait:
                    gradient = self._sum_of_tied(head, gradient, size, accumulated=accumulated)
                if is_last and is_shared:
                    self._waiting_gradient = gradient
                    continue
                if self._waiting_gradient is not None:
                    self.list.die(gradient)
                    gradient, self._waiting_gradient = self._waiting_gradient, None
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

    def _shared(self, step: TrainingStep) -> list[int]:
        """Rotary tables and masks, which live to the end of the backward.

        Source: transformers 5.23 `LlamaRotaryEmbedding.forward`: in fp32, then in the stream's.
        """
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
            states = {
                tensor: optimizer.state_blocks(tensor, optimizer=name, device_kind=kind)
                for tensor in set(self.trained)
            }
            self.list.stay(itertools.chain.from_iterable(states[tensor] for tensor in self.trained))
        for temporaries in optimizer.temporary_blocks(
            self.trained, optimizer=name, device_kind=kind
        ):
            self.list.pass_by(temporaries)
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


def _part(model: ModelSpec, stack: str, number: int) -> ModelSpec:
    """One of two stacks as a model of its own: tables, norms and dropouts stand in pairs."""
    pairs = model.embeddings if model.splits_embeddings else model.embeddings[1:]
    shared = () if model.splits_embeddings else model.embeddings[:1]
    return replace(
        model,
        groups=tuple(group for group in model.groups if group.stack == stack),
        embeddings=(*shared, *pairs[number::2]),
        embedding_norms=model.embedding_norms[number::2],
        embedding_dropouts=model.embedding_dropouts[number::2],
        final_norms=model.final_norms[number::2],
        final_dropouts=model.final_dropouts[number::2],
    )


def _layers(model: ModelSpec) -> tuple[Layer, ...]:
    """The layers of one stack in the order of its forward."""
    groups = model.groups
    if not all(group.positions for group in groups):
        return tuple(group.layer for group in groups for _ in range(group.count))
    placed = {place: group.layer for group in groups for place in group.positions}
    return tuple(placed[place] for place in sorted(placed))


def _instances(stacks: list[_Stack]) -> list[_Instance]:
    """Every layer of a micro-step."""
    return [instance for stack in stacks for instance in stack.instances]


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
    """Whether all of a step is written as events: layers that share nothing.

    Kind: exact. Source: what `StepEvents` leaves out.
    """
    model = step.model
    attentions = (attention for layer, _ in model.layers() for attention in layer.attentions)
    return (
        not any(attention.keeps_keys for attention in attentions)
        and not any(group.shared for group in model.groups)
        and model.layer_input_norm is None
        and step.run.loss_head in ("hf", "raw")
    )


def training_events(step: TrainingStep) -> EventList:
    """Large requests of loading and two steps in order; small ones as a sum.

    Kind: exact as far as the blocks are. Source: the libraries' functions named above.
    """
    return StepEvents(step).whole_run()
