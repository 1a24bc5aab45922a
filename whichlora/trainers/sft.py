"""TRL's `SFTTrainer`: the Trainer with a fused head, which makes log-probabilities and no logits.

Source: TRL 1.16 `SFTTrainer.compute_loss`, `add_fused_lm_head` of utils.py.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.trainers import transformers, trl

TRAINER = replace(
    transformers.TRAINER,
    name="sft",
    summary="TRL's SFTTrainer, without logits",
    steps="whichlora.profiler.trl:measure_trl",
    library_class="trl.SFTTrainer",
    config_class="trl.SFTConfig",
    length_argument="max_length",
    turned_on=trl.TURNED_ON,
    makes_adapters=True,
    loss_heads=("trl-fused",),
    keeps_base=True,
    narrows_adapters=True,
)
