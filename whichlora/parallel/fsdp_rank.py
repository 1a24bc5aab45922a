"""What both versions of FSDP keep on a rank: shares, gathered units, gradients on their way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory import loss, optimizer
from whichlora.memory.allocator import PINNED_REMAINDERS, pinned_remainder_bytes
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.gradients import ADAPTERS, FROZEN_ADAPTERS, SAVED_MODULES
from whichlora.memory.images import TOWER_BACKWARD, TowerStep, held_in
from whichlora.memory.moments import LAYER_BACKWARD, LAYER_FORWARD
from whichlora.memory.weights import (
    BUFFERS,
    EMBEDDING_WEIGHTS,
    LAYER_WEIGHTS,
    OTHER_WEIGHTS,
    weight_bytes,
)
from whichlora.memory.worst_layer import has_one_order
from whichlora.parallel.base import Moments
from whichlora.parallel.fsdp_units import Sharding, Unit
from whichlora.spec.numeric import Count, largest

UNSHARDED = Fact(
    part="weights",
    what="unsharded parameters",
    shape="[params of a unit]",
    dtype="of mixed_precision",
    why="the unit that runs, and those that stay gathered",
    source="torch _fsdp_param.py init_unsharded_param; reshard_after_forward",
)
GATHERED = Fact(
    part="temporary",
    what="outputs of all-gathers",
    shape="[params of a unit]",
    dtype="of mixed_precision",
    why="in the forward the last one is kept until the next is copied out, in the backward the "
    "next unit is gathered ahead",
    source="torch _fsdp_param_group.py wait_for_unshard, _backward_prefetch",
)
REDUCED = Fact(
    part="temporary",
    what="inputs of reduce-scatters",
    shape="[trained params of a unit]",
    dtype="reduce_dtype",
    why="gradients are copied into one tensor, which is kept until the next unit's is made",
    source="torch _fsdp_collectives.py foreach_reduce; reduce_scatter_states",
)
WHOLE_GRADIENTS = Fact(
    part="gradients",
    what="unsharded gradients",
    shape="[trained params]",
    dtype="reduce_dtype",
    why="of units whose backward is not done, and of micro-steps that send none",
    source="torch _fsdp_param.py unsharded_accumulated_grad; accelerate no_sync",
)
GRADIENT_SHARDS = Fact(
    part="gradients",
    what="sharded gradients",
    shape="[trained params / ranks]",
    dtype="of the parameter",
    why="of units whose backward is done",
    source="torch _fsdp_collectives.py foreach_reduce",
)
STREAM = Fact(
    part="activations",
    what="the stream between units",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="what the next unit reads, or its gradient",
    source="torch _fsdp_param_group.py pre_forward, post_backward",
)
REPLACED = ("weights", "adapters", "optimizer_states", "gradients")


def static_entries(sharding: Sharding) -> tuple[Entry, ...]:
    """What a GPU keeps between steps, gradients apart."""
    units, rest = sharding.units, sharding.units.rest
    like = 0 * rest.tokens + 0 * rest.num_trained
    buffers = Entry(BUFFERS, weight_bytes(rest.model, rest.dtypes)["buffers"] + like)
    whole = (Entry(LAYER_WEIGHTS, units.unsharded + like),) if units.unsharded else ()
    return (*(() if sharding.offloads else shards(sharding)), *whole, buffers)


def shards(sharding: Sharding) -> tuple[Entry, ...]:
    """A rank's shares of weights, adapters and states."""
    units, size = sharding.units, sharding.size
    rest = units.rest
    like = 0 * rest.tokens + 0 * rest.num_trained
    facts = [LAYER_WEIGHTS, EMBEDDING_WEIGHTS, OTHER_WEIGHTS]
    if not rest.method.trains_base:
        facts += [ADAPTERS, FROZEN_ADAPTERS, SAVED_MODULES]
    states = optimizer.state_bytes(
        units.trained_shards(size),
        optimizer=rest.run.optimizer,
        device_kind="cpu" if sharding.offloads else rest.gpu.kind,
        narrow_embeddings=rest.trainer.narrows_embedding_states(rest.run),
    )
    shares = [Entry(fact, units.share(fact, size) + like) for fact in facts]
    return (*shares, Entry(optimizer.STATES, states + like))


def host_entries(sharding: Sharding) -> tuple[Entry, ...]:
    """What a rank keeps on the host: shares, and those of gradients.

    Kind: exact, of tensors. Source: torch 2.13 `FSDPParam._init_sharded_param`, `foreach_reduce`;
    version 1 `init_flat_param_attributes`, whose `_cpu_grad` frozen weights have, too.
    """
    if not sharding.offloads:
        return ()
    size = sharding.size
    if sharding.units.flat:
        gradients = sum(
            count * p.shard(size) * p.rest_bytes
            for unit, count in sharding.units.all()
            for p in unit.parameters
        )
    else:
        gradients = sum(count * unit.gradient_shard(size) for unit, count in sharding.units.all())
    rest = sum(count * _pinned_remainders(unit, size) for unit, count in sharding.units.all())
    return (
        *shards(sharding),
        Entry(GRADIENT_SHARDS, gradients),
        Entry(PINNED_REMAINDERS, rest),
    )


def _pinned_remainders(unit: Unit, size: int) -> int:
    """Of the shares of one unit and of their gradients: of each parameter, or of the flat one.

    Kind: exact. Source: torch 2.13 `FSDPParam._init_sharded_param`, `foreach_reduce`, whose copy
    to the host `_to_copy` pins as it is `non_blocking`; version 1 `init_flat_param_attributes`.
    """
    if any(parameter.flat for parameter in unit.parameters):
        flat = sum(p.shard(size) * p.rest_bytes for p in unit.parameters)
        return 2 * pinned_remainder_bytes(flat)
    return sum(
        (1 + p.trained) * p.count * pinned_remainder_bytes(p.shard(size) * p.rest_bytes // p.count)
        for p in unit.parameters
    )


@dataclass(frozen=True)
class Rank:
    """The tensors that FSDP makes on a rank, by moment."""

    sharding: Sharding

    def during(self, name: str) -> tuple[Entry, ...]:
        """What it adds to the one-device moment `name`."""
        raise NotImplementedError

    def added(self, one_device: Moments) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """Moments of its own."""
        raise NotImplementedError

    def moments(self, one_device: Moments) -> Moments:
        """The moments of a rank, from those that its step would have on one device."""
        changed: dict[str, tuple[Entry, ...]] = {}
        for name, entries in one_device.items():
            if name == "loading":
                changed[name] = entries
                continue
            activations = tuple(
                self._without_earlier_gradients(name, entry)
                for entry in entries
                if entry.part not in REPLACED and entry.fact is not optimizer.TEMPORARIES
            )
            changed[name] = (*self.static, *activations, *self.during(name))
        return changed | dict(self.added(one_device))

    def _without_earlier_gradients(self, name: str, entry: Entry) -> Entry:
        """The worst layer's backward, of which later layers' gradients are no part: they shrink."""
        if entry.fact is TOWER_BACKWARD and self._tower is not None:
            made = self._tower.backward_where(leaves_gradients=False)
            return replace(entry, num_bytes=largest(made, self._tower.first_backward))
        if name != "layer_backward" or entry.fact is not LAYER_BACKWARD:
            return entry
        step = self.sharding.units.step
        return replace(entry, num_bytes=step.layer_backward_where(leaves_gradients=False))

    @cached_property
    def static(self) -> tuple[Entry, ...]:
        return static_entries(self.sharding)

    # --- units ----------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return self.sharding.size

    # --- a vision tower, whose blocks are units before those of the text ------------------------

    @cached_property
    def _tower(self) -> TowerStep | None:
        step = self.sharding.units.step
        return None if step.model.tower is None else TowerStep.of(step, step.model.tower)

    @property
    def _sees_first(self) -> bool:
        """Whether the tower runs between the embedding of the text and its first layer."""
        return self._tower is not None and not self._tower.tower.attended

    @cached_property
    def _tower_units(self) -> tuple[Unit, ...]:
        """Its blocks, each as often as it is there."""
        units = self.sharding.units
        counted = zip(units.tower_blocks, units.tower_counts, strict=True)
        return tuple(unit for unit, count in counted for _ in range(count))

    @cached_property
    def _all_tower(self) -> Count:
        return sum(self._gathered(unit) for unit in self._tower_units)

    @cached_property
    def _largest_tower(self) -> Count:
        return largest(*(self._gathered(unit) for unit in self.sharding.units.tower_blocks))

    def _seen(self, moment: str) -> tuple[Entry, ...]:
        """What `moment` of the text has of the tower."""
        if self._tower is None:
            return ()
        return held_in(moment, self.sharding.units.step, self._tower)

    @cached_property
    def _order(self) -> list[int]:
        """Which kind of block stands at each place."""
        model = self.sharding.units.step.model
        if has_one_order(model):
            places = {p: i for i, group in enumerate(model.groups) for p in group.positions}
            return [places[place] for place in sorted(places)]
        return [i for i, group in enumerate(model.groups) for _ in range(group.count)]

    def _block(self, place: int) -> Unit:
        """The block at `place`, from the end where that is negative."""
        order = self._order
        return self.sharding.units.blocks[order[max(-len(order), min(place, len(order) - 1))]]

    def _gathered(self, unit: Unit) -> Count:
        return unit.gathered(self._size)

    def _sent(self, unit: Unit) -> Count:
        return unit.reduced(self._size, self.sharding.reduce_bytes)

    def _shards(self, *units: Unit) -> Count:
        """Sharded gradients of `units` on the GPU, once they are made."""
        if self.sharding.offloads:
            return 0
        return self._made(*units)

    def _made(self, *units: Unit) -> Count:
        return sum(unit.gradient_shard(self._size) for unit in units)

    @cached_property
    def _all_blocks(self) -> Count:
        units = self.sharding.units
        return sum(
            count * self._gathered(unit)
            for unit, count in zip(units.blocks, units.counts, strict=True)
        )

    @cached_property
    def _largest_block(self) -> Count:
        return largest(*(self._gathered(unit) for unit in self.sharding.units.blocks))

    @cached_property
    def _whole(self) -> Count:
        """What is gathered from the start of the forward on: the root, and a tied head."""
        units = self.sharding.units
        head = self._gathered(units.head) if units.is_tied else 0
        return self._gathered(units.root) + head

    @property
    def _untied_head(self) -> Count:
        units = self.sharding.units
        return 0 if units.is_tied else self._gathered(units.head)

    @property
    def _unfreed(self) -> Count:
        """Parameters of the embedding and of all blocks, where they stay gathered."""
        if self.sharding.reshards:
            return 0
        embedding = self._gathered(self.sharding.units.embedding)
        return self._all_blocks + self._all_tower + embedding

    # --- gradients ------------------------------------------------------------------------------

    @property
    def _accumulates(self) -> bool:
        return self.sharding.units.rest.accumulates

    @cached_property
    def _waiting(self) -> Count:
        """Gradients of earlier micro-steps."""
        units = self.sharding.units
        if not self._accumulates:
            return 0
        if self.sharding.syncs_each_batch:
            return self._all_shards
        return sum(count * self._whole_gradients(unit) for unit, count in units.all())

    def _whole_gradients(self, unit: Unit) -> Count:
        """Of `unit`, as earlier micro-steps left them."""
        return sum(
            p.elements * (self.sharding.reduce_bytes or p.compute_bytes)
            for p in unit.parameters
            if p.trained
        )

    @cached_property
    def _all_shards(self) -> Count:
        units = self.sharding.units
        return sum(count * self._shards(unit) for unit, count in units.all())

    def _pending(self, sent: Count, *done: Unit, unfreed: Count = 0) -> tuple[Count, Count]:
        """Gradients once the units `done` have sent theirs, and what the last of them sent.

        Args:
            unfreed: parameters of theirs that a micro-step before the last one does not free.
        """
        whole = sum(self._whole_gradients(unit) for unit in done)
        return self._either(whole, self._shards(*done), sent, unfreed)

    def _pending_but(self, sent: Count, *later: Unit) -> tuple[Count, Count]:
        """As `_pending`, of all units but `later`."""
        whole = self._waiting - sum(self._whole_gradients(unit) for unit in later)
        return self._either(whole, self._all_shards - self._shards(*later), sent)

    def _either(
        self, whole: Count, shards: Count, sent: Count, unfreed: Count = 0
    ) -> tuple[Count, Count]:
        if not self._keeps_whole:  # where shards exist, those that come are added to them
            return self._waiting + shards * (not self._accumulates), sent
        # the last micro-step turns them into shards unit by unit; those before it send nothing,
        # and the first of them finds none
        is_between = self.sharding.units.rest.run.gradient_accumulation_steps > 2
        before_last = self._waiting if is_between else whole
        last = self._waiting - whole + shards + sent
        return largest(before_last + unfreed, last), 0 * sent

    @property
    def _keeps_whole(self) -> bool:
        return self._accumulates and not self.sharding.syncs_each_batch

    # --- entries --------------------------------------------------------------------------------

    def _optimizer_step(self) -> tuple[Entry, ...]:
        rest = self.sharding.units.rest
        if self.sharding.offloads:
            return ()
        lists = optimizer.step_temporary_bytes(
            self.sharding.units.trained_shards(self._size),
            optimizer=rest.run.optimizer,
            foreach=rest.has_foreach,
        )
        return (
            Entry(GRADIENT_SHARDS, self._all_shards),
            Entry(optimizer.TEMPORARIES, lists + 0 * rest.num_trained),
        )

    def _entries(
        self, unsharded: Count, gathered: Count, sent: Count, gradients: Count, own: Count
    ) -> tuple[Entry, ...]:
        fact = WHOLE_GRADIENTS if self._keeps_whole else GRADIENT_SHARDS
        return (
            Entry(UNSHARDED, unsharded),
            Entry(GATHERED, gathered),
            Entry(REDUCED, sent),
            Entry(fact, gradients),
            Entry(WHOLE_GRADIENTS, own),
        )

    @property
    def _logits_gradient(self) -> Count:
        step = self.sharding.units.step
        width = loss.logit_width(step.model) + step.model.hidden_size
        return step.tokens * width * step.dtypes.compute_bytes

    def _has(self, unit: Unit) -> bool:
        return any(parameter.trained for parameter in unit.parameters)

    def _activations(self, one_device: Moments) -> tuple[Entry, ...]:
        kept = (entry for entry in one_device["layer_forward"] if entry.part not in REPLACED)
        return (*self.static, *(entry for entry in kept if entry.fact is not LAYER_FORWARD))

    def _stream(self, count: int) -> Entry:
        step = self.sharding.units.step
        width = step.model.stream_width * step.layers[0].stream_bytes
        return Entry(STREAM, count * step.tokens * width)
