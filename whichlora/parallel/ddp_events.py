"""The requests of a rank under DistributedDataParallel in order: one device's, and buckets.

Source: torch 2.13 `torch/nn/parallel/distributed.py`, `reducer.cpp`, `comm.cpp`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from whichlora.memory.event_list import EventList, loaded_blocks
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import StepEvents, has_events
from whichlora.units import MiB

BUCKET_BYTES = 25 * MiB  # of DDP(bucket_cap_mb); a tensor is not divided, so some are larger
_FIRST_BUCKET_BYTES = MiB
_BROADCAST_BYTES = 250 * MiB
_IN_FLIGHT = 2


class BucketEvents(StepEvents):
    """The events of one rank, whose gradients are copied to buckets that stay."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step)
        self._buckets: list[int] = []
        self._is_rebuilt = False

    def load(self) -> None:
        """Weights, which the first rank sends to the others, then the reducer's buckets."""
        super().load()
        self._broadcast()
        self._buckets = [self.list.born(sum(sizes)) for sizes in grouped(self._gradients())]

    def _broadcast(self) -> None:
        """`broadcast_coalesced`: copies of weights side by side, two of them at once."""
        under_way: deque[int] = deque()
        weights = loaded_blocks(self.step.model, self.step.dtypes)
        for sizes in grouped(weights, first=_BROADCAST_BYTES, cap=_BROADCAST_BYTES):
            if len(under_way) == _IN_FLIGHT:
                self.list.die(under_way.popleft())
            if len(sizes) > 1:
                under_way.append(self.list.born(sum(sizes)))
        self.list.die(*under_way)

    def _gradients(self) -> list[int]:
        """Bytes of each in the order of the parameters."""
        return [
            int(tensor.num_params) * tensor.param_bytes
            for tensors, times in self.trained
            for tensor in tensors * times
        ]

    def micro_step(self, *, accumulated: bool, first: bool) -> None:
        """The second forward finds buckets anew, in the order in which gradients came."""
        if not first and not self._is_rebuilt:
            self._is_rebuilt = True
            self.list.die(*self._buckets)
            in_order = grouped(reversed(self._gradients()))
            self._buckets = [self.list.born(sum(sizes)) for sizes in in_order]
        super().micro_step(accumulated=accumulated, first=first)


def grouped(
    sizes: Iterable[int], *, first: int = _FIRST_BUCKET_BYTES, cap: int = BUCKET_BYTES
) -> Iterator[list[int]]:
    """Bytes of the tensors of each bucket: it is full once it has `cap`, the first with `first`.

    Kind: exact, of tensors of one dtype. Source: torch 2.13 `compute_bucket_assignment_by_size`.
    """
    bucket: list[int] = []
    filled, limit = 0, first
    for size in sizes:
        bucket.append(size)
        filled += size
        if filled >= limit:
            yield bucket
            bucket, filled, limit = [], 0, cap
    if bucket:
        yield bucket


def bucket_requests(step: TrainingStep) -> EventList | None:
    """Large requests of loading and two steps in order; None where they are not written.

    Kind: exact as far as the blocks are. Source: torch 2.13 `compute_bucket_assignment_by_size`,
    `Reducer::initialize_buckets`, `rebuild_buckets`, `broadcast_coalesced`.
    """
    return BucketEvents(step).whole_run() if has_events(step) else None
