"""The requests of a rank under ZeRO stages 1 and 2 in order: flat groups, buckets, the update.

What a rank computes is the step of one device; gradients leave it as hooks reduce them.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cached_property, partial

from whichlora.memory.allocator_simulator import rounded
from whichlora.memory.event_list import EventList, play_loading
from whichlora.memory.weights import weight_bytes
from whichlora.parallel import deepspeed
from whichlora.parallel.deepspeed import MASTER_BYTES, NORM_BYTES, Partitioned
from whichlora.parallel.rank_events import Drop, ZeroEvents, rank_requests


class FlatEvents(ZeroEvents):
    """The events of one rank, of which the first flat group holds most.

    Args:
        partitions_gradients: stage 2, in which each gradient is reduced as it comes.
    """

    def __init__(self, part: Partitioned, *, partitions_gradients: bool) -> None:
        super().__init__(part)
        self._partitions_gradients = partitions_gradients
        self._buckets: list[int] = []
        self._reduces = False  # hooks reduce what they get
        self._is_boundary = False
        self._filled = self._place = 0  # elements of the bucket, of the flat group so far
        self._direction = 1
        self._slices: list[tuple[int, int]] = []  # of the bucket: rank and elements
        self._waiting: Drop | None = None  # of a gradient that is larger than the bucket
        self._others: list[Drop] = []  # such ones of other ranks, in stage 1
        self._summed: deque[Drop] = deque()  # what earlier micro-steps left of each, in order
        self._partition: Drop | None = None  # of the buffer that holds this rank's gradients
        self._earlier: Drop | None = None  # the same of earlier micro-steps

    # --- flat groups ----------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each parameter: those that decay, and norms and biases of a trained base."""
        decayed: list[int] = []
        plain: list[int] = []
        for tensors, times in self.trained:
            for tensor in tensors * times:
                is_plain = self.step.method.trains_base and tensor.rows == 1
                (plain if is_plain else decayed).append(int(tensor.num_params))
        return tuple(group for group in (tuple(filter(None, decayed)), tuple(plain)) if sum(group))

    @cached_property
    def _shares(self) -> tuple[int, ...]:
        """Elements of each group in one rank's partition."""
        ranks = self._part.spread.size
        return tuple(int(deepspeed.partition_elements(sum(sizes), ranks)) for sizes in self._groups)

    @cached_property
    def rank(self) -> int:
        """That which needs most for the norm; with offloading the last with the largest piece."""
        pieces = list(deepspeed.pieces_of_ranks(self._groups[0], self._shares[0]))
        if self._on_host:
            return max(pieces, key=lambda piece: (piece[2], piece[0]))[0]
        return deepspeed.rank_at_norm(pieces)

    @cached_property
    def _pieces(self) -> list[list[tuple[int, int]]]:
        """Elements of each parameter of the rank's partition, and those in it, by group."""
        return [
            [
                (size, overlap)
                for rank, size, overlap in deepspeed.pieces_of_ranks(sizes, share)
                if rank == self.rank
            ]
            for sizes, share in zip(self._groups, self._shares, strict=True)
        ]

    @cached_property
    def _matrix_blocks(self) -> frozenset[int]:
        """Bytes of gradients of the first group."""
        return frozenset(rounded(size * self._part.width) for size in set(self._groups[0]))

    # --- the engine starts ----------------------------------------------------------------------

    def load(self) -> None:
        """Weights, then flat groups in their place, and what the optimizer holds of them.

        A group is flattened on the host, or the cache is emptied before the next is: its old
        tensors leave nothing but adapters, which are the only group.
        """
        step, part = self.step, self._part
        flat = [share * part.spread.size * part.width for share in self._shares]
        if step.method.trains_base:
            self.list.stay(flat)
            rest = sum(weight_bytes(step.model, step.dtypes).values())
            self.list.stay([max(0, rest - sum(map(sum, self._groups)) * part.width)])
        else:
            play_loading(self.list, step.model, step.dtypes)
            adapters = [
                self.list.born(tensor.num_params * part.width)
                for tensors, times in self.trained
                for tensor in tensors * times
            ]
            self.list.stay(flat)
            self.list.die(*adapters)
        for number, share in enumerate(self._shares, 1):
            if number < len(self._shares):  # the next group empties the cache
                self.list.stay([share * MASTER_BYTES * (not self._on_host)])
                continue
            clone = self.list.born(share * part.width)
            self.list.stay([share * MASTER_BYTES * (not self._on_host)])
            self.list.die(clone)
        if self._on_host:  # `temp_grad_buffer_for_gpu_offload`
            self.list.stay([max(map(max, self._groups)) * part.width])
        else:  # `initialize_optimizer_states`
            self.list.pass_by([share * MASTER_BYTES for share in self._shares])

    # --- gradients ------------------------------------------------------------------------------

    def micro_step(self, *, accumulated: bool, first: bool) -> None:
        """A forward and a backward, whose gradients are reduced as they come, or at its end."""
        self._is_boundary = accumulated or self.step.run.gradient_accumulation_steps == 1
        reduces_last = self._is_boundary and self._overlaps
        self._reduces = self._partitions_gradients or reduces_last
        self._begin_at(sum(self._groups[0]), -1)
        one_by_one = accumulated or self._reduces
        if reduces_last and not self._partitions_gradients:
            self._summed.extend(drop for _, drop in self._take_gradients())
        super().micro_step(accumulated=one_by_one, first=first)
        if self._partitions_gradients or self._is_boundary:
            self._end_backward()

    def _begin_at(self, place: int, direction: int) -> None:
        self._place, self._direction = place, direction

    def _before_backward(self) -> None:
        """The first gradient makes buckets: here where no hook tells of it."""
        if not self._reduces:
            self._set_up_buckets()

    def _set_up_buckets(self) -> None:
        if not self._buckets:
            size = self._bucket_elements * self._part.width
            self._buckets = [self.list.born(size) for _ in range(1 + self._overlaps)]

    def _hook(self, gradient: int, size: int) -> None:
        """`reduce_ready_partitions_and_remove_grads`."""
        if not self._reduces:
            self.list.die(gradient)
        elif self._summed:  # a sum lies where the first of them was
            self.list.die(gradient)
            self._put_into_bucket(size, self._summed.popleft())
        else:
            self._put_into_bucket(size, lambda: self.list.die(gradient))

    def _put_into_bucket(self, size: int, drop: Drop) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`, of a gradient that `drop` frees."""
        self._set_up_buckets()
        elements = size // self._part.width
        if self._filled + elements > self._bucket_elements:
            self._reduce()
        if elements > self._bucket_elements:
            self._waiting = drop
        else:
            drop()
        self._filled += elements
        if size in self._matrix_blocks:
            self._note_slices(elements)

    def _note_slices(self, elements: int) -> None:
        """To which ranks the next parameter of the first group belongs."""
        start = self._place if self._direction > 0 else self._place - elements
        self._place += self._direction * elements
        for rank, inside in deepspeed.ranks_between(start, start + elements, self._shares[0]):
            before = self._slices.pop()[1] if self._slices and self._slices[-1][0] == rank else 0
            self._slices.append((rank, before + inside))

    def _reduce(self) -> None:
        """`reduce_ipg_grads`: what the bucket holds is summed over ranks, and this rank's kept."""
        for size in self._joined():
            self._born(size * self._part.width)()
        mine = [elements for rank, elements in self._slices if rank == self.rank]
        if mine and self._on_host and self._is_boundary:
            for elements in mine:
                self.list.pass_by([elements * NORM_BYTES])
                if self.step.dtypes.libraries.widens_overflow_check:
                    self.list.pass_by([elements * size for size in deepspeed.OVERFLOW_BYTES])
                self.list.pass_by([elements * MASTER_BYTES])
        elif mine and not self._on_host and self._partition is None:
            whole = sum(size for pieces in self._pieces for size, _ in pieces)
            self._partition = self._born(whole * self._part.width)
        if self._waiting is not None:
            if mine or self._partitions_gradients:
                self._waiting()
            else:
                self._others.append(self._waiting)
            self._waiting = None
        self._slices.clear()
        self._filled = 0

    def _joined(self) -> Iterable[int]:
        """Elements of each copy that puts slices of the bucket side by side.

        Source: deepspeed 0.19.8 `allreduce_and_scatter`; torch 2.13 `flatten_dense_tensors`, which
        copies no single tensor.
        """
        together = number = 0
        for _, elements in self._slices:
            together += elements
            number += 1
            if together > self._bucket_elements:
                if number > 1:
                    yield together
                together = number = 0
        if number > 1:
            yield together

    def _end_backward(self) -> None:
        """`independent_gradient_partition_epilogue`; stage 1 reduces all gradients before it."""
        if not self._reduces:
            self._begin_at(0, 1)
            for size, drop in reversed(self._take_gradients()):
                self._put_into_bucket(size, drop)
        self._reduce()
        for drop in (*self._others, *self._summed):
            drop()
        self._others.clear()
        self._summed.clear()
        self.list.die(*self._buckets)
        self._buckets.clear()
        if self._earlier is None:
            self._earlier = self._partition
        elif self._partition is not None:
            self._partition()
        self._partition = None

    def _take_gradients(self) -> list[tuple[int, Drop]]:
        """Bytes of each gradient that parameters hold, in backward order, and what frees it."""
        taken: list[tuple[int, Drop]] = []
        for instance, tensors in self._parameters:
            for tensor in tensors:
                size = instance.block.sizes.by_tensor[tensor]
                taken.append((size, partial(self._kill, instance, (tensor,))))
        table = self.step.model.embeddings[0].num_elements * self._part.width
        taken += [
            (rounded(table), partial(self.list.die, number)) for number in self._table_gradients
        ]
        self._parameters.clear()
        self._table_gradients.clear()
        return taken

    # --- the update -----------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        """`DeepSpeedZeroOptimizer.step`: overflow, norm, then one group after another."""
        if self._on_host:
            return
        step, width = self.step, self._part.width
        sizes = [overlap for pieces in self._pieces for _, overlap in pieces]
        if deepspeed.checks_in_fp32(step):
            for elements in sizes:
                self.list.pass_by([elements * size for size in deepspeed.OVERFLOW_BYTES])
        for elements in sizes:
            self.list.pass_by([elements * NORM_BYTES])
        for number, (pieces, share) in enumerate(zip(self._pieces, self._shares, strict=True), 1):
            flat = [self.list.born(share * width)] if len(pieces) > 1 else []
            wide = self.list.born(share * MASTER_BYTES)
            self.list.die(*flat)
            if number == len(self._shares) and self._earlier is not None:
                self._earlier()
                self._earlier = None
            self._update(share, first=first)
            self.list.die(wide)


def flat_requests(part: Partitioned, *, partitions_gradients: bool) -> EventList | None:
    """Large requests of loading and two steps in order; None where they are not written.

    Kind: exact as far as the blocks are. Source: the functions named above.
    """
    events = partial(FlatEvents, part, partitions_gradients=partitions_gradients)
    return rank_requests(part.step, events, several_stacks=True)
