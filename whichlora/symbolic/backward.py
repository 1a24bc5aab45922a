"""The backward of a tape, node by node: when each gradient and temporary is born and dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.symbolic.graph import FP32_BYTES, Node, PackedEvent, Tensor
from whichlora.symbolic.traffic import KernelCounts

if TYPE_CHECKING:
    from whichlora.symbolic.autograd import Tape


class Backward:
    """One pass from the result to the input.

    Attributes:
        points: bytes alive at the points that can be the largest.
        events: births and deaths in order. The gradient of the result and those that later blocks
            have gathered are there before, with what is saved unless it is recomputed; what
            `parameters` and `input_gradient` name stays alive.
        result_gradient, gathered, input_gradient, parameters: numbers of gradients in `events`.
        summed: those of parameters that end there, added to what there is.
        counts: its kernels; `repeated` those of a forward that runs again.
    """

    def __init__(
        self, tape: Tape, *, recomputed: bool, early_stop: bool, accumulated: bool, meets: bool
    ) -> None:
        self._tape = tape
        self._forms = tape.forms
        self._accumulated = accumulated
        self._meets = meets
        self._holders: dict[int, int] = {}  # nodes that keep a storage
        for node in tape.nodes:
            for storage in set(node.saved):
                self._holders[storage] = self._holders.get(storage, 0) + 1
        result = tape.nodes[-1].results[0]
        self._shares: dict[int, int] = {}  # holders of one gradient's storage
        self._sizes: dict[int, int] = {}
        self._views: set[int] = set()
        self._bases: dict[int, int] = {}  # of views that are no whole storage
        self._next = 0
        self.events: list[PackedEvent] = []
        self.parameters: list[int] = []
        self.summed: list[int] = []
        self.result_gradient = self._new(result.packed)
        self._buffers: dict[int, int] = {result.edge: self.result_gradient}
        self.live = result.packed
        self.gathered: list[int] = []
        for tensor in tape.gathered_tensors:
            self._buffers[tensor.edge] = self._new(tensor.packed)
            self.gathered.append(self._buffers[tensor.edge])
            self.live += tensor.packed
        self.points = [self.live]
        self._held: set[int] = set()  # not freed by the backward of a checkpointed block
        if recomputed:
            self._held = {0, *tape.saved_storages(hidden=True)}
        self._held_again: frozenset[int] = frozenset()  # by later layers, since it was made again
        if recomputed:
            self._held_again = tape.storages_held(graph=early_stop)
        self._num_packed = sum(bool(node.saved) and not node.hidden for node in tape.nodes)
        self._hidden_again: list[int] = []
        self.is_recomputed = False
        self.counts, self.repeated = KernelCounts(), KernelCounts()

    @property
    def num_made(self) -> int:
        """Gradients and temporaries."""
        return -self._next

    @property
    def input_gradient(self) -> int | None:
        """None where the input needs no gradient."""
        return self._buffers.get(self._tape.input_edge)

    def _new(self, form: int) -> int:
        self._next -= 1
        self._sizes[self._next] = form
        self._shares[self._next] = 1
        return self._next

    def _born(self, form: int) -> int:
        gradient = self._new(form)
        self.live += form
        self.events.append((gradient, form))
        return gradient

    def _part(self, gradient: int, form: int) -> int:
        """A view of a part of `gradient`, which holds all of it."""
        view = self._new(form)
        self._bases[view] = gradient
        self._shares[gradient] += 1
        return view

    def _release(self, gradient: int) -> None:
        self._shares[gradient] -= 1
        if not self._shares[gradient] and gradient in self._bases:
            self._release(self._bases[gradient])
        elif not self._shares[gradient]:
            self.live -= self._sizes[gradient]
            self.events.append((gradient, None))

    def recompute(self, stop: int | None) -> None:
        """Run the forward again until `stop`."""
        tape = self._tape
        self.repeated = tape.kernel_counts(tape.steps[:stop])
        self.points += [self.live + point for point in tape.forward_points(saving=True, stop=stop)]
        nodes = [node for node in tape.nodes if not node.hidden]
        saved = {storage for node in nodes for storage in node.saved} - {0} | self._held_again
        self.live += sum(self._forms[storage] for storage in saved)
        events = tape.forward_events(saving=True, again=True, stop=stop)
        renamed: dict[int, int] = {}  # temporaries, and copies of what the first forward hid
        dies_again = {tensor for tensor, form in events if form is None}
        again = self._held | (dies_again & {tape.result})  # the caller has the first result
        for tensor, form in events:
            if tensor < 0 or tensor in again:
                renamed[tensor] = renamed[tensor] if form is None else self._new(form)
            self.events.append((renamed.get(tensor, tensor), form))
        self._hidden_again = [
            renamed[storage] for storage in sorted(self._held) if storage in renamed
        ]
        if stop is not None:  # nobody goes back through these nodes
            self.drop_hidden()
        self.is_recomputed = True

    def drop_hidden(self) -> None:
        """The recomputed graph goes, with what bypasses the saved-tensor hooks."""
        self.events += [(number, None) for number in self._hidden_again]
        self._hidden_again = []

    def drop_held_again(self) -> None:
        """Free the arguments of later layers, at the end of the first layer's backward."""
        self.events += [(storage, None) for storage in sorted(self._held_again)]

    def hold_results(self, last: Node) -> None:
        """Local variables of a reentrant checkpoint hold results and gradients to the end.

        Source: torch 2.13 `CheckpointFunction.backward`: `outputs`, `args`.
        """
        self._shares[self.result_gradient] += 1
        for result in (last.results[0].storage, *self._tape.further_results):
            if result >= 0 and not self._holders.get(result):
                self.live += self._forms[result]

    def run(self, node: Node, *, unpacks_once: bool) -> None:
        """Pass the gradients of `node`'s results on to its inputs.

        Args:
            unpacks_once: what it saved goes when its backward has returned, since a checkpoint's
                hooks hand a tensor out once; else `release_variables` comes after the casts of
                `validate_outputs`.
        """
        gradients = [
            self._buffers.pop(tensor.edge)
            for tensor in node.results
            if tensor.edge in self._buffers
        ]
        if not gradients:
            return
        wide: dict[int, int] = {}  # sums in fp32, by the edge of what they are a gradient of
        if node.sums_wide:
            wide = {tensor.edge: self._born(tensor.packed_in_fp32) for tensor in node.inputs}
        temporaries = [self._new(form) for _, form in node.inner.events if form is not None]
        self.events += [(temporaries[place], form) for place, form in node.inner.events]
        self.points += [self.live + peak for peak in node.inner.peaks]
        input_gradients: list[tuple[Tensor, int]] = []
        if node.overwrites:
            self._free_saved(node)
        for tensor in node.inputs:
            form = tensor.packed
            if node.passes and self._sizes[gradients[0]] == form:
                self._shares[gradients[0]] += 1
                input_gradients.append((tensor, gradients[0]))
            elif node.narrows and tensor.size == node.results[0].size:
                input_gradients.append((tensor, self._part(gradients[0], form)))
            else:
                is_summed = node.sums_wide and tensor.size == FP32_BYTES
                gradient = wide.pop(tensor.edge) if is_summed else self._born(form)
                input_gradients.append((tensor, gradient))
                if node.reshapes:
                    self._views.add(gradient)
        self._count(node, [self._sizes[gradient] for gradient in gradients], input_gradients)
        casts_late = node.casts if unpacks_once else 0
        self.points.append(self.live + node.inner.left_bytes - casts_late)
        for number in wide.values():
            self._release(number)
        self.events += [(temporaries[place], None) for place in node.inner.left]
        if not node.overwrites:
            self._free_saved(node)
        if casts_late:
            self.points.append(self.live + node.inner.left_bytes)
        if node.saved and not node.hidden:
            self._num_packed -= 1
            if self.is_recomputed and not self._num_packed:
                self.events.append((0, None))  # the frame of the checkpoint goes
        for gradient in gradients:
            self._release(gradient)
        for tensor, gradient in input_gradients:
            self._deliver(tensor, gradient)

    def _count(
        self, node: Node, gradients: Sequence[int], input_gradients: Sequence[tuple[Tensor, int]]
    ) -> None:
        """What the kernels of one node move: each reads its gradient and writes another one."""
        handed_on = node.passes or node.narrows
        written = [
            tensor.packed
            for tensor, gradient in input_gradients
            if not (handed_on and (gradient in self._bases or self._shares[gradient] > 1))
        ]
        if node.multiplies:
            self.counts.add(0, 0, len(written))
            return
        read = saved = 0
        if written and not node.picks:
            read = len(written) * sum(gradients)
            saved = sum(self._forms[storage] for storage in node.saved) + node.read_elsewhere
        leaf_bytes = sum(tensor.packed for tensor, _ in input_gradients if tensor.is_leaf)
        moved = read + saved + sum(written) + node.inner.moved
        passing = moved - saved - leaf_bytes
        self.counts.add(moved, passing, len(written) + node.inner.kernels)

    def _free_saved(self, node: Node) -> None:
        for storage in sorted(set(node.saved)):
            self._holders[storage] -= 1
            if not self._holders[storage] and storage not in self._held | self._held_again:
                self.live -= self._forms[storage]
                self.events.append((storage, None))

    def _deliver(self, tensor: Tensor, gradient: int) -> None:
        if tensor.is_leaf:
            if self._meets and gradient in self._views:
                # `InputBuffer::accumulate`, as below: the other one is a view, too
                total = self._born(tensor.packed)
                self.points.append(self.live)
                self._release(total)
            if self._accumulated:
                self._count_sum(tensor)
                if gradient not in self._bases:
                    self.summed.append(gradient)
                self._release(gradient)
            else:
                self.parameters.append(gradient)
            return
        before = self._buffers.get(tensor.edge)
        if before is None:
            self._buffers[tensor.edge] = gradient
            return
        self._count_sum(tensor)
        # Source: torch 2.13 `InputBuffer::accumulate`; a view's base holds the storage, too.
        if self._shares[before] == 1 and before not in self._views:
            self._release(gradient)
            return
        self._buffers[tensor.edge] = self._born(tensor.packed)
        self.points.append(self.live)
        self._release(before)
        self._release(gradient)

    def _count_sum(self, tensor: Tensor) -> None:
        """Two gradients of `tensor` are added up."""
        self.counts.add(3 * tensor.packed, 2 * tensor.packed)
