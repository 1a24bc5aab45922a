"""What a rank holds at each moment under FSDP's version 1, `FullyShardedDataParallel`.

The parameters of a unit are one flat vector, with `use_orig_params` as the Trainer sets it. Blocks
are units, and everything outside of them is the root's. Under the Trainer's wrap policy for PEFT
every trained leaf is a unit, so that a block gathers its frozen weights alone.
Source: torch 2.13 `_runtime_utils.py` and `_flat_param.py`; peft 0.21.2 `fsdp_auto_wrap_policy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from whichlora.memory.entries import Entry, Fact
from whichlora.memory.gradients import ADAPTERS
from whichlora.memory.moments import LOGITS_GRADIENT
from whichlora.parallel.base import Moments
from whichlora.parallel.fsdp_rank import GRADIENT_SHARDS, Rank
from whichlora.parallel.fsdp_units import Unit
from whichlora.spec.numeric import Count

JOINED = Fact(
    part="gradients",
    what="gradients joined to one vector",
    shape="[trained params of a unit]",
    dtype="of mixed_precision",
    why="the backward of the views of a flat parameter concatenates their gradients",
    source="torch _flat_param.py _get_unflat_views_unaligned: backward of split",
)


@dataclass(frozen=True)
class Rank1(Rank):
    """The tensors that version 1 makes, by moment."""

    # --- units ----------------------------------------------------------------------------------

    def _gathered(self, unit: Unit) -> Count:
        return sum(
            p.padded(self._size) * p.compute_bytes
            for p in unit.parameters
            if p.fact is not ADAPTERS
        )

    @cached_property
    def _root(self) -> Count:
        return self._gathered(self.sharding.units.outside)

    @cached_property
    def _unfreed(self) -> Count:
        return 0 * self._all_blocks if self.sharding.reshards else self._all_blocks

    def _ahead(self, place: int) -> Count:
        """The block at `place`, gathered before its turn."""
        if place < 0 or not (self.sharding.prefetches and self.sharding.reshards):
            return 0
        return self._gathered(self._block(place))

    # --- moments --------------------------------------------------------------------------------

    def during(self, name: str) -> tuple[Entry, ...]:
        units = self.sharding.units
        last = len(self._order) - 1
        root, zero = self._root, 0 * self._root
        outside = units.outside
        if name == "layer_forward":
            block = self._unfreed if not self.sharding.reshards else self._largest_block
            return self._entries(root + block, zero, zero, self._waiting, 0)
        if name == "optimizer_step":
            return self._optimizer_step()
        if name == "loss_forward":
            return self._entries(root + self._unfreed, zero, zero, self._waiting, 0)
        if name == "loss_backward":
            unsharded = root + self._unfreed
            return self._entries(unsharded, self._ahead(last), zero, self._waiting, 0)
        if name == "head_backward":
            own = units.head.gradients
            unsharded = root + self._unfreed
            return self._entries(unsharded, self._ahead(last), zero, self._waiting, own)
        if name == "embedding_backward":
            gradients, _ = self._pending_but(zero, outside)
            return self._entries(root, zero, zero, gradients, 3 * units.head.gradients)
        place = 0 if name == "first_layer_backward" else self._place(name)
        done = [self._block(p) for p in range(place + 1, last + 1)]
        gradients, _ = self._pending(zero, *done)
        unsharded = root + (self._unfreed or self._gathered(self._block(place)))
        return self._entries(
            unsharded, self._ahead(place - 1), zero, gradients, units.head.gradients
        )

    def _place(self, name: str) -> int:
        place = name.split("_")[1]
        return int(place) if place.isdigit() else len(self._order) - 1

    def added(self, one_device: Moments) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """When gradients are joined, and between steps."""
        units = self.sharding.units
        root, zero = self._root, 0 * self._root
        last = len(self._order) - 1
        forward = self._activations(one_device)
        if "head_backward" not in one_device:
            yield (
                "head_backward",
                (
                    *forward,
                    Entry(LOGITS_GRADIENT, self._logits_gradient),
                    *self._entries(root + self._unfreed, self._ahead(last), zero, self._waiting, 0),
                ),
            )
        block = self._block(last)
        if units.step.method.trains_base:
            for name, place, held in (
                ("layer_reduce", last, forward),
                ("first_layer_reduce", 0, self.static),
            ):
                block = self._block(place)
                done = [self._block(p) for p in range(place + 1, last + 1)]
                gradients, _ = self._pending(zero, *done)
                unsharded = root + (self._unfreed or self._gathered(block))
                yield (
                    name,
                    (
                        *held,
                        self._stream(1),
                        *self._joined(block, unsharded, self._ahead(place - 1), gradients),
                        Entry(JOINED, units.head.gradients),
                    ),
                )
        if self._has(units.outside):
            gradients, _ = self._pending_but(zero, units.outside)
            yield "root_reduce", (*self.static, *self._joined(units.outside, root, zero, gradients))
        # with `use_orig_params` the views of the gradients' shards live to the next forward
        yield "between_steps", (*self.static, Entry(GRADIENT_SHARDS, self._all_shards))

    def _joined(
        self, unit: Unit, unsharded: Count, ahead: Count, gradients: Count
    ) -> tuple[Entry, ...]:
        return (
            *self._entries(unsharded, ahead, 0 * unsharded, gradients, unit.gradients),
            Entry(JOINED, unit.gradients),
        )
