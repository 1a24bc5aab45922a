"""TRL's `DPOTrainer`: chosen and rejected answers in one forward, and a frozen reference.

With adapters the reference is the base with its adapters off; where all weights are trained it is
a second copy of them.

Source: TRL 1.16 `DPOTrainer._compute_loss`, `DataCollatorForPreference`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.run import RunConfig
from whichlora.trainers import sft, trl
from whichlora.trainers.base import Forwards


def _forwards(run: RunConfig) -> Forwards:
    return Forwards(reference=int(trl.computes_reference(run)))


def _notes(run: RunConfig) -> tuple[str, ...]:
    rows = 2 * run.batch_size
    return (
        f"batch_size counts pairs: a forward has {rows} sequences of seq_len tokens, prompt and "
        "answer each",
    )


TRAINER = replace(
    sft.TRAINER,
    name="dpo",
    summary="TRL's DPOTrainer: pairs of answers, and a reference",
    library_class="trl.DPOTrainer",
    config_class="trl.DPOConfig",
    options=(trl.BETA, trl.PRECOMPUTE, trl.DISABLE_DROPOUT),
    rows="pairs",
    rows_per_example=2,
    forwards=_forwards,
    notes=_notes,
)
