"""The events of a vision tower: before the layers of the text, and in training after them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whichlora.memory.allocator_simulator import rounded
from whichlora.memory.event_list import Block, BlockPlayer, Instance
from whichlora.memory.images import TowerStep
from whichlora.memory.step import TrainingStep
from whichlora.memory.towers import TowerForward
from whichlora.symbolic.layer import BlockEvents
from whichlora.symbolic.linear_form import evaluate
from whichlora.symbolic.projectors import projector_events

# Of each element of the text that vectors of images are put into: its place among them, and the
# mask. Source: torch 2.13 IndexKernel.cpp `masked_scatter__cuda`.
PLACE_BYTES = 8 + 1


@dataclass(slots=True)
class TowerPass:
    """One forward of a tower, and what is there of it until it has gone backward.

    Args:
        projectors: by the number of blocks before them; the text reads what the last one makes.
        named: by the model's forward until it returns.
        held: until the tower has gone backward.
        idle: blocks whose results nobody reads.
    """

    forward: TowerForward
    instances: list[Instance] = field(default_factory=list)
    projectors: list[tuple[int, Instance]] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    idle: list[Instance] = field(default_factory=list)

    @property
    def blocks(self) -> list[Instance]:
        """Every block and projector in the order of the forward."""
        return [*self.instances, *(instance for _, instance in self.projectors)]


class TowerForwardPlayer(BlockPlayer):
    """Plays the forward of a tower."""

    def _tower_forward(
        self,
        forward: TowerForward,
        blocks: Sequence[Block],
        projector: Block,
        *,
        masks: Sequence[int],
        step: TowerStep | None = None,
    ) -> TowerPass:
        """From the pixels to the vectors that the text reads.

        Args:
            masks: bytes of each that all blocks read.
            step: in which it goes backward, too.

        Source: transformers 5.23 `Qwen2_5_VLModel.get_image_features`,
        `Qwen2_5_VisionTransformerPretrainedModel.forward`.
        """
        done, tower = TowerPass(forward), forward.tower
        narrow = [self.list.born(size) for size in forward.narrow_tensors]
        stream = self._patches(forward)
        tables = [
            self.list.born(forward.num_patches * forward.table_bytes),
            *(self.list.born(size) for size in masks),
        ]
        inside = [self.list.born(4 * forward.num_patches * tower.positions), *narrow]
        if step is not None and step.goes_backward:
            done.held += [self.list.born(_saved_around(step)), *tables]
        else:
            inside += tables
        embedded = self._name_embedded(forward, stream)
        checkpointed = step is not None and bool(step.run.gradient_checkpointing)
        deep = _deep_places(len(blocks), tower.deep)
        for number, block in enumerate(blocks):
            if checkpointed and block.events.backward:
                self._holders[stream] += 1
            instance, result = self._forward(block, stream)
            done.instances.append(instance)
            self._let_go(stream)
            stream = result
            if number in deep:
                self._project(done, projector, stream)
        if tower.runs_idle:
            self._run_idle(done, blocks[-1], stream)
        if not tower.names_embedded:
            self._let_go_of(embedded)
        self._project(done, projector, stream)
        self._name_results(done, stream)
        self._let_go(stream)
        if tower.names_embedded:
            self._let_go_of(embedded)
        self.list.die(*inside)
        return done

    def _name_embedded(self, forward: TowerForward, stream: int) -> list[int]:
        """Embedded patches that the tower's forward names while its blocks run.

        Source: as of `Tower.num_embedded`.
        """
        if not forward.tower.num_embedded:
            return []
        self._holders[stream] += 1
        others = [self.list.numbers(1) for _ in range(forward.tower.num_embedded - 1)]
        for number in others:
            self._start(number, rounded(forward.state_bytes))
        return [stream, *others]

    def _let_go_of(self, numbers: list[int]) -> None:
        for number in numbers:
            self._let_go(number)

    def _patches(self, forward: TowerForward) -> int:
        """Embed them; the number of the first block's input."""
        tower, width = forward.tower, forward.tower.stack.hidden_size
        narrow, wide = (elements // width for elements in tower.embedded)
        element_bytes = [forward.dtypes.base_bytes] * narrow + [4] * wide
        read = 0 if tower.holds_narrow else forward.narrow_bytes
        pixels = self.list.born(read)
        made = [self.list.born(forward.num_patches * width * size) for size in element_bytes[:1]]
        self.list.die(pixels)
        # the last of them is the result
        made += [self.list.born(forward.num_patches * width * size) for size in element_bytes[1:-1]]
        stream = self.list.numbers(1)
        self._start(stream, rounded(forward.state_bytes))
        self.list.die(*made)
        return stream

    def _project(self, done: TowerPass, block: Block, stream: int) -> None:
        """Run a projector on `stream`, which its caller holds."""
        instance, vectors = self._forward(block, stream)
        done.named.append(vectors)
        done.projectors.append((len(done.instances), instance))

    def _run_idle(self, done: TowerPass, block: Block, stream: int) -> None:
        """A block whose result nobody reads: all of it goes when the model's forward returns.

        Source: as of `TowerStep.idle_block`.
        """
        instance, result = self._forward(block, stream)
        done.named.append(result)
        if instance.block.events.backward:
            done.idle.append(instance)

    def _leave_images(self, done: TowerPass) -> None:
        """The model's forward returns, and its variables go."""
        for number in done.named:
            self._let_go(number)
        for instance in done.idle:
            events = instance.block.events
            kept = events.saved | events.hidden
            self._kill(instance, sorted(kept - instance.streams.keys()))
            for tensor in sorted(kept & instance.streams.keys()):
                self._let_go(instance.streams[tensor])

    def _name_results(self, done: TowerPass, stream: int) -> None:
        """What the model's forward names of the tower: states, vectors and their copies."""
        forward, tower = done.forward, done.forward.tower
        size = rounded(forward.state_bytes)
        for number in range(tower.num_returned - tower.runs_idle):
            if number == 0 and forward.result_bytes == forward.stream:
                self._holders[stream] += 1
                done.named.append(stream)
                continue
            returned = self.list.numbers(1)
            self._start(returned, size)
            done.named.append(returned)


class TowerPlayer(TowerForwardPlayer):
    """Plays the forward and the backward of the tower of a step, if its model has one."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.step = step
        self._pixels: list[int] = []

    @cached_property
    def tower(self) -> TowerStep | None:
        """The tower in the step."""
        tower = self.step.model.tower
        return None if tower is None else TowerStep.of(self.step, tower)

    def _asking_blocks(self, step: TrainingStep, *, accumulated: bool, first: bool) -> list[Block]:
        """Those of all layers of `step`; `first` of the run, they ask for a workspace."""
        raise NotImplementedError

    def _after_layer(self, instance: Instance) -> None:
        """What goes when `instance` has gone backward."""
        raise NotImplementedError

    def _read_pixels(self, num_batches: int) -> None:
        """The next batches are there before a variable lets go of those that it names.

        Source: transformers 5.23 `Trainer._run_epoch`: `batch_samples`, of all micro-steps.
        """
        sizes = () if self.tower is None else self.tower.forward.pixel_tensors
        pixels = [self.list.born(size) for size in sizes * num_batches]
        self.list.die(*self._pixels)
        self._pixels = pixels

    def _look(self, *, accumulated: bool, first: bool) -> TowerPass | None:
        """The tower's forward, and copies of its vectors that the model's forward names.

        Source: transformers 5.23 `Qwen2_5_VLModel.forward`.
        """
        tower = self.tower
        if tower is None:
            return None
        done = self._tower_forward(
            tower.forward,
            self._asking_blocks(tower, accumulated=accumulated, first=first),
            self._projector_block(tower, accumulated=accumulated),
            masks=tower.masks.kept,
            step=tower,
        )
        for _ in range(tower.tower.copies):
            copy = self.list.numbers(1)
            self._start(copy, self._vector_bytes(tower))
            done.named.append(copy)
        return done

    def _vector_bytes(self, tower: TowerStep) -> int:
        """Of all vectors in the text."""
        width = self.step.model.hidden_size * self.step.layers[0].stream_bytes
        return rounded(tower.forward.num_vectors * width)

    def _look_back(self, done: TowerPass, gradient: int) -> None:
        """The tower's backward, behind the layers of the text.

        Args:
            gradient: of the looked-up rows if they need one, else of what the first layer reads.

        Source: torch 2.13 derivatives.yaml `masked_scatter`.
        """
        tower = self.tower
        if tower is not None and self.step.learns_from_images:
            of_vectors = self.list.numbers(1)
            self._start(of_vectors, self._vector_bytes(tower))
            if not self.step.needs_grad:
                self._let_go(gradient)
            self._tower_backward(tower, done, of_vectors)
        self.list.die(*done.held)

    def _projector_block(self, tower: TowerStep, *, accumulated: bool) -> Block:
        forward = tower.forward
        events = projector_events(
            tower.tower,
            tower.targets,
            tower.dtypes,
            tower.method,
            needs_grad=tower.goes_backward,
            accumulated=accumulated,
            stream=forward.stream,
            kept=forward.kept,
        )
        return projector_block(forward, events)

    def _tower_backward(self, tower: TowerStep, done: TowerPass, gradient: int) -> None:
        """From the `gradient` of the vectors to that of what embeds the patches."""
        *deep, (_, last) = done.projectors
        gradient = self._backward(last, gradient)
        if not tower.goes_backward:
            return
        waiting = dict(deep)
        for number in range(len(done.instances), 0, -1):
            if number in waiting:
                self._add_gradient(waiting[number])
            gradient = self._backward(done.instances[number - 1], gradient)
            self._after_layer(done.instances[number - 1])
        if self._holders.get(gradient):
            self._let_go(gradient)

    def _add_gradient(self, projector: Instance) -> None:
        """A deep projector's backward, whose gradient is added to that of the block before it."""
        block, of_vectors = projector.block, self.list.numbers(1)
        self._start(of_vectors, block.sizes.by_tensor[block.events.result])
        added = self._backward(projector, of_vectors)
        if self._holders.get(added):
            self._let_go(added)


def projector_block(forward: TowerForward, events: BlockEvents) -> Block:
    """The projector behind the blocks of `forward`, with its bytes."""
    sizes = forward.of_vectors
    made = (form for tensor, form in events.forward if tensor == events.result and form)
    return Block(
        events,
        sizes,
        input_bytes=rounded(forward.state_bytes),
        result_bytes=rounded(evaluate(next(made), **sizes)),
    )


def _saved_around(tower: TowerStep) -> int:
    """What embeds the patches saves, without the tables that all blocks read."""
    tables = tower.forward.num_patches * tower.forward.table_bytes
    return max(0, int(tower.around_blocks.num_bytes - tables))


def _deep_places(num_blocks: int, deep: int) -> set[int]:
    """Numbers of the blocks whose results further projectors read: evenly among all."""
    return {(place + 1) * num_blocks // (deep + 1) - 1 for place in range(deep)}


def trained_matrices(tower: TowerStep) -> Iterator[int]:
    """Elements of what is trained around the blocks of a tower, one by one."""
    linears = (linear for linear in tower.model.head_linears if linear.is_module)
    yield from itertools.chain.from_iterable(
        [linear.out_features * linear.in_features] * linear.count for linear in linears
    )
    yield tower.model.other_params
