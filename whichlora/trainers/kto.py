"""TRL's `KTOTrainer`: answers that are wanted or not, and a frozen reference.

Its KL term takes a second batch, of prompts with answers to other prompts, through the model and
through the reference, both without gradients.

Source: TRL 1.16 `KTOTrainer._compute_loss`, `_compute_kl_logps`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import sft, trl
from whichlora.trainers.base import Forwards, LogitsLoss, drops_outputs

_LOSS = Option(
    name="loss_type",
    summary="with its KL term, or without",
    default="kto",
    choices=("kto", "apo_zero_unpaired"),
)


def _logits_loss(run: RunConfig) -> LogitsLoss | None:
    """Source: TRL 1.9 `KTOTrainer._compute_loss`: it logs a copy of the wanted answers' logits.

    The positions of their completions are copied out of it. All answers of a batch may be wanted.
    """
    if not run.versions.trl_compares_logits:
        return None
    return trl.loss_of_logits(run, copied_for_metrics=2.0)


def _forwards(run: RunConfig) -> Forwards:
    has_kl = run.trainer_option(_LOSS.name) == _LOSS.default
    return Forwards(policy=int(has_kl), reference=trl.computes_reference(run) * (1 + has_kl))


def _least_batch(run: RunConfig) -> int:
    return 2 if _LOSS.text(run.trainer_options) == _LOSS.default else 1


def _check(run: RunConfig) -> None:
    if run.batch_size < _least_batch(run):
        raise ConfigError(
            "batch_size: trainer kto needs 2 or more, whose answers its KL term exchanges, got 1; "
            "give 2, or loss_type apo_zero_unpaired"
        )


TRAINER = replace(
    sft.TRAINER,
    takes_images=False,
    name="kto",
    least_batch=_least_batch,
    also_called={"KTOTrainer": "", "unsloth-kto": trl.UNDER_UNSLOTH},
    summary="TRL's KTOTrainer: answers wanted or not, and a reference",
    library_class="trl.KTOTrainer",
    config_class="trl.KTOConfig",
    learning_rate=1e-6,
    rate_source="TRL's KTOConfig",
    options=(trl.BETA, _LOSS, trl.PRECOMPUTE, trl.DISABLE_DROPOUT),
    rows="labelled",
    forwards=_forwards,
    loss_of=sft.own_loss,
    # kto_trainer.py prepares and casts to 1.3
    keeps_base=trl.since("1.4"),
    narrows_adapters=trl.since("1.4"),
    narrowed_names=trl.cast_before("1.4"),
    outputs_held=drops_outputs,
    logits_loss=_logits_loss,
    check=_check,
)
