"""TRL's `SFTTrainer`: the Trainer with a fused head, which makes log-probabilities and no logits.

Source: TRL 1.16 `SFTTrainer.compute_loss`, `add_fused_lm_head` of utils.py.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.run import LossHead, RunConfig
from whichlora.trainers import liger, transformers, trl


def _loss_of(run: RunConfig, model_type: str) -> LossHead:
    """Its own: `SFTTrainer.__init__` turns Liger's off, and refuses it where it is asked for."""
    if liger.kernel_config(run).get("fused_linear_cross_entropy"):
        raise ConfigError(
            "liger_kernel_config: SFTTrainer has its own loss; leave fused_linear_cross_entropy out"
        )
    return run.loss_head


def _notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    told = liger.notes_of(run, model_type)
    return (*told, "the loss is TRL's own, with or without Liger") if liger.uses_liger(run) else ()


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
    kernels=liger.kernels_beside_loss,
    loss_of=_loss_of,
    notes_of=_notes_of,
    keeps_base=True,
    narrows_adapters=True,
)
