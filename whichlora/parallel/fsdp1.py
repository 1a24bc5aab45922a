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
from whichlora.memory.event_list import EventList
from whichlora.memory.gradients import ADAPTERS
from whichlora.memory.held import held_outputs
from whichlora.memory.layer_bytes import WEIGHT_COPIES
from whichlora.memory.moments import AUTOCAST_COPIES, LAYER_FORWARDS, LOGITS_GRADIENT
from whichlora.memory.weights import weight_bytes
from whichlora.memory.worst_layer import has_one_order
from whichlora.parallel.base import Moments
from whichlora.parallel.fsdp_rank import GRADIENT_SHARDS, REPLACED, Rank
from whichlora.parallel.fsdp_units import Unit
from whichlora.parallel.rank_events import rank_requests
from whichlora.parallel.unit_events import UnitBytes, UnitEvents
from whichlora.spec.numeric import Count
from whichlora.spec.targets import adapted
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.linear_form import most, per_token
from whichlora.symbolic.operators import OpEmitter
from whichlora.units import MiB

JOINED = Fact(
    part="gradients",
    what="gradients joined to one vector",
    shape="[trained params of a unit]",
    dtype="of mixed_precision",
    why="the backward of the views of a flat parameter concatenates their gradients",
    source="torch _flat_param.py _get_unflat_views_unaligned: backward of split",
)

NORM_BACKWARD = Fact(
    part="temporary",
    what="backward of a layer's first norm",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="fp32",
    why="the next block is gathered ahead once the first leaf of this one goes backward",
    source="torch _runtime_utils.py _get_handle_to_prefetch, in the order of units",
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
        """All blocks, with the units of their adapters, where they stay gathered."""
        units = self.sharding.units
        blocks, counts = (*units.blocks, *units.tower_blocks), (*units.counts, *units.tower_counts)
        counted = zip(blocks, counts, strict=True)
        return sum(count * unit.gathered(self._size) for unit, count in counted) * (
            not self.sharding.reshards
        )

    @cached_property
    def _tower_unfreed(self) -> Count:
        return sum(unit.gathered(self._size) for unit in self._tower_units) * (
            not self.sharding.reshards
        )

    def _ahead(self, place: int) -> Count:
        """The block at `place`, gathered before its turn."""
        if place < 0 or not (self.sharding.prefetches and self.sharding.reshards):
            return 0
        return self._gathered(self._block(place))

    def _shards(self, *units: Unit) -> Count:
        """As of both versions; what is copied to the host lives to the end of the backward.

        Source: torch 2.13 `_accumulate_sharded_grad`, whose `_saved_grad_shard` is dropped by
        `prepare_gradient_for_optim`.
        """
        return self._made(*units)

    # --- requests -------------------------------------------------------------------------------

    def requests(self) -> EventList | None:
        """As of `Strategy.requests`; none where blocks stay gathered, or gradients whole."""
        sharding = self.sharding
        step = sharding.units.step
        if sharding.offloads or not sharding.reshards or step.accumulates:
            return None
        return rank_requests(step, self._events)

    def _events(self) -> UnitEvents:
        units, size = self.sharding.units, self.sharding.size
        return UnitEvents(
            units.step,
            [self._unit_bytes(units.blocks[kind]) for kind in self._order],
            self._unit_bytes(units.outside),
            whole=(
                *[MiB] * (units.unsharded // MiB),
                weight_bytes(units.rest.model, units.rest.dtypes)["buffers"],
            ),
            trained=units.trained_shards(size),
            prefetches=self.sharding.prefetches,
            keeps_leaves=self._keeps_leaves,
        )

    def _unit_bytes(self, unit: Unit) -> UnitBytes:
        size, trains_base = self._size, self.sharding.units.step.method.trains_base
        return UnitBytes(
            parameters=tuple(
                int(p.rows * p.width * p.rest_bytes)
                for p in unit.parameters
                for _ in range(p.count)
            ),
            shard=int(sum(p.shard(size) * p.rest_bytes for p in unit.parameters)),
            gathered=int(self._gathered(unit)),
            gradients=int(unit.gradients) * trains_base,
            gradient_shard=int(unit.gradient_shard(size)),
        )

    # --- moments --------------------------------------------------------------------------------

    def during(self, name: str) -> tuple[Entry, ...]:
        units = self.sharding.units
        last = len(self._order) - 1
        root, zero = self._root, 0 * self._root
        outside = units.outside
        if name in LAYER_FORWARDS:
            block = self._unfreed if not self.sharding.reshards else self._largest_block
            return self._entries(root + block, zero, zero, self._waiting, 0)
        if name == "optimizer_step":
            return self._optimizer_step()
        if name == "images_forward":
            block = self._tower_unfreed or self._largest_tower
            return self._entries(root + block, zero, zero, self._waiting, 0)
        if name == "images_backward":
            gradients, _ = self._pending_but(zero, *self._tower_units, outside)
            block = self._tower_unfreed or self._largest_tower
            return self._entries(root + block, zero, zero, gradients, units.head.gradients)
        if name in ("loss_forward", "images_masked", "last_norm"):
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
        # leaves of PEFT are units, so that the next one is among this block's until its first
        ahead = self._ahead(place - 1) if not self._leaves_end_block(place) else zero
        unsharded, gradients = self._in_backward_of(place)
        return self._entries(unsharded, ahead, zero, gradients, units.head.gradients)

    def _in_backward_of(self, place: int) -> tuple[Count, Count]:
        """Gathered parameters in the backward of the block at `place`, and gradients.

        Where blocks are not freed after the forward, they are in the backward that sends their
        gradients, and not before (`_should_free_in_backward`).
        """
        done = [self._block(p) for p in range(place + 1, len(self._order))]
        if self.sharding.reshards:
            gradients, _ = self._pending(0 * self._root, *done)
            kept = sum(self._gathered(block) for block in done) * self._keeps_attending
            return self._root + self._gathered(self._block(place)) + kept, gradients
        freed = sum(block.gathered(self._size) for block in done)
        gradients, _ = self._pending(0 * self._root, *done, unfreed=freed)
        return self._root + self._unfreed - freed, gradients

    @property
    def _keeps_attending(self) -> bool:
        """Whether frozen blocks of the text stay until all of it has gone backward.

        Each is given the images' states, whose gradient is there when the first has gone backward.
        Source: torch 2.13 `_register_post_backward_reshard_only_hook`: `register_multi_grad_hook`.
        """
        step = self.sharding.units.step
        attended = self._tower is not None and self._tower.tower.attended
        return attended and step.learns_from_images and not step.method.trains_base

    def _leaves_end_block(self, place: int) -> bool:
        """Whether the first of the leaves that run in a block reads the layer's normed input."""
        step = self.sharding.units.step
        layer = step.model.groups[self._order[place]].layer
        read = {linear.name for linear in adapted(layer, step.targets)}
        inputs = [linear.name for linear in layer.attentions[0].linears[:-1]]
        return not step.method.trains_base and bool(read.intersection(inputs))

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
        if units.step.method.trains_base:
            for name, place in (("layer_reduce", last), ("first_layer_reduce", 0)):
                block = self._block(place)
                unsharded, gradients = self._in_backward_of(place)
                yield (
                    name,
                    (
                        *self.static,
                        *self._kept(place),
                        self._stream(1),
                        *self._joined(block, unsharded, self._ahead(place - 1), gradients),
                        Entry(JOINED, units.head.gradients),
                    ),
                )
        if self.sharding.prefetches and self._leaves_end_block(last):
            for name, place in (("layer_prefetch", last), ("second_layer_prefetch", min(1, last))):
                yield name, self._prefetching(place)
        if self._has(units.outside):
            gradients, _ = self._pending_but(zero, units.outside)
            yield "root_reduce", (*self.static, *self._joined(units.outside, root, zero, gradients))
        if self._keeps_leaves:
            yield "first_layer_backward_of_leaves", self._with_leaves(one_device)
        # with `use_orig_params` the views of the gradients' shards live to the next forward
        kept = 0 if self.sharding.offloads else self._all_shards
        yield "between_steps", (*self.static, Entry(GRADIENT_SHARDS, kept + zero))

    def _prefetching(self, place: int) -> tuple[Entry, ...]:
        """At the end of a block's backward: the one before it is gathered, and a norm is left."""
        units = self.sharding.units
        # a checkpoint keeps its input, else what the block saved is gone
        reach = place + bool(units.step.run.gradient_checkpointing)
        unsharded, gradients = self._in_backward_of(place)
        gradients = gradients + self._shards(self._block(place)) * (not self._keeps_whole)
        zero = 0 * self._root
        return (
            *self.static,
            *self._kept(reach),
            *self._entries(
                unsharded, self._ahead(place - 1), zero, gradients, units.head.gradients
            ),
            self._stream(1),
            Entry(NORM_BACKWARD, self._norm_backward(place)),
        )

    def _kept(self, places: int) -> Iterator[Entry]:
        """What the first `places` blocks keep for their backward, and what outlives them."""
        step = self.sharding.units.step
        kept = list(step.passes.groups)
        if has_one_order(step.model):
            for kind, group in enumerate(step.model.groups):
                number = sum(position < places for position in group.positions)
                kept[kind] = replace(kept[kind], count=number)
        saved = listed(step.passes.fact, *kept, step.outside_in_layers)
        for entry in (*step.always, held_outputs(step), saved):
            if entry.part not in REPLACED:
                yield _without_copies(entry)

    def _norm_backward(self, place: int) -> Count:
        """Bytes of the backward of the norm that reads a layer's input."""
        step = self.sharding.units.step
        layer = step.model.groups[self._order[place]].layer
        if layer.post_norm or not layer.norms:
            return 0 * step.tokens
        stream = step.layers[self._order[place]].stream_bytes
        tape = Tape()
        code = OpEmitter(tape, step.dtypes, step.targets, step.method, stream_bytes=stream)
        x = tape.input(per_token(step.model.hidden_size), stream, needs_grad=True)
        code.norm(layer.norms[0], x)
        points = tape.backward(recomputed=False)
        return most(points, tokens=step.tokens, span=step.seq_len, r=step.r)

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
