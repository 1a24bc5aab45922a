"""What a rank holds at each moment under FSDP's version 1, `FullyShardedDataParallel`.

The parameters of a unit are one flat vector, with `use_orig_params` as the Trainer sets it. Blocks
are units, and everything outside of them is the root's. Under the Trainer's wrap policy for PEFT
every trained leaf is a unit, so that a block gathers its frozen weights alone.
Source: torch 2.13 `_runtime_utils.py` and `_flat_param.py`; peft 0.21.2 `fsdp_auto_wrap_policy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory.entries import Entry, Fact, listed
from whichlora.memory.gradients import ADAPTERS
from whichlora.memory.layer_bytes import WEIGHT_COPIES
from whichlora.memory.moments import AUTOCAST_COPIES, LOGITS_GRADIENT
from whichlora.parallel.base import Moments
from whichlora.parallel.fsdp_rank import GRADIENT_SHARDS, REPLACED, Rank
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

    def moments(self, one_device: Moments) -> Moments:
        """As of both versions; parameters come in 16 bit, so that autocast copies none."""
        return super().moments(
            {
                name: tuple(_without_copies(e) for e in entries if e.fact is not AUTOCAST_COPIES)
                for name, entries in one_device.items()
            }
        )

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
            unsharded = root + self._unfreed
            return self._entries(
                unsharded, self._ahead(last), zero, self._waiting, units.head.gradients
            )
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
        if self._keeps_leaves:
            yield "first_layer_backward_of_leaves", self._with_leaves(one_device)
        # with `use_orig_params` the views of the gradients' shards live to the next forward
        yield "between_steps", (*self.static, Entry(GRADIENT_SHARDS, self._all_shards))

    @property
    def _keeps_leaves(self) -> bool:
        """Whether the input of every checkpointed block and its gradient stay to the end."""
        # transformers before 4.53 checkpoints around FSDP's module, so that it sees the detached
        # input: `_register_post_backward_reshard_only_hook` hooks that leaf for frozen parameters,
        # and `register_multi_grad_hook` keeps its `AccumulateGrad` until `_finalize_params`
        step = self.sharding.units.step
        reentrant = bool(step.run.gradient_checkpointing and step.run.use_reentrant)
        older = step.dtypes.libraries.older("transformers", "4.53")
        return reentrant and older and not step.method.trains_base

    def _with_leaves(self, one_device: Moments) -> tuple[Entry, ...]:
        activations = (e for e in one_device["first_layer_backward"] if e.part not in REPLACED)
        root, zero = self._root, 0 * self._root
        block = self._gathered(self._block(0))
        return (
            *self.static,
            *activations,
            self._stream(2 * (len(self._order) - 1)),
            *self._entries(root + block, zero, zero, self._all_shards, 0),
        )

    def _joined(
        self, unit: Unit, unsharded: Count, ahead: Count, gradients: Count
    ) -> tuple[Entry, ...]:
        return (
            *self._entries(unsharded, ahead, 0 * unsharded, gradients, unit.gradients),
            Entry(JOINED, unit.gradients),
        )


def _without_copies(entry: Entry) -> Entry:
    """`entry` without autocast's copies of weights, where its members are listed."""
    if not any(x.what.endswith(WEIGHT_COPIES) for g in entry.groups for x in g.tensors):
        return entry
    groups = (
        replace(g, tensors=tuple(x for x in g.tensors if not x.what.endswith(WEIGHT_COPIES)))
        for g in entry.groups
    )
    return listed(entry.fact, *groups)
