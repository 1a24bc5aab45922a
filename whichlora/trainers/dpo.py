"""TRL's `DPOTrainer`: chosen and rejected answers in one forward, and a frozen reference.

With adapters the reference is the base with its adapters off; where all weights are trained it is
a second copy of them.

Source: TRL 1.16 `DPOTrainer._compute_loss`, `DataCollatorForPreference`.
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
    summary="how the log-probabilities of a pair are compared; all hold the same tensors",
    default="sigmoid",
    choices=(
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
)
_SMOOTHING = Option(
    name="label_smoothing",
    summary="chance of a flipped label: robust, exo_pair",
    default=0.0,
)


def _logits_loss(run: RunConfig) -> LogitsLoss | None:
    """Source: TRL 1.9 `DPOTrainer._compute_loss`: `entropy_from_logits` copies what it reshapes."""
    if not run.versions.trl_compares_logits:
        return None
    return trl.loss_of_logits(run, copied_for_metrics=1.0)


def _forwards(run: RunConfig) -> Forwards:
    return Forwards(reference=int(trl.computes_reference(run)))


def _notes(run: RunConfig) -> tuple[str, ...]:
    rows = 2 * run.batch_size
    return (
        f"batch_size counts pairs: a forward has {rows} sequences of seq_len tokens, prompt and "
        "answer each",
    )


def _check(run: RunConfig) -> None:
    smoothing = run.trainer_option(_SMOOTHING.name) or 0.0
    if run.trainer_option(_LOSS.name) == "exo_pair" and not smoothing:
        raise ConfigError("loss_type: exo_pair needs label_smoothing above 0; 0.001 is usual")


TRAINER = replace(
    sft.TRAINER,
    takes_images=False,
    name="dpo",
    also_called={"DPOTrainer": "", "unsloth-dpo": trl.UNDER_UNSLOTH},
    summary="TRL's DPOTrainer: pairs of answers, and a reference",
    library_class="trl.DPOTrainer",
    config_class="trl.DPOConfig",
    learning_rate=1e-6,
    rate_source="TRL's DPOConfig",
    options=(trl.BETA, _LOSS, _SMOOTHING, trl.PRECOMPUTE, trl.DISABLE_DROPOUT),
    rows="pairs",
    rows_per_example=2,
    forwards=_forwards,
    loss_of=sft.own_loss,
    # dpo_trainer.py prepares and casts to 0.28
    keeps_base=trl.since("0.29"),
    narrows_adapters=trl.since("0.29"),
    narrowed_names=trl.cast_before("0.29"),
    outputs_held=drops_outputs,
    logits_loss=_logits_loss,
    check=_check,
    notes=_notes,
)
