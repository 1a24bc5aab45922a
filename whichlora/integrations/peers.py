"""What the ranks of a training tell each other, where any of them may be silent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

_WAIT_S = 10.0  # for the others at the end; a collective would wait for a silent rank forever


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks of this training, over the store by which they found each other."""

    store: Any
    rank: int
    world_size: int

    @classmethod
    def of(cls, world_size: int) -> Self | None:
        """None where this process trains alone."""
        import torch.distributed as dist

        if world_size == 1 or not dist.is_initialized():
            return None
        store = dist.distributed_c10d._get_default_store()
        return cls(store=store, rank=dist.get_rank(), world_size=world_size)

    def largest(self, peak_bytes: int) -> tuple[int, int, int] | None:
        """The largest peak, its rank, and how many ranks told; None on ranks other than 0."""
        with suppress(RuntimeError):  # the rank that keeps the store has ended
            self.store.set(_key(self.rank), str(peak_bytes))
        if self.rank:
            return None
        peaks = {0: peak_bytes}
        for rank in range(1, self.world_size):
            with suppress(RuntimeError):
                self.store.wait([_key(rank)], timedelta(seconds=_WAIT_S))
                peaks[rank] = int(self.store.get(_key(rank)))
        rank = max(peaks, key=peaks.__getitem__)
        return peaks[rank], rank, len(peaks)


def _key(rank: int) -> str:
    return f"whichlora/peak/{rank}"
