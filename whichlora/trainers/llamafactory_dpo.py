"""LLaMA-Factory's `CustomDPOTrainer`: pairs of answers, with the losses of DPO, ORPO and SimPO.

It extends TRL's class of 0.24 and older, and computes its own log-probabilities: of a log-softmax
of whole logits in fp32, also of the reference. TRL's class of today lays logits out in tiles.

Source: LLaMA-Factory 0.9.5 train/dpo/trainer.py, `concatenated_forward` (line 206),
`get_batch_loss_metrics` (line 268); `get_batch_logps` of train/trainer_utils.py (line 586);
`use_ref_model` of hparams/finetuning_args.py (line 574).
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import dpo, transformers
from whichlora.trainers.base import Defaults, Forwards, LogitsLoss, always, drops_outputs

BETA = Option(name="pref_beta", summary="strength of the pull to the reference", default=0.1)
LOSS = Option(
    name="pref_loss",
    summary="how the log-probabilities of a pair are compared; orpo and simpo have no reference",
    default="sigmoid",
    choices=("sigmoid", "hinge", "ipo", "orpo", "simpo"),  # its TRL has no kto_pair any more
)
# always off: `__init__` of train/dpo/trainer.py, `disable_dropout_in_model`
NO_DROPOUT = Option(
    name="disable_dropout",
    summary="dropout of adapters and model is always off",
    default=True,
)
_WITHOUT_REFERENCE = ("orpo", "simpo")


def _forwards(run: RunConfig) -> Forwards:
    return Forwards(reference=int(run.trainer_option(LOSS.name) not in _WITHOUT_REFERENCE))


def check(run: RunConfig) -> None:
    """Refuse dropout, which the class turns off."""
    if run.trainer_option(NO_DROPOUT.name) is False:
        raise ConfigError(
            f"disable_dropout: false is not possible in trainer {run.trainer}, which always turns "
            "dropout off; leave it out"
        )


def _logits_loss(run: RunConfig) -> LogitsLoss:
    return LogitsLoss(log_probabilities="softmax")


TRAINER = replace(
    transformers.TRAINER,
    name="llamafactory-dpo",
    takes_images=False,
    summary="LLaMA-Factory's stage dpo: pairs of answers, DPO, ORPO or SimPO",
    steps="whichlora.profiler.llamafactory:measure_llamafactory",
    library_class="llamafactory.train.dpo.trainer.CustomDPOTrainer",
    options=(BETA, LOSS, NO_DROPOUT),
    loss_heads=("raw",),
    rows="pairs",
    rows_per_example=2,
    forwards=_forwards,
    outputs_held=drops_outputs,
    logits_loss=_logits_loss,
    keeps_base=always,
    config_class="",
    # model/patcher.py `infer_optim_dtype`, hparams `disable_gradient_checkpointing`
    defaults=lambda libraries: Defaults(told_dtype="auto", checkpoints=True),
    learning_rate=5e-7,  # a tenth of their LoRA's
    rate_source="LLaMA-Factory's examples of preferences",
    check=check,
    notes=dpo.TRAINER.notes,
)
