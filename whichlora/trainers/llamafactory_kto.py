"""LLaMA-Factory's `CustomKTOTrainer`: answers that are wanted or not, and a frozen reference.

Each of policy and reference scores the answers, then those of the KL term, while the logits of the
former are there.

Source: LLaMA-Factory 0.9.5 train/kto/trainer.py, `forward` (line 148), `concatenated_forward`
(line 183), `compute_reference_log_probs` (line 204).
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.run import RunConfig
from whichlora.trainers import llamafactory_dpo, transformers
from whichlora.trainers.base import Forwards, LogitsLoss


def _forwards(run: RunConfig) -> Forwards:
    return Forwards(policy=1, reference=2)


def _logits_loss(run: RunConfig) -> LogitsLoss:
    return LogitsLoss(log_probabilities="softmax", held_beside=1.0)


TRAINER = replace(
    llamafactory_dpo.TRAINER,
    name="llamafactory-kto",
    summary="LLaMA-Factory's stage kto: answers wanted or not, and a reference",
    library_class="llamafactory.train.kto.trainer.CustomKTOTrainer",
    options=(llamafactory_dpo.BETA, llamafactory_dpo.NO_DROPOUT),
    rows="labelled",
    rows_per_example=1,
    forwards=_forwards,
    logits_loss=_logits_loss,
    notes=transformers.TRAINER.notes,
)
