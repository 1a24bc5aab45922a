"""What a rank holds at each moment under FSDP's version 2, `fully_shard`.

Gathered are, in the forward, a block, its gather's output and that of the one before
(`wait_for_unshard`). The head's unit stays to the backward, so that at the loss it counts twice. In
the backward these are the block and the next one, beside the input of the last reduce-scatter:
after the head it is as large as the head.
Source: torch 2.13 `_fsdp_param_group.py` and `_fsdp_collectives.py`, traced with accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whichlora.memory.entries import Entry
from whichlora.memory.moments import LAYER_FORWARDS, LOGITS_GRADIENT
from whichlora.parallel.base import Moments
from whichlora.parallel.fsdp_rank import REPLACED, Rank
from whichlora.parallel.fsdp_units import Unit
from whichlora.spec.numeric import Count


@dataclass(frozen=True)
class Rank2(Rank):
    """The tensors that version 2 makes, by moment."""

    def during(self, name: str) -> tuple[Entry, ...]:
        """What version 2 adds to the one-device moment `name`."""
        units = self.sharding.units
        last = self._block(-1)
        unsharded, gathered, sent = self._whole, 0 * self._whole, 0 * self._whole
        gradients = self._waiting
        if name in LAYER_FORWARDS:
            unsharded = unsharded + (self._unfreed or self._largest_block)
            gathered = self._largest_block
        elif name == "images_forward":
            kept = self._all_tower * (not self.sharding.reshards)
            embedding = self._gathered(units.embedding) * (not self.sharding.reshards)
            unsharded = unsharded + (kept + embedding * self._sees_first or self._largest_tower)
            gathered = self._largest_tower
        elif name == "images_masked":
            unsharded = unsharded + self._unfreed
            gathered = self._largest_tower
        elif name == "loss_forward":
            unsharded = unsharded + self._untied_head + self._unfreed
            gathered = self._gathered(last) if units.is_tied else self._untied_head
            stream = 0 if units.step.method.trains_base else 1
            return (
                self._stream(stream),
                *self._entries(unsharded, gathered, sent, gradients, 0),
            )
        elif name == "loss_backward":
            unsharded = unsharded + self._untied_head + self._unfreed
        elif name == "head_backward":
            unsharded = unsharded + self._untied_head + self._unfreed
            gathered = self._gathered(last) * self.sharding.reshards
            return self._entries(
                unsharded, gathered, sent, self._waiting, self._head_gradient(in_place=True)
            )
        elif name == "optimizer_step":
            return self._optimizer_step()
        elif name == "images_backward":
            return self._images_backward()
        elif name == "embedding_backward":  # of a tied table
            return self._tied_embedding_backward()
        elif name == "first_layer_backward":
            return self._first_layer_backward()
        else:
            return self._layer_backward(name)
        return self._entries(unsharded, gathered, sent, gradients, 0)

    def _head_gradient(self, *, in_place: bool = False) -> Count:
        head = self.sharding.units.head
        if self._keeps_whole and not self.sharding.units.is_tied and not in_place:
            return 0
        return head.gradients

    def _layer_backward(self, name: str) -> tuple[Entry, ...]:
        """In the worst layer, which is the last one but where a place is named."""
        units = self.sharding.units
        place = int(name.split("_")[1]) if name.split("_")[1].isdigit() else len(self._order) - 1
        unit, before = self._block(place), self._block(place - 1)
        is_last = place == len(self._order) - 1
        if is_last:
            sent = 0 if units.is_tied else self._sent(units.head)
        else:
            sent = self._sent(self._block(place + 1))
        later = [self._block(p) for p in range(place + 1, len(self._order))]
        gradients, sent = self._pending(sent, *later, *([] if units.is_tied else [units.head]))
        freed = sum(self._gathered(block) for block in later)
        unsharded = self._whole + self._gathered(unit)
        if not self.sharding.reshards:
            unsharded = self._whole + self._unfreed - freed
        gathered = self._gathered(before) * self.sharding.reshards
        tied = units.head.gradients if units.is_tied else 0
        return self._entries(unsharded, gathered, sent, gradients, tied)

    def _first_layer_backward(self) -> tuple[Entry, ...]:
        units = self.sharding.units
        first, second = self._block(0), self._block(1)
        embedding = self._gathered(units.embedding)
        gathered = self._before_layers * self.sharding.reshards
        unsharded = self._whole + self._gathered(first)
        if not self.sharding.reshards:
            unsharded = unsharded + embedding + self._all_tower
        gradients, sent = self._pending_but(
            self._sent(second),
            first,
            *self._tower_units,
            units.embedding,
            units.root,
            *([units.head] if units.is_tied else []),
        )
        tied = units.head.gradients if units.is_tied else 0
        return self._entries(unsharded, gathered, sent, gradients, tied + self._root_gradients)

    @property
    def _root_gradients(self) -> Count:
        """Of the root once the text has gone backward: matrices around a tower come later."""
        return 0 if self._tower is not None else self.sharding.units.root.gradients

    @property
    def _before_layers(self) -> Count:
        """The unit before the first layer, as it is gathered."""
        if self._sees_first:
            return self._gathered(self._tower_units[-1])
        return self._gathered(self.sharding.units.embedding)

    def _images_backward(self) -> tuple[Entry, ...]:
        """In the last block of a tower, behind the first layer of the text."""
        units = self.sharding.units
        reshards, block = self.sharding.reshards, self._largest_tower
        kept = self._all_tower + self._gathered(units.embedding) * self._sees_first
        unsharded = self._whole + (block if reshards else kept)
        last = self._block(0) if self._sees_first else units.embedding
        later = [units.root, *([units.head] if units.is_tied else [])]
        gradients, sent = self._pending_but(
            self._sent(last),
            *self._tower_units,
            *([units.embedding] if self._sees_first else []),
            *later,
        )
        tied = units.head.gradients if units.is_tied else 0
        return self._entries(
            unsharded, block * reshards, sent, gradients, tied + units.root.gradients
        )

    def _tied_embedding_backward(self) -> tuple[Entry, ...]:
        units = self.sharding.units
        # the head's part, the embedding's, and their sum
        whole = 3 * units.head.gradients + units.root.gradients
        gradients, sent = self._pending_but(self._sent(self._block(0)), units.head, units.root)
        return self._entries(self._whole, 0 * self._whole, sent, gradients, whole)

    # --- moments of its own ---------------------------------------------------------------------

    def added(self, one_device: Moments) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """When units are gathered and reduced, and nothing is computed."""
        units = self.sharding.units
        zero = 0 * self._whole
        forward = self._activations(one_device)
        stays = self._whole + self._unfreed
        block = self._largest_block
        running = 0 if self._unfreed else block
        yield (
            "layer_gather",
            (*forward, *self._entries(stays + running, 2 * block, zero, self._waiting, 0)),
        )
        first, last = self._gathered(self._block(0)), self._gathered(self._block(-1))
        before = self._gathered(units.head) if units.is_tied else self._before_layers
        if self._sees_first:
            before = self._before_layers
        if self._tower is not None:
            yield "first_block_gather", self._first_block_gather()
        if self._sees_first and len(self._order) > 1:
            yield "second_layer_backward", self._second_layer_backward(one_device)
        embedding = 0
        if not self.sharding.reshards:
            embedding = self._gathered(units.embedding) + self._all_tower
        yield (
            "first_layer_gather",
            (
                *self.static,
                *self._seen("layer_forward"),
                self._stream(1),
                *self._entries(
                    self._whole + embedding + first, before + first, zero, self._waiting, 0
                ),
            ),
        )
        if not units.is_tied:
            head = self._untied_head
            yield (
                "head_gather",
                (
                    *forward,
                    self._stream(self._streams_at_head),
                    *self._entries(stays + head, last + head, zero, self._waiting, 0),
                ),
            )
        if "head_backward" not in one_device:
            yield (
                "head_backward",
                (
                    *forward,
                    Entry(LOGITS_GRADIENT, self._logits_gradient),
                    *self._entries(
                        stays + self._untied_head,
                        last * self.sharding.reshards,
                        zero,
                        self._waiting,
                        0,
                    ),
                ),
            )
        if self._has(units.head) and not units.is_tied:
            yield (
                "head_reduce",
                (
                    *forward,
                    self._stream(1),
                    *self._reducing(
                        units.head,
                        stays,
                        last * self.sharding.reshards,
                        self._waiting + self._shards(units.head),
                    ),
                ),
            )
        yield from self._last_moments()
        yield "between_steps", self.static

    def _last_moments(self) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """After the first layer's backward: its gradients, and those of the embedding."""
        units = self.sharding.units
        zero = 0 * self._whole
        first = self._block(0)
        ahead, before = self._gathered(units.embedding), self._before_layers
        is_ahead = self.sharding.reshards
        tied = units.head.gradients if units.is_tied else 0
        waits = units.root.gradients + tied
        if self._has(first):
            yield (
                "first_layer_reduce",
                (
                    *self.static,
                    *self._seen("loss_backward"),
                    self._stream(1),
                    *self._reducing(
                        first,
                        self._whole + (ahead + self._all_tower) * (not is_ahead),
                        before * is_ahead,
                        self._reduced_after(
                            units.embedding,
                            units.root,
                            *self._tower_units,
                            *([units.head] if units.is_tied else []),
                        ),
                        self._root_gradients + tied,
                    ),
                ),
            )
        if not units.is_tied:
            last = first if not self._sees_first else self._tower_units[0]
            later = self._tower_units if not self._sees_first else ()
            done, sent = self._pending_but(self._sent(last), units.embedding, units.root, *later)
            if is_ahead and units.step.needs_grad:  # else nothing asks for it before its end
                yield (
                    "embedding_gather",
                    (
                        *self.static,
                        self._stream(1 if units.step.method.trains_base else 2),
                        *self._entries(self._whole + ahead, ahead, sent, done, waits),
                    ),
                )
            yield (
                "embedding_backward",
                (
                    *self.static,
                    self._stream(1),
                    *self._entries(
                        self._whole + ahead, zero, sent, done, units.embedding.gradients + waits
                    ),
                ),
            )
        table = units.head if units.is_tied else units.embedding
        if self._has(table):
            yield (
                "embedding_reduce",
                (
                    *self.static,
                    *self._reducing(
                        table,
                        self._gathered(units.root),
                        zero,
                        self._all_shards,
                        table.gradients * self._keeps_whole,
                    ),
                ),
            )

    def _second_layer_backward(self, one_device: Moments) -> tuple[Entry, ...]:
        """Before the first, whose parameters are ahead: a tower's block is smaller."""
        first = (e for e in one_device["first_layer_backward"] if e.part not in REPLACED)
        added = self._layer_backward("layer_1_backward")
        return (*self.static, *first, self._stream(1), *added)

    def _first_block_gather(self) -> tuple[Entry, ...]:
        """The first block of a tower comes, behind the embedding of the text if that is first."""
        units, block = self.sharding.units, self._gathered(self._tower_units[0])
        before = self._gathered(units.embedding) * self._sees_first
        kept = before * (not self.sharding.reshards)
        zero = 0 * self._whole
        return (
            *self.static,
            *self._seen("optimizer_step"),
            self._stream(int(self._sees_first)),
            *self._entries(self._whole + kept + block, before + block, zero, self._waiting, 0),
        )

    @property
    def _streams_at_head(self) -> int:
        """What the last layer returned, and where the norm is apart, what the norm made of it."""
        step = self.sharding.units.step
        if not step.method.trains_base:
            return 3
        return 1 if step.run.gradient_checkpointing else 2

    def _reduced_after(self, *later: Unit) -> Count:
        """Gradients once all units but `later` have sent theirs."""
        if self._accumulates:
            return self._waiting
        return self._waiting + self._all_shards - self._shards(*later)

    def _reducing(
        self,
        unit: Unit,
        unsharded: Count,
        gathered: Count,
        gradients: Count,
        whole: Count = 0,
    ) -> tuple[Entry, ...]:
        """While the gradients of `unit` are sent: they, their copy, and the share that comes."""
        sent, shard = self._sent(unit), unit.gradient_shard(self._size)
        share = sent // self._size * (sent != shard * self._size)  # in another dtype
        if self.sharding.offloads:  # on its way to the host; else it is among `gradients`
            share = share + shard
        unsharded_gradients = unit.gradients * (not self._keeps_whole)
        return self._entries(
            unsharded, gathered, sent + share, gradients, unsharded_gradients + whole
        )
