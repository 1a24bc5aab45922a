"""TRL's `SFTTrainer`: the Trainer with a fused head, which makes log-probabilities and no logits.

Source: TRL 1.16 `SFTTrainer.compute_loss`, `add_fused_lm_head` of utils.py.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.run import USUAL_HEAD, LossHead, RunConfig
from whichlora.trainers import liger, transformers, trl

KEEPS_BASE = "0.26"


def keeps_base(run: RunConfig) -> bool:
    """Then the adapters of a quantised base are cast to bf16, too.

    Source: sft_trainer.py to 0.21, `prepare_peft_model` of 0.22 to 0.25 prepare it.
    """
    return trl.since(KEEPS_BASE)(run) or trl.is_sharded(run)


def own_loss(run: RunConfig, model_type: str) -> LossHead:
    """TRL's: `SFTTrainer.__init__` turns Liger's off, and refuses it where it is asked for."""
    if liger.kernel_config(run).get("fused_linear_cross_entropy"):
        raise ConfigError(
            "liger_kernel_config: SFTTrainer has its own loss; leave fused_linear_cross_entropy out"
        )
    return run.loss_head


def _loss_of(run: RunConfig, model_type: str) -> LossHead:
    """TRL's, but before 1.15 the model's or Liger's; from 1.7 on it computed its own in chunks."""
    if run.versions.sft_fuses_head:
        return own_loss(run, model_type)
    head = liger.loss_of(replace(run, loss_head=USUAL_HEAD), model_type)
    if head == USUAL_HEAD and run.versions.sft_chunks_loss:
        raise ConfigError(
            f"libraries: SFTTrainer of TRL {run.versions.trl} computes the loss in chunks, "
            "which is not predicted; use TRL 1.15 or later, or before 1.7, or Liger's loss"
        )
    return head


def _notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    told = liger.notes_of(run, model_type)
    has_own = liger.uses_liger(run) and run.versions.sft_fuses_head
    return (*told, "the loss is TRL's own, with or without Liger") if has_own else told


TRAINER = replace(
    transformers.TRAINER,
    name="sft",
    also_called={"SFTTrainer": "", "trl": ""},
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
    defaults=trl.defaults,
    dated_by=trl.LIBRARY,
    keeps_base=keeps_base,
    narrows_adapters=keeps_base,
    narrowed_names=trl.cast_before(KEEPS_BASE),
)
