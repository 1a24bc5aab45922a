"""The requests of a rank under FSDP's version 1 in order: shards, gathered units, their gradients.

What a rank computes is the step of one device; units are gathered in a stream of their own.

Source: torch 2.13 `torch/distributed/fsdp/_runtime_utils.py`, `_flat_param.py`, `_init_utils.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.memory import optimizer
from whichlora.memory.event_list import Block, Instance, block_bytes
from whichlora.memory.gradients import Trained
from whichlora.memory.step import TrainingStep
from whichlora.parallel.rank_events import Drop, RankEvents
from whichlora.spec.architecture import ModelSpec

_IN_FLIGHT = 2  # `_FreeEventQueue`: gathers wait for the end of what was freed two before


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of one unit.

    Args:
        parameters: as they are kept, each whole.
        shard: of all of them, as they are kept.
        gathered: as kernels read them.
        gradients: as the backward makes them; 0 where leaves inside are units of their own.
        gradient_shard: as the optimizer reads them.
    """

    parameters: tuple[int, ...]
    shard: int
    gathered: int
    gradients: int
    gradient_shard: int


class UnitEvents(RankEvents):
    """The events of one rank.

    Kind: estimate of when a stream is done with what Python has freed.

    Args:
        layers: units in the order of the forward.
        root: what is outside of them.
        whole: bytes that nobody divides, buffers among them.
        trained: what the optimizer updates of a rank.
        prefetches: the next unit of the backward is gathered ahead.
        keeps_leaves: the input of every block but the first, and its gradient, stay to the end.
    """

    def __init__(
        self,
        step: TrainingStep,
        layers: Sequence[UnitBytes],
        root: UnitBytes,
        *,
        whole: Sequence[int],
        trained: Sequence[Trained],
        prefetches: bool,
        keeps_leaves: bool,
    ) -> None:
        super().__init__(step)
        self._layers, self._root, self._whole = layers, root, whole
        self._updated = [tensor for tensor in trained for _ in range(int(tensor.count))]
        self._prefetches, self._keeps_leaves = prefetches, keeps_leaves
        self._leaves: list[int] = []
        self._gathered: dict[int, tuple[int, int]] = {}
        self._freed: deque[Drop] = deque()
        self._place = -1  # of the layer that runs; their number for the head
        self._is_forward = False
        self._waiting: list[int] = []  # gradients of the unit, each by itself
        self._of_root: list[int] = []
        self._shards: list[Drop] = []  # of gradients

    # --- wrapping -------------------------------------------------------------------------------

    def load(self) -> None:
        """Each unit goes to the GPU, is joined to one vector, and leaves a shard."""
        self.list.stay(self._whole)
        for unit in (*self._layers, self._root):
            parameters = [self.list.born(size) for size in unit.parameters]
            joined = self.list.born(sum(unit.parameters))
            self.list.die(*parameters)
            self.list.stay([unit.shard])
            self.list.die(joined)

    # --- gathering ------------------------------------------------------------------------------

    def _gather(self, place: int) -> None:
        if place in self._gathered:
            return
        if len(self._freed) >= _IN_FLIGHT:
            self._freed.popleft()()
        unit = self._root if place < 0 else self._layers[place]
        number, size = self.list.numbers(1), block_bytes(unit.gathered)
        self.list.play_aside([(number, size)])
        self._gathered[place] = number, size

    def _free(self, place: int) -> None:
        """The kernels still read it: its block is there again once a later gather has waited."""
        self._freed.append(self.list.let_go_aside(*self._gathered.pop(place)))

    def micro_step(self, *, accumulated: bool, first: bool) -> None:
        for drop in self._shards:  # views of them live to the next forward
            drop()
        self._shards.clear()
        self._place, self._is_forward = -1, True
        self._gather(-1)
        super().micro_step(accumulated=True, first=first)
        self._let_go_of(self._leaves)
        self._leaves.clear()
        self._join(self._root, self._of_root)
        self._free(-1)
        for drop in self._freed:
            drop()
        self._freed.clear()

    def _before_backward(self) -> None:
        self._is_forward = False

    def _forward(self, block: Block, stream: int) -> tuple[Instance, int]:
        if self._looks_up:
            return super()._forward(block, stream)
        self._place += 1
        if self._place < len(self._layers):
            self._gather(self._place)
            self._keep_leaf(stream)
        done = super()._forward(block, stream)
        if self._place < len(self._layers):
            self._free(self._place)
        return done

    def _keep_leaf(self, number: int) -> None:
        if self._keeps_leaves and self._place > 0:
            self._holders[number] += 1
            self._leaves.append(number)

    def _backward(self, instance: Instance, gradient: int) -> int:
        place = self._place
        is_layer = 0 <= place < len(self._layers)
        if is_layer:
            self._gather(place)
        if self._prefetches and place > 0:
            self._gather(place - 1)
        made = super()._backward(instance, gradient)
        if is_layer:
            self._keep_leaf(made)
        self._place -= 1
        if is_layer:
            self._join(self._layers[place], self._waiting)
            self._free(place)
        return made

    # --- gradients ------------------------------------------------------------------------------

    def _hook(self, gradient: int, size: int) -> None:
        """The views of a flat parameter wait for each other; leaves of PEFT are units."""
        if not self.step.method.trains_base:
            self.list.die(gradient)
            return
        is_layer = 0 <= self._place < len(self._layers)
        (self._waiting if is_layer else self._of_root).append(gradient)

    def _join(self, unit: UnitBytes, gradients: list[int]) -> None:
        """`SplitWithSizesBackward` joins them; the vector goes once it has been reduced."""
        if unit.gradients:
            joined = self.list.born(unit.gradients)
            self.list.die(*gradients)
            gradients.clear()
            self._shards.append(self._born(unit.gradient_shard))
            self.list.die(joined)
        elif unit.gradient_shard:
            self._shards.append(self._born(unit.gradient_shard))

    # --- the update -----------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        step = self.step
        kind, name = step.gpu.kind, step.run.optimizer
        self._parameters.clear()
        if first:
            for tensor in self._updated:
                self.list.stay(optimizer.state_blocks(tensor, optimizer=name, device_kind=kind))
        foreach = step.has_foreach
        for blocks in optimizer.temporary_blocks(self._updated, optimizer=name, foreach=foreach):
            self.list.pass_by(blocks)

    def _embedding_backward(self, model: ModelSpec, head: Instance, *, accumulated: bool) -> None:
        self._place = -1
        super()._embedding_backward(model, head, accumulated=accumulated)
