"""The head and the loss of a training step: their points, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from whichlora.memory import kv_cache, logits_loss, loss
from whichlora.memory.entries import Entry, Fact
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, ceil_div, largest, where
from whichlora.symbolic.language_head import LabelPoints, label_points
from whichlora.symbolic.layer import stream_bytes
from whichlora.symbolic.linear_form import LinearForm, most
from whichlora.trainers.base import LogitsLoss

if TYPE_CHECKING:
    from whichlora.memory.step import TrainingStep


@dataclass(frozen=True)
class StepLoss:
    """The head and the loss of one step, whichever of the formulas of losses it follows."""

    step: TrainingStep

    @cached_property
    def label_points(self) -> LabelPoints | None:
        """The head for labels, what makes an embedding, or an adapted head, and its loss.

        A loss in chunks, too.

        None of other models.
        """
        return self._label_points_of(sequences=2)

    def _label_points_of(self, *, sequences: int) -> LabelPoints | None:
        step = self.step
        model, dtypes = step.model, step.dtypes
        chunked_loss = step.trainer.chunked_loss(step.run)
        on_tape = step.adapts_head or chunked_loss is not None
        if model.label_head is None and model.pooling is None and not on_tape:
            return None
        layers = [layer for layer, _ in model.layers()]
        return label_points(
            model,
            dtypes,
            step.method,
            step.targets,
            stream=stream_bytes(layers[-1], dtypes, after_norm=model.starts_in_layer_norm),
            form=loss.cross_entropy_form(model, dtypes, sequences=sequences),
            loss_head=step.run.loss_head,
            chunked_loss=chunked_loss,
            trains_head=bool(step.gradients.of_head),
            widens_outputs=step.trainer.widens_outputs,
        )

    @property
    def evaluated_head_bytes(self) -> Count:
        """Bytes of an adapted head and its loss without a graph; 0 for other heads."""
        step = self.step
        if not step.adapts_head or self.label_points is None:
            return 0 * step.tokens
        return self._in_labels(self.label_points.evaluated)

    def _in_labels(self, points: tuple[LinearForm, ...]) -> Count:
        step = self.step
        return largest(most(points, r=step.r, **step.sized), 0 * step.tokens)

    @property
    def further_head_copies(self) -> Count:
        """16-bit copies of an fp32 head that chunks of its tokens save, but for the first.

        Kind: exact. Source: torch 2.13 `autocast_mode.cpp`, `cached_cast`: of frozen weights none
        is cached; litgpt 0.5.13 `GPT.forward`, `lm_head_chunk_size`.
        """
        step = self.step
        computed, head = step.trainer.chunked_loss(step.run), step.model.head
        is_cast = step.dtypes.under_autocast and step.dtypes.head_bytes > step.dtypes.compute_bytes
        if computed is None or not computed.positions or not computed.by_head:
            return 0 * step.tokens
        if head is None or not is_cast:
            return 0 * step.tokens
        copy = head.num_weights * step.dtypes.compute_bytes
        return (ceil_div(step.seq_len, computed.positions) - 1) * copy

    @property
    def scored_tokens(self) -> Count:
        """Positions that the head projects: TRL's fused one leaves out each row's last.

        Where there is no Triton it projects those without a label, too.

        Kind: exact. Source: TRL 1.16 `_fused_forward`; transformers 5.23 projects all and pads the
        labels.
        """
        step = self.step
        scored = step.trainer.scored_tokens(step.run)
        if scored is not None and step.dtypes.backend.has_triton:
            return step.batch_size * scored
        return step.tokens - step.batch_size * LOSS_HEADS[step.run.loss_head].leaves_out_last

    def _in_loss(self, formula: Callable[..., Count]) -> Count:
        """A formula of `memory.loss` for this step."""
        step = self.step
        return formula(
            step.model,
            step.dtypes,
            step.trainer,
            tokens=self.scored_tokens,
            loss_head=step.run.loss_head,
        )

    def _in_logits_loss(
        self, formula: Callable[..., Count], computed: LogitsLoss, **further: bool
    ) -> Count:
        """A formula of `memory.logits_loss` for this step."""
        step = self.step
        return formula(
            step.model,
            step.dtypes,
            step.trainer,
            computed,
            tokens=step.tokens,
            sequences=step.batch_size,
            **further,
        )

    @property
    def compared(self) -> Entry | None:
        """Logits of the policy, while the reference computes those that they are compared with."""
        step = self.step
        computed = step.trainer.logits_loss(step.run)
        if computed is None:
            return None
        return Entry(logits_loss.COMPARED, self._in_logits_loss(logits_loss.held_bytes, computed))

    @property
    def reference_bytes(self) -> Count:
        """Bytes that the reference's head and the comparison of its logits allocate."""
        step = self.step
        computed = step.trainer.logits_loss(step.run)
        if computed is None:
            return self.forward_bytes
        return self._in_logits_loss(logits_loss.reference_bytes, computed)

    @property
    def facts(self) -> tuple[Fact, Fact]:
        """Facts of the loss's forward and of its backward."""
        step = self.step
        if step.trainer.logits_loss(step.run) is not None:
            return logits_loss.LOSS_FORWARD, logits_loss.LOSS_BACKWARD
        if self.label_points is not None:
            if step.model.pooling is not None:
                return loss.EMBEDDINGS_FORWARD, loss.EMBEDDINGS_BACKWARD
            if step.trainer.chunked_loss(step.run) is not None:
                return loss.CHUNKED_FORWARD, loss.CHUNKED_BACKWARD
            if step.adapts_head:
                return loss.ADAPTED_FORWARD, loss.ADAPTED_BACKWARD
            return loss.LABELS_FORWARD, loss.LABELS_BACKWARD
        return loss.LOSS_FORWARD, loss.LOSS_BACKWARD

    @cached_property
    def forward_bytes(self) -> Count:
        step = self.step
        computed = step.trainer.logits_loss(step.run)
        if computed is not None:
            return self._in_logits_loss(
                logits_loss.forward_bytes, computed, has_reference=step.has_reference
            )
        if self.label_points is not None:
            several = self._in_labels(self.label_points.forward)
            one_row = self._label_points_of(sequences=1)
            if one_row is None or not step.adapts_head:
                return several
            in_loss = where(step.batch_size > 1, several, self._in_labels(one_row.forward))
            return largest(in_loss, self._widened_outputs_bytes)
        made = loss.unsloth_head_forward(step.model, step.dtypes) * self._trains_fused_head
        forward = partial(
            loss.loss_forward_bytes,
            sequences=step.batch_size,
            trained_head=step.gradients.trained_head_bytes,
        )
        return largest(self._in_loss(forward) + made, self._widened_outputs_bytes)

    @cached_property
    def widened_cache(self) -> tuple[int, ...]:
        """Elements per token of each fp32 copy of cached keys or values that the caller gets."""
        step = self.step
        checkpointed = bool(step.run.gradient_checkpointing)
        return kv_cache.widened_cache(step.model, step.dtypes, checkpointed=checkpointed)

    @property
    def _widened_outputs_bytes(self) -> Count:
        """Bytes beside what all layers save while the caller's copies of outputs are made.

        `convert_outputs_to_fp32` is around autocast, whose cache is empty by then.
        """
        step = self.step
        cached = 4 * sum(self.widened_cache)
        formula = partial(
            loss.widened_outputs_bytes,
            sequences=step.batch_size,
            cached=cached,
            has_points=step.adapts_head,
        )
        return self._in_loss(formula) + self.widened_encoder_out - step.autocast_copies

    @property
    def widened_encoder_out(self) -> Count:
        """Bytes of the fp32 copy of the encoder's output, which is among the outputs, too.

        Autocast makes the result of a LayerNorm fp32 by itself.
        """
        step = self.step
        dtypes = step.dtypes
        is_copied = (
            step.trainer.widens_outputs and dtypes.under_autocast and dtypes.stream_bytes == 2
        )
        ends_wide = any(norm.kind == "layer" for norm in step.model.groups[0].layer.norms)
        is_copied = is_copied and bool(step.second_stack) and not ends_wide
        return 4 * step.source_tokens * step.model.hidden_size * is_copied

    @property
    def _trains_fused_head(self) -> bool:
        """Whether Unsloth's loss makes the gradient of a head."""
        step = self.step
        return step.run.loss_head == "unsloth-fused" and bool(step.gradients.of_head)

    @cached_property
    def backward_bytes(self) -> Count:
        step = self.step
        computed = step.trainer.logits_loss(step.run)
        if computed is not None:
            return self._in_logits_loss(logits_loss.backward_bytes, computed)
        if self.label_points is not None:
            return self._in_labels(self.label_points.backward)
        made = loss.unsloth_head_backward(step.model, step.dtypes) * self._trains_fused_head
        backward = partial(loss.loss_backward_bytes, trained_head=step.gradients.trained_head_bytes)
        return self._in_loss(backward) + made

    @cached_property
    def kept_logits_bytes(self) -> Count:
        """Bytes of logits that the caller holds during the backward."""
        step = self.step
        # `Trainer.compute_loss` of transformers 5.23 returns the loss alone: its local `outputs`,
        # the last name of the logits, goes before `accelerator.backward` begins
        if step.trainer.outputs_held(step.run) == "until_loss":
            return 0 * step.tokens
        return self._in_loss(loss.kept_logits_bytes)
