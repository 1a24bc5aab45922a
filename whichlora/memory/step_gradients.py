"""Gradients of a training step: which there are at which moment of its backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from whichlora.memory import loss
from whichlora.memory.gradients import (
    gradient_bytes,
    outer_bytes,
    unwanted_gradient_bytes,
)
from whichlora.spec.layer import Linear
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, largest
from whichlora.spec.targets import (
    adapted_linears,
    token_table,
)

if TYPE_CHECKING:
    from whichlora.memory.step import TrainingStep


@dataclass(frozen=True)
class StepGradients:
    """The gradients of one step, in bytes: of what, and when they are there."""

    step: TrainingStep

    @cached_property
    def of_tower(self) -> Count:
        """Gradients of a vision tower, which come after those of the language model."""
        step = self.step
        tower = step.model.tower
        if tower is None:
            return 0 * step.num_trained
        if step.method.trains_base:
            return tower.stack.num_params * step.param_bytes * step.trains_tower
        total = 0 * step.num_trained
        for linear in tower.linears:
            if linear.rank_multiple and linear.name in step.tower_targets:
                total = total + step.method.gradient_bytes(linear, step.dtypes, step.r)
        return total

    @cached_property
    def total(self) -> Count:
        step = self.step
        if step.frees_gradients:
            return 0 * step.num_trained
        total = gradient_bytes(step.tensors) + 0 * step.num_trained
        for linear, count in adapted_linears(step.model, step.targets):
            remainders = step.method.gradient_remainders(linear, step.dtypes, step.r)
            total = total + count * linear.count * remainders
        return total

    @cached_property
    def tied_params(self) -> int:
        """Elements of the matrix that turns hidden states into logits."""
        step = self.step
        if step.model.head is not None:
            return step.model.head.num_weights
        if step.model.label_head is not None:
            return step.model.label_head.projection.num_weights
        head = step.model.masked_head
        width = step.model.embeddings[0].width if head is None else head.width
        return width * loss.logit_width(step.model)

    @property
    def tied_wait(self) -> bool:
        """Whether a trained head is tied to the embedding, so that their gradients are summed."""
        step = self.step
        head = step.model.masked_head
        is_tied = step.model.head_tied or (head is not None and head.tied)
        return step.method.trains_base and is_tied

    @property
    def adds_tied_in_place(self) -> bool:
        """Whether both gradients of a tied head are summed in place.

        Source: torch 2.13 `InputBuffer::accumulate`: in place, unless a tensor is a view, as the
        `mm` of a head leaves its gradient; autocast's cast and a fused head make new tensors.
        """
        step = self.step
        is_cast = step.dtypes.under_autocast and step.param_bytes == 4
        computed = step.trainer.chunked_loss(step.run)
        is_sum = computed is not None and computed.by_head  # of those of all chunks
        return is_cast or is_sum or LOSS_HEADS[step.run.loss_head].in_tiles

    @property
    def trained_head_bytes(self) -> int:
        """Bytes of one element of a head that is trained, or of its copy; 0 for a frozen one."""
        step = self.step
        if not self.of_head:
            return 0
        return step.dtypes.head_bytes if step.method.trains_base else step.dtypes.copy_bytes

    @cached_property
    def of_head(self) -> int:
        """Bytes of the head's gradient, the first of a backward; 0 where the head is frozen."""
        step = self.step
        if step.method.trains_base:
            return self.tied_params * step.param_bytes
        return int(
            gradient_bytes(module for module in step.saved_modules if not module.is_embedding)
        )

    @property
    def of_term(self) -> Count:
        """Gradients of a loss term on the adapters, which come before the layers' backward."""
        return self.total * self.step.method.in_loss

    @cached_property
    def in_layers(self) -> Count:
        """Gradients of this micro-step, beside those of layers, during the layers' backward.

        With accumulation all of them are there since earlier micro-steps, and torch's
        `AccumulateGrad` adds in place; only of a tied head a second one waits.
        """
        step = self.step
        gradient = self.of_head + 0 * step.num_trained
        if step.accumulates or step.frees_gradients:
            gradient = gradient * self.tied_wait
        of_head = self._of(() if step.model.head is None else (step.model.head,))
        of_head = of_head * (not step.method.trains_base)  # else `of_head` is it
        return gradient + of_head + self.of_merging + self.of_term

    def _of(self, linears: Iterable[Linear]) -> Count:
        """Gradients of matrices around the layers, or of their adapters."""
        step = self.step
        total: Count = 0 * step.num_trained
        for linear in linears:
            if step.method.trains_base:
                total = total + linear.num_params * step.param_bytes
            elif linear.rank_multiple and linear.name in step.targets:
                total = total + step.method.gradient_bytes(linear, step.dtypes, step.r)
        return total * (not step.gradients_wait)

    @cached_property
    def of_merging(self) -> Count:
        """Gradients of matrices after the last layer, which come before those of layers."""
        streams = self.step.model.streams
        return self._of(() if streams is None else streams.merging)

    @cached_property
    def _before_layers(self) -> Count:
        """Gradients of matrices that make the inputs of layers, and further streams."""
        model = self.step.model
        expanding = () if model.streams is None else model.streams.expanding
        projecting = () if model.layer_input_norm is None else model.head_linears
        return self._of((*projecting, *expanding))

    @cached_property
    def late(self) -> Count:
        """Gradients of this micro-step during the first layer's backward, which comes last."""
        step = self.step
        gradients = self.in_layers
        of_first = largest(*(step.layers[number].gradients for number in step.first_kinds))
        if step.method.in_loss and step.accumulates:
            gradients = gradients - self.of_term + of_first
        elif not step.gradients_wait:
            gradients = self.total - of_first - self.of_embeddings
            gradients = gradients - self.of_tower - self._before_layers
            gradients = gradients - self._outer_params * outer_bytes(step.dtypes)
            # the first layer adds to them, so that its own backward counts them
            gradients = gradients - self._gathered_params * step.dtypes.adapter_bytes
        for number, (layer, count) in enumerate(step.model.layers()):
            unwanted = unwanted_gradient_bytes(layer, step.targets, step.method, step.dtypes)
            gradients = gradients + (count - (number == 0)) * unwanted
        return gradients

    @property
    def _outer_params(self) -> int:
        step = self.step
        return sum(tensor.num_trained for tensor in step.method.outer_tensors(step.model))

    @property
    def _gathered_params(self) -> Count:
        """Parameters of one layer's part in trained tensors that several layers read."""
        step = self.step
        linears = adapted_linears(step.model, step.targets)
        return sum(t.rows * t.width for t in step.method.shared_tensors(linears, step.r))

    @property
    def of_embeddings(self) -> Count:
        """Gradients of embedding tables, which come after all layers."""
        step = self.step
        # `embedding_dense_backward` of torch 2.13 makes a gradient of all rows of the table,
        # however few of them the batch has
        size = gradient_bytes(module for module in step.saved_modules if module.is_embedding)
        if step.adapts_table:
            table = token_table(step.model)
            size = size + step.method.gradient_bytes(table, step.dtypes, step.r)
        if step.method.trains_base:
            looked_up = step.model.embeddings[int(step.model.head_tied) :]
            trained = sum(table.num_params for table in looked_up if table.trains)
            size = size + trained * step.param_bytes
        return size

    @property
    def of_table(self) -> int:
        """Gradient of the token embedding, where it is trained."""
        step = self.step
        if step.method.trains_base:
            table = step.model.embeddings[0]
            return table.num_params * step.param_bytes * table.trains
        return int(gradient_bytes(module for module in step.saved_modules if module.is_embedding))

    @property
    def left(self) -> int:
        """Gradient of a frozen token table that is made in each backward, and added up."""
        step = self.step
        if not step.trainer.leaves_table_gradient(step.run):
            return 0
        return step.model.embeddings[0].num_params * step.dtypes.embedding_bytes

    @property
    def looked_up(self) -> Count:
        """That of the factor whose rows an adapter of the token table looks up."""
        step = self.step
        if not step.adapts_table:
            return 0
        (rows, width), _ = step.method.adapter_shapes(token_table(step.model), step.r)
        return rows * width * step.dtypes.adapter_bytes

    @cached_property
    def of_first_stack(self) -> Count:
        step = self.step
        of_stack = (step.layers[i].count * step.layers[i].gradients for i in step.first_stack)
        return sum(of_stack, 0 * step.num_trained)
