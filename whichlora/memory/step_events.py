"""Every large request of a training run in order: loading, two optimizer steps.

The blocks of the model are the tapes of `symbolic`; what stands around them is written here, in the
order in which the libraries do it. `memory.allocator_simulator` replays the list, which says what
the caching allocator reserves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory import activations, loss, optimizer
from whichlora.memory.allocator import kernel_workspace_bytes
from whichlora.memory.allocator_simulator import rounded
from whichlora.memory.embeddings import ENCODER_OUT
from whichlora.memory.event_list import (
    Block,
    EventList,
    Instance,
    asks_in_backward,
    asks_in_forward,
    play_loading,
    repeated,
)
from whichlora.memory.gradients import Trained
from whichlora.memory.layer_bytes import layer_cases
from whichlora.memory.step import TrainingStep
from whichlora.memory.tower_events import PLACE_BYTES, TowerPass, TowerPlayer, trained_matrices
from whichlora.spec.architecture import Embedding, ModelSpec, layers_in_order, parts_of
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.targets import adapted, token_table
from whichlora.symbolic.language_head import head_events, stack_end_events
from whichlora.symbolic.layer import BlockEvents, layer_events, stream_bytes
from whichlora.symbolic.token_embeddings import embedding_events

_STEPS = 2  # the optimizer's states are there from the second on
_EARLY_LAYERS = 3  # of the first backward


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
    embedded: Instance | None
    instances: list[Instance]
    end: Instance | None
    around: list[int]
    result: int
    result_bytes: int


class StepEvents(TowerPlayer):
    """The events of loading and of `_STEPS` optimizer steps.

    Attributes:
        hooks_gradients, pieces: as `hooks` and `pieces` of `Block`.
    """

    hooks_gradients = False
    pieces = 1

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step)
        self._table_gradients: list[int] = []
        self._waiting_gradient: int | None = None  # of a table that two stacks look up
        # by arguments of `_blocks`
        self._layer_blocks: dict[tuple[type, str, bool], list[Block]] = {}
        self._head_blocks: dict[tuple[bool, bool], Block] = {}  # by arguments of `_head_block`
        self._named: Instance | None = None  # the head whose outputs the caller still names

    # --- loading --------------------------------------------------------------------------------

    def load(self) -> None:
        """Weights in the order of the modules, then the adapters."""
        play_loading(self.list, self.step.model, self.step.dtypes)
        self.list.stay([self.step.gradients.left] if self.step.gradients.left else [], 1)
        if not self.step.method.trains_base:
            for tensors, times in self.trained:
                sizes = [tensor.num_params * tensor.param_bytes for tensor in tensors]
                self.list.stay(sizes, times)

    # --- what a step is made of -----------------------------------------------------------------

    @cached_property
    def stacks(self) -> tuple[TrainingStep, ...]:
        """The step of an encoder and of its decoder, or of all layers."""
        step = self.step
        parts = ((part, part.groups[0].layer) for part in parts_of(step.model))
        return tuple(
            replace(step, model=part, seq_len=layer.padded(step.tokens, step.seq_len)[1])
            for part, layer in parts
        )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer of the text in the order of the forward."""
        return tuple(layer for stack in self.stacks for layer in layers_in_order(stack.model))

    @cached_property
    def trained(self) -> tuple[tuple[list[Trained], int], ...]:
        """Trained tensors of each module in order, and how many such modules follow one another."""
        step = self.step
        if step.method.trains_base:
            return tuple(self._trained_base())
        of_layers = (
            (self._adapters(adapted(layer, step.targets)), times)
            for layer, times in repeated(self.layers)
        )
        table = [token_table(step.model)] if step.adapts_table else []
        return (
            *self._tower_adapters(),
            (self._adapters(table), 1),
            *of_layers,
            (list(step.saved_modules), 1),
        )

    def _tower_adapters(self) -> Iterator[tuple[list[Trained], int]]:
        tower = self.tower
        if tower is None:
            return
        for layer, times in repeated(layers_in_order(tower.model)):
            yield self._adapters(adapted(layer, tower.targets)), times
        around = (linear for linear in tower.model.head_linears if linear.rank_multiple)
        yield self._adapters([each for each in around if each.name in tower.targets]), 1

    def _adapters(self, linears: Iterable[Linear]) -> list[Trained]:
        step = self.step
        tensors: list[Trained] = []
        for linear in linears:
            shapes = step.method.adapter_shapes(linear, step.r)
            size = step.dtypes.adapter_bytes
            tensors += [
                Trained(rows=rows, width=width, param_bytes=size) for rows, width in shapes
            ] * linear.count
        return tensors

    def _trained_base(self) -> Iterator[tuple[list[Trained], int]]:
        model, size = self.step.model, self.step.param_bytes
        if self.tower is not None and self.tower.trains:
            for layer, times in repeated(layers_in_order(self.tower.model)):
                yield list(self._trained_weights(layer)), times
            around = trained_matrices(self.tower)
            yield [Trained(rows=1, width=width, param_bytes=size) for width in around], 1
        for table in self._trained_tables(model):
            rows, width = table.rows, table.width
            yield [Trained(rows=rows, width=width, param_bytes=size, is_embedding=True)], 1
        for layer, times in repeated(self.layers):
            yield list(self._trained_weights(layer)), times
        if model.head is not None and not model.head_tied:
            rows, width = model.head.out_features, model.head.in_features
            yield [Trained(rows=rows, width=width, param_bytes=size)], 1

    def _trained_weights(self, layer: Layer) -> Iterator[Trained]:
        size = self.step.param_bytes
        trained = [linear for linear in layer.linears if linear.active]
        for linear in trained:
            for rows in _rows_of_modules(linear):
                yield Trained(rows=rows, width=linear.in_features, param_bytes=size)
        in_linears = sum(linear.num_weights for linear in trained)
        yield Trained(rows=1, width=layer.trained_params - in_linears, param_bytes=size)

    def _trained_tables(self, model: ModelSpec) -> tuple[Embedding, ...]:
        step, tables = self.step, model.embeddings
        if step.method.trains_base:
            return tuple(table for table in tables if table.trains)
        return tuple(table for table in tables if table.name in step.run.modules_to_save)

    @cached_property
    def _workspace(self) -> int:
        return kernel_workspace_bytes(self.step.gpu, self.step.dtypes)

    def _sized(self, step: TrainingStep) -> dict[str, int]:
        return {**step.sized, "r": step.r}

    def _stream_bytes(self, step: TrainingStep, layer: Layer) -> int:
        width = stream_bytes(layer, step.dtypes, after_norm=step.model.starts_in_layer_norm)
        return rounded(width * step.model.hidden_size * step.tokens)

    def _block(
        self,
        step: TrainingStep,
        events: BlockEvents,
        *,
        input_bytes: int,
        result_bytes: int,
        fixed: Mapping[int, int] | None = None,
    ) -> Block:
        return Block(
            events,
            self._sized(step),
            input_bytes=input_bytes,
            result_bytes=result_bytes,
            fixed=fixed,
            hooks=self.hooks_gradients,
            pieces=self.pieces,
        )

    def _layer_block(
        self,
        step: TrainingStep,
        layer: Layer,
        *,
        needs_grad: bool,
        accumulated: bool,
        first: bool = False,
    ) -> Block:
        run, model = step.run, step.model
        ((_, running, masked, ragged),) = layer_cases(layer, step.dtypes, **step.sized)
        events = layer_events(
            running,
            model.stream_width,
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
        size, fixed = self._stream_bytes(step, layer), {}
        if first:
            fixed = self.list.workspace_after(events.num_tensors, self._workspace)
            events = asks_in_forward(events)
        return self._block(step, events, input_bytes=size, result_bytes=size, fixed=fixed)

    def _blocks(self, step: TrainingStep, *, accumulated: bool) -> list[Block]:
        """Those of the layers in order, which all micro-steps share."""
        key = type(step), step.model.groups[0].stack, accumulated
        if key not in self._layer_blocks:
            self._layer_blocks[key] = self._made_blocks(step, accumulated=accumulated)
        return self._layer_blocks[key]

    def _made_blocks(self, step: TrainingStep, *, accumulated: bool) -> list[Block]:
        blocks: list[Block] = []
        kinds: dict[tuple[Layer, bool], Block] = {}
        for place, layer in enumerate(layers_in_order(step.model)):
            flows = step.gives_input_gradient or place > step.num_idle_layers
            needs_grad = step.goes_backward and flows
            if (layer, needs_grad) not in kinds:
                kinds[layer, needs_grad] = self._layer_block(
                    step, layer, needs_grad=needs_grad, accumulated=accumulated
                )
            blocks.append(kinds[layer, needs_grad])
        return blocks

    def _head_block(self, *, accumulated: bool, first: bool) -> Block:
        """That of the head, which all micro-steps share but the first, which gets a workspace."""
        key = accumulated, first
        if key not in self._head_blocks:
            self._head_blocks[key] = self._made_head(accumulated=accumulated, first=first)
        return self._head_blocks[key]

    def _made_head(self, *, accumulated: bool, first: bool) -> Block:
        step = self.stacks[-1]
        last = self.layers[-1]
        events = head_events(
            step.model,
            step.dtypes,
            step.method,
            step.targets,
            stream=stream_bytes(last, step.dtypes, after_norm=step.model.starts_in_layer_norm),
            form=loss.cross_entropy_form(step.model, step.dtypes, sequences=step.batch_size),
            trains_head=bool(step.gradients.of_head),
            loss_head=step.run.loss_head,
            logits_loss=step.trainer.logits_loss(step.run),
            chunked_loss=step.trainer.chunked_loss(step.run),
            tokens=step.tokens,
            sequences=step.batch_size,
            holds_outputs=step.trainer.outputs_held(step.run) != "until_loss",
            widens_outputs=step.trainer.widens_outputs,
            widened_cache=step.loss.widened_cache,
            accumulated=accumulated and not step.gradients.tied_wait,
        )
        size, fixed = self._stream_bytes(step, last), {}
        if first and self._workspace:
            fixed = self.list.workspace_after(events.num_tensors, self._workspace)
            logits = loss.logit_width(step.model) * step.dtypes.compute_bytes
            events = asks_in_backward(events, logits_bytes=logits)
        return self._block(step, events, input_bytes=size, result_bytes=512, fixed=fixed)

    # --- one step -------------------------------------------------------------------------------

    def micro_step(self, *, accumulated: bool, first: bool) -> None:
        """A forward and a backward; `first` of the run, each thread asks for a workspace."""
        step = self.step
        outputs_held = step.trainer.outputs_held(step.run)
        if outputs_held == "until_step_ends":
            self._drop_outputs()
        batch = [
            self.list.born(8 * tokens)
            for tokens in (step.source_tokens, step.source_tokens, step.tokens)
        ]
        if not step.trainer.gathers_batches:
            self._read_pixels(1)
        seen: list[TowerPass] = []
        stacks = [
            self._stack_forward(
                stack, seen, accumulated=accumulated, first=first and stack is self.stacks[0]
            )
            for stack in self.stacks
        ]
        head, loss_number = self._head_forward(stacks[-1], accumulated=accumulated, first=first)
        if not self._keeps_encoder_out:
            for encoder in stacks[:-1]:
                self._let_go(encoder.result)
        self._drop_outputs()
        self._named = head
        for instance in _instances(stacks, seen):
            events = instance.block.events
            self._kill(instance, [copy for copy in events.copies if copy not in events.saved])
        self._before_backward()
        gradient = self.list.numbers(1)
        self._start(gradient, 512)
        gradient = self._backward(head, gradient)
        self._let_go(loss_number)
        left: list[int] = []
        for number, stack in reversed(list(enumerate(stacks))):
            of_encoder = self.list.numbers(1)
            if number:  # cross attention adds to its gradient, layer by layer
                self._start(of_encoder, stacks[number - 1].result_bytes)
            gradient = self._stack_backward(stack, gradient)
            for done in seen:
                self._look_back(done, gradient)
            if self._holders.get(gradient):
                self._let_go(gradient)
            gradient = of_encoder
            if number == 0:
                self._free_hidden(_instances(stacks, seen))
            elif self._keeps_encoder_out:
                self._let_go(stacks[number - 1].result)
            self._embedding_backward(stack.step.model, head, accumulated=accumulated)
            if stack.embedded is not None and stack.step.leaf_embedding_bytes:
                self._let_go(stack.embedded.streams[0])
            self.list.die(*stack.around)
            left += self._left_by_decoder(number)
        self.list.die(*left)
        if outputs_held in ("until_loss", "until_backward"):
            self._drop_outputs()
        self.list.die(*batch)

    def _head_forward(
        self, stack: _Stack, *, accumulated: bool, first: bool
    ) -> tuple[Instance, int]:
        """The head on what `stack` hands on; the number of the loss."""
        block = self._head_block(accumulated=accumulated, first=first)
        head, loss_number = self._forward(block, stack.result)
        if 0 in head.block.events.saved:
            self._let_go(stack.result)
        return head, loss_number

    def _before_backward(self) -> None:
        """What is made once the loss is there."""

    def _left_by_decoder(self, number: int) -> list[int]:
        """Leaves of the graph and their gradients, once stack `number` has gone backward."""
        step = self.step
        if not (number and step.has_two_lengths):
            return []
        leaves = 2 * step.tokens * step.leaf_embedding_bytes
        return [self.list.born(int(step.masks.decoder_zeros_bytes + leaves))]

    @cached_property
    def _keeps_encoder_out(self) -> bool:
        """Whether an encoder's result lives while its decoder goes backward.

        It is an argument of checkpointed layers, and what trained cross attention saves.
        """
        step = self.step
        if step.has_two_lengths:
            return bool(step.saved_encoder_out)
        return bool(step.run.gradient_checkpointing) or any(
            linear.reads == ENCODER_OUT and (step.method.trains_base or linear.name in step.targets)
            for linear in self.layers[-1].linears
        )

    def _stack_forward(
        self, step: TrainingStep, seen: list[TowerPass], *, accumulated: bool, first: bool
    ) -> _Stack:
        """Embeddings, layers and, of an encoder, what ends it.

        Args:
            seen: gets the pass of a tower whose vectors the text reads.
        """

        def look() -> list[int]:
            done = self._look(accumulated=accumulated, first=first)
            if done is None:
                return []
            seen.append(done)
            return [self.list.born(step.tokens * step.model.hidden_size * PLACE_BYTES)]

        rows, stream, embedded = self._embed(step, look, accumulated=accumulated)
        around = self._shared(step)
        unnamed = [self.list.born(num_bytes) for num_bytes in step.masks.unnamed]
        instances: list[Instance] = []
        for block in self._asking_blocks(step, accumulated=accumulated, first=first and not seen):
            if step.run.gradient_checkpointing:
                self._holders[stream] += 1
            instance, result = self._forward(block, stream)
            instances.append(instance)
            self._let_go(stream)
            stream = result
        self.list.die(*unnamed)
        self._let_go(rows)
        for done in seen:
            self._leave_images(done)
        last = layers_in_order(step.model)[-1]
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
                block = self._block(step, events, input_bytes=size, result_bytes=size)
                end, result = self._forward(block, stream)
                self._let_go(stream)
                stream, size = result, block.sizes.by_tensor[events.result]
                block.sizes.by_tensor[events.result_gradient] = size
        return _Stack(step, embedded, instances, end, around, stream, size)

    def _asking_blocks(self, step: TrainingStep, *, accumulated: bool, first: bool) -> list[Block]:
        """`_blocks`; the first layer of a run asks for a workspace."""
        blocks = self._blocks(step, accumulated=accumulated)
        if not (first and self._workspace):
            return blocks
        asking = self._layer_block(
            step,
            layers_in_order(step.model)[0],
            needs_grad=step.gives_input_gradient and step.goes_backward,
            accumulated=accumulated,
            first=True,
        )
        return [asking, *blocks[1:]]

    def _stack_backward(self, stack: _Stack, gradient: int) -> int:
        """From the `gradient` of its result to that of the looked-up rows."""
        if stack.end is not None:
            gradient = self._backward(stack.end, gradient)
        for number, instance in enumerate(reversed(stack.instances)):
            if number == _EARLY_LAYERS:
                self._note_early()
            gradient = self._backward(instance, gradient)
            self._after_layer(instance)
        if stack.embedded is not None and stack.embedded.block.events.backward:
            gradient = self._backward(stack.embedded, gradient)
        return gradient

    def _note_early(self) -> None:
        """Full fine-tuning has no early part: states of its optimizer decide what is reserved."""
        if self.list.num_early is None and not self.step.method.trains_base:
            self.list.num_early = len(self.list.plays)

    def _free_hidden(self, instances: list[Instance]) -> None:
        """The graph goes, with what bypasses the saved-tensor hooks."""
        for instance in instances:
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

    def _embed(
        self, step: TrainingStep, look: Callable[[], list[int]], *, accumulated: bool
    ) -> tuple[int, int, Instance | None]:
        """Look the tokens up, as of `_embedded`."""
        model = step.model
        size = rounded(step.tokens * model.embeddings[0].width * step.dtypes.embedding_bytes)
        events = embedding_events(
            model,
            step.dtypes,
            step.method,
            step.targets,
            needs_grad=step.needs_grad and not step.adapts_table,  # what its adapter adds does
            accumulated=accumulated,
        )
        block = None
        if events is not None:
            result_bytes = self._stream_bytes(step, layers_in_order(model)[0])
            block = self._block(step, events, input_bytes=size, result_bytes=result_bytes)
        return self._embedded(
            block, model, rows_bytes=size, keeps_rows=bool(step.leaf_embedding_bytes), look=look
        )

    def _after_layer(self, instance: Instance) -> None:
        """A reentrant checkpoint names its result and the gradient of it until it returns."""
        if not (self.step.run.gradient_checkpointing and self.step.run.use_reentrant):
            return
        events = instance.block.events
        self._let_go(instance.streams[events.result])
        if events.input_gradient != events.result_gradient:
            self._let_go(instance.streams[events.result_gradient])

    def _embedding_backward(self, model: ModelSpec, head: Instance, *, accumulated: bool) -> None:
        """Gradients of a stack's tables, and the sum with that of a tied head, then an encoder's.

        Source: torch 2.13 `InputBuffer::accumulate`: in place, unless the head's is a view.
        """
        step, is_last = self.step, model is self.stacks[-1].model
        if step.gradients.left:  # is added to what earlier steps have left
            self.list.die(self.list.born(step.gradients.left))
        is_shared = len(self.stacks) > 1 and not model.splits_embeddings
        width = step.param_bytes if step.method.trains_base else step.dtypes.copy_bytes
        for table in self._trained_tables(model):
            size = table.num_elements * width
            gradient = self.list.born(size)
            if table is model.embeddings[0]:
                if is_last and step.gradients.tied_wait:
                    gradient = self._sum_of_tied(head, gradient, size, accumulated=accumulated)
                if is_last and is_shared:
                    self._waiting_gradient = gradient
                    continue
                if self._waiting_gradient is not None:
                    self.list.die(gradient)
                    gradient, self._waiting_gradient = self._waiting_gradient, None
            if accumulated:
                self._hook(gradient, rounded(size))
            else:
                self._table_gradients.append(gradient)

    def _sum_of_tied(self, head: Instance, gradient: int, size: int, *, accumulated: bool) -> int:
        """The number of the sum of `gradient` and of the head's."""
        in_place = self.step.gradients.adds_tied_in_place
        result = gradient if in_place else self.list.born(size)
        self._parameters = [pair for pair in self._parameters if pair[0] is not head]
        self._kill(head, head.block.events.parameters)
        if not in_place:
            self.list.die(gradient)
        return result

    def _shared(self, step: TrainingStep) -> list[int]:
        """Masks and rotary tables, which live to the end of the backward.

        Source: transformers 5.23 `LlamaModel.forward`.
        """
        rotary_bytes = activations.rotary_bytes(step.model, step.dtypes, span=step.seq_len)
        masks = [self.list.born(size) for size in step.masks.kept]
        return [*masks, *self._rotary(rotary_bytes, stream_bytes=step.dtypes.stream_bytes)]

    def optimizer_step(self, *, first: bool) -> None:
        """States are made by the first step; gradients go after it."""
        step = self.step
        kind, name = step.gpu.kind, step.run.optimizer
        if first:
            for tensors, times in self.trained:
                states = (
                    optimizer.state_blocks(tensor, optimizer=name, device_kind=kind)
                    for tensor in tensors
                )
                self.list.stay(itertools.chain.from_iterable(states), times)
        one_by_one = [tensor for tensors, times in self.trained for tensor in tensors * times]
        foreach = step.has_foreach
        for temporaries in optimizer.temporary_blocks(one_by_one, optimizer=name, foreach=foreach):
            self.list.pass_by(temporaries)
        if self._zeroes_gradients:
            return
        for instance, parameters in self._parameters:
            self._kill(instance, parameters)
        self._parameters.clear()
        self.list.die(*self._table_gradients)
        self._table_gradients.clear()

    @property
    def _zeroes_gradients(self) -> bool:
        """Those of a step are there in the next."""
        return self.step.run.versions.zeroes_gradients

    def whole_run(self) -> EventList:
        self.load()
        micro_steps = self.step.run.gradient_accumulation_steps
        for number in range(_STEPS):
            if self.step.trainer.gathers_batches:
                self._read_pixels(micro_steps)
            finds_zeros = number > 0 and self._zeroes_gradients
            self.micro_step(accumulated=finds_zeros, first=number == 0)
            if micro_steps > 1:
                self.micro_step(accumulated=True, first=False)
            self.optimizer_step(first=number == 0)
        return self.list


def _instances(stacks: list[_Stack], seen: list[TowerPass]) -> list[Instance]:
    """Every layer of a micro-step, and every block of a tower."""
    of_towers = [instance for done in seen for instance in done.blocks]
    return of_towers + [instance for stack in stacks for instance in stack.instances]


def _rows_of_modules(linear: Linear) -> list[int]:
    """Rows of each weight tensor of this name: experts in one parameter are one."""
    if linear.is_module:
        return [linear.out_features] * linear.count
    return [linear.count * linear.out_features]


def _is_fused_alone(step: TrainingStep) -> bool:
    """Whether TRL's fused head scores each row once, and no reference does."""
    forwards_once = step.trainer.sequences(step.run) == 1 and not step.has_reference
    return (
        step.run.loss_head == "trl-fused"
        and step.model.task == "causal-lm"
        and step.model.head is not None
        and forwards_once
        and step.dtypes.backend.has_triton
        and step.trainer.rollout(step.run) is None
    )


def _has_loss_events(step: TrainingStep) -> bool:
    """Whether what the loss makes is written: of Liger's, where there is a head to fuse."""
    loss_head = step.run.loss_head
    if loss_head == "liger":
        return step.model.task == "causal-lm" and step.model.head is not None
    return loss_head in ("hf", "raw") or _is_fused_alone(step)


def has_events(step: TrainingStep) -> bool:
    """Whether all of a step is written as events: one forward of layers that share nothing.

    Kind: exact. Source: what `StepEvents` leaves out.
    """
    model = step.model
    attentions = (attention for layer, _ in model.layers() for attention in layer.attentions)
    return (
        not any(attention.keeps_keys for attention in attentions)
        and not any(group.shared for group in model.groups)
        and model.layer_input_norm is None
        and (model.tower is None or not model.tower.attended)
        and model.streams is None
        and not step.num_idle_layers
        and _has_loss_events(step)
        and step.trainer.columns(step.run) is None
        and not step.method.in_loss
        and not step.frees_gradients
        and not step.run.trainer_option("use_cache")
    )


def training_events(step: TrainingStep) -> EventList:
    """Large requests of loading and two steps in order; small ones as a sum.

    Kind: exact as far as the blocks are. Source: the libraries' functions named above.
    """
    return StepEvents(step).whole_run()
