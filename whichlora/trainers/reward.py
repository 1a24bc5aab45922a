"""TRL's `RewardTrainer`: a model with one output learns which of two answers is better.

Its class is `AutoModelForSequenceClassification` with one label: no logits of a vocabulary.

Source: TRL 1.16 `RewardTrainer.compute_loss`, `DataCollatorForPreference` of reward_trainer.py;
transformers 5.23 `GenericForSequenceClassification.forward`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.run import RunConfig
from whichlora.trainers import dpo, sft, transformers, trl

_shares_code = trl.since("0.22")  # with SFT: `prepare_peft_model`


def _keeps_base(run: RunConfig) -> bool:
    """Source: reward_trainer.py to 0.21 prepares any quantised base, and casts nothing."""
    return _shares_code(run) and sft.keeps_base(run)


TRAINER = replace(
    transformers.TRAINER,
    name="reward",
    also_called={"RewardTrainer": ""},
    takes_images=False,
    summary="TRL's RewardTrainer: pairs of answers, and a head with one output",
    steps=dpo.TRAINER.steps,
    library_class="trl.RewardTrainer",
    config_class="trl.RewardConfig",
    learning_rate=1e-4,
    rate_source="TRL's RewardConfig",
    length_argument="max_length",
    turned_on=trl.TURNED_ON,
    makes_adapters=True,
    options=(trl.DISABLE_DROPOUT,),
    loss_heads=("hf",),
    rows="pairs",
    rows_per_example=2,
    drops_longer=True,
    task="reward",
    defaults=trl.defaults,
    dated_by=trl.LIBRARY,
    keeps_base=_keeps_base,
    narrows_adapters=_keeps_base,
    narrowed_names=lambda run: sft.TRAINER.narrowed_names(run) if _shares_code(run) else (),
    notes=dpo.TRAINER.notes,
)
