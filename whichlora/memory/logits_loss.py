"""The loss that a trainer makes of whole logits: of all rows' answers, and of the chosen rows.

Log-probabilities come from one kernel of TRL, row by row where there is no such kernel, or from a
log-softmax of all rows in fp32 (`LogitsLoss.log_probabilities`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from whichlora.memory import loss
from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count, floor_div, largest, smallest
from whichlora.trainers.base import LogitsLoss, Trainer

LOSS_FORWARD = Fact(
    part="logits_and_loss",
    what="logits of both answers, copy and log-softmax of the chosen ones",
    shape="[2, batch_size, seq_len, vocab_size]",
    dtype="fp32 under autocast",
    why="the end of the loss's forward",
    source="TRL 1.16 concatenated_forward; torch cross_entropy",
)
COMPARED = Fact(
    part="logits_and_loss",
    what="logits of the batch, and what their log-probabilities keep",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="fp32 under autocast, or in a log-softmax of all rows",
    count="1, or 2 with a saved log-softmax",
    why="the backward of the loss reads them",
    source="TRL 1.9 DPOTrainer._compute_loss; LLaMA-Factory 0.9.5 get_batch_logps",
)
LOSS_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of the logits of both answers",
    shape="[2, batch_size, seq_len, vocab_size]",
    dtype="fp32 under autocast",
    count="2.5",
    why="that of the log-probabilities waits for that of the chosen answers' cross entropy",
    source="TRL 1.16 concatenated_forward; torch slice_backward, InputBuffer::accumulate",
)


_ENTROPY_POSITIONS = 128  # at once. Source: TRL 1.9 `entropy_from_logits` of trainer/utils.py


def forward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
    has_reference: bool = False,
) -> Count:
    """Alive at the worst point of the loss's forward: logits, shifted copy, log-softmax.

    Args:
        has_reference: a frozen reference scores the batch, too, before metrics are computed.

    Kind: exact. Source: TRL 1.16 `concatenated_forward` of orpo_trainer.py and cpo_trainer.py,
    `selective_log_softmax` of trainer/utils.py, 1.9 `_compute_loss` of dpo_trainer.py and
    kto_trainer.py; accelerate 1.15 `ConvertOutputsToFp32`.
    """
    sizes = _Sizes.of(model, dtypes, trainer, computed, tokens=tokens, sequences=sequences)
    # `logits[..., :-1, :].contiguous()` of one row is a view
    shifted = sizes.likelihood * (sequences > 2)
    in_loss = sizes.logits + sizes.likelihood + largest(shifted, sizes.comparing)
    points = [sizes.widening, in_loss]
    if computed.copied_for_metrics:
        of_both = sizes.held + sizes.logits * has_reference
        # `entropy_from_logits` copies what it reshapes, and makes three tensors of a few positions
        entropy = sizes.scored + 3 * smallest(_ENTROPY_POSITIONS * sizes.position, sizes.scored)
        points.append(of_both + largest(entropy, sizes.times(computed.copied_for_metrics)))
    return largest(*points) + _saved_by_head(model, dtypes, tokens=tokens)


def held_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> Count:
    """What a batch's scores keep while the reference scores it.

    Kind: exact. Source: TRL 1.9 `_compute_loss` of dpo_trainer.py and kto_trainer.py;
    LLaMA-Factory 0.9.5 `get_batch_logps` of train/trainer_utils.py, `concatenated_forward` of
    train/dpo/trainer.py (line 218) and train/kto/trainer.py (line 183).
    """
    sizes = _Sizes.of(model, dtypes, trainer, computed, tokens=tokens, sequences=sequences)
    beside = sizes.times(computed.held_beside)
    return sizes.held + beside + _saved_by_head(model, dtypes, tokens=tokens)


def reference_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> Count:
    """Alive while the reference's logits are made and compared, without a graph.

    Kind: exact. Source: as of `held_bytes`.
    """
    sizes = _Sizes.of(model, dtypes, trainer, computed, tokens=tokens, sequences=sequences)
    compared = sizes.comparing if computed.log_probabilities == "softmax" else sizes.row
    return largest(sizes.widening, sizes.logits + compared)


def backward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> Count:
    """Alive at the worst point of the loss's backward: mostly at the sum of two gradients.

    What came last in the forward goes back first: the log-probabilities, then the cross entropy.

    Kind: exact. Source: TRL 1.16 `_LogProbEntropyFunction` of kernels/logprob_entropy.py; torch
    2.13 `slice_backward`, `InputBuffer::accumulate`, `gather_backward`.
    """
    sizes = _Sizes.of(model, dtypes, trainer, computed, tokens=tokens, sequences=sequences)
    logits, scored, likelihood = sizes.logits, sizes.scored, sizes.likelihood
    points = [
        likelihood + sizes.comparing_backward,
        likelihood + scored + logits,  # of all but the last positions, and of all
        logits + 3 * likelihood,  # `_log_softmax_backward_data`
    ]
    if computed.has_cross_entropy:
        points.append(2 * logits + floor_div(logits, 2))  # of the chosen rows, and of all, twice
    return largest(*points) + _saved_by_head(model, dtypes, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of the tensors of a batch.

    Args:
        position: the logits of one.
        widening: logits, while a caller gets them in fp32.
        logits: those of all positions, as they are compared.
        scored: those of all but each last position.
        likelihood: of those the chosen half, where there is a cross entropy.
        row: a temporary of one row.
        comparing: saved or temporary beside the logits, at the worst point of the comparison.
        comparing_backward: alive at the worst point of its backward.
        held: logits and what is saved beside them.
    """

    position: int
    widening: Count
    logits: Count
    scored: Count
    likelihood: Count
    row: Count
    comparing: Count
    comparing_backward: Count
    held: Count

    def times(self, share: float) -> Count:
        """Bytes of `share` of the logits, in halves."""
        return int(2 * share) * floor_div(self.logits, 2)

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        dtypes: Dtypes,
        trainer: Trainer,
        computed: LogitsLoss,
        *,
        tokens: Count,
        sequences: Count,
    ) -> Self:
        vocab, narrow = loss.logit_width(model), dtypes.compute_bytes
        size = loss.returned_logit_bytes(model, dtypes, trainer)
        by = computed.way_on(dtypes.device_kind)
        if by == "softmax":
            size = 4  # `logits.to(torch.float32)`
        logits, scored = tokens * vocab * size, (tokens - sequences) * vocab * size
        # `logsumexp` makes a temporary, `log_softmax` of 16-bit logits a result
        row, saved = floor_div(scored, sequences), 0 * scored
        if by == "kernel":  # makes no tensor as wide as the vocabulary, and saves the logits
            row, comparing, back = 0 * scored, 0 * scored, logits + scored
        elif by == "softmax":
            # `_log_softmax` makes its input contiguous, which that of one row is; its result
            # is what `gather` and itself save, which is read while two gradients are made
            saved = scored
            comparing, back = scored + scored * (sequences > 1), 3 * scored
        else:  # `gather` has saved fp32 logits; rows of gradients are stacked
            saved = scored * (size != 4)
            comparing = row if size == 4 else scored
            back = 2 * scored + logits * (size == 4)
        return cls(
            position=vocab * size,
            widening=logits + tokens * vocab * narrow * (size != narrow),
            logits=logits,
            scored=scored,
            likelihood=floor_div(scored, 2) * computed.has_cross_entropy,
            row=row,
            comparing=comparing,
            comparing_backward=back,
            held=logits + saved,
        )


def _saved_by_head(model: ModelSpec, dtypes: Dtypes, *, tokens: Count) -> Count:
    """The `tanh` of a soft cap saves its result."""
    width = loss.logit_width(model) if model.logit_softcap else 0
    return tokens * width * dtypes.compute_bytes
