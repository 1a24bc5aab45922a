"""TRL's `ORPOTrainer`: chosen and rejected answers in one forward, and no reference.

Its loss reads whole logits: the cross entropy of the chosen rows, and log-probabilities of all.

Source: TRL 1.16 `ORPOTrainer.concatenated_forward` (orpo_trainer.py, line 740),
`get_batch_loss_metrics`; `peft_module_casting_to_bf16` of experimental/utils.py.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import dpo, transformers, trl
from whichlora.trainers.base import LogitsLoss, drops_outputs, never

_BETA = Option(name="beta", summary="weight of the odds ratio's term", default=0.1)


def _logits_loss(run: RunConfig) -> LogitsLoss:
    return trl.loss_of_logits(run, has_cross_entropy=True)


TRAINER = replace(
    transformers.TRAINER,
    name="orpo",
    also_called={"ORPOTrainer": "", "unsloth-orpo": trl.UNDER_UNSLOTH},
    takes_images=False,
    summary="TRL's ORPOTrainer: pairs of answers, no reference",
    steps=dpo.TRAINER.steps,
    library_class="trl.experimental.orpo.ORPOTrainer",
    config_class="trl.experimental.orpo.ORPOConfig",
    learning_rate=1e-6,
    rate_source="TRL's ORPOConfig",
    length_argument="max_length",
    turned_on=trl.TURNED_ON,
    makes_adapters=True,
    options=(_BETA, trl.DISABLE_DROPOUT),
    loss_heads=("raw",),
    rows="pairs",
    rows_per_example=2,
    frames_rows=True,
    keeps_unlearned=True,
    outputs_held=drops_outputs,
    logits_loss=_logits_loss,
    defaults=trl.defaults,
    dated_by=trl.LIBRARY,
    # orpo_trainer.py and cpo_trainer.py prepare and cast in every release
    keeps_base=never,
    narrows_adapters=never,
    narrowed_names=lambda run: trl.CAST,
    notes=dpo.TRAINER.notes,
)
