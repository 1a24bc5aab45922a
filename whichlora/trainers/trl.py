"""What trainers of TRL share.

Source: TRL 1.16 `DPOConfig`, `KTOConfig`, `_BaseConfig` of trainer/base_config.py.
"""

from __future__ import annotations

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers.base import LogitsLoss

TURNED_ON = ("bf16", "gradient_checkpointing")  # `_BaseConfig`
BETA = Option(name="beta", summary="strength of the pull to the reference", default=0.1)
PRECOMPUTE = Option(
    name="precompute_ref_log_probs",
    summary="log-probabilities of the reference are computed once, before the training",
    default=False,
)
DISABLE_DROPOUT = Option(
    name="disable_dropout", summary="dropout of adapters and model is off", default=True
)


def computes_reference(run: RunConfig) -> bool:
    """Whether a step computes log-probabilities of the reference."""
    return not run.trainer_option(PRECOMPUTE.name)


def loss_of_logits(
    run: RunConfig, *, has_cross_entropy: bool = False, copied_for_metrics: float = 0.0
) -> LogitsLoss:
    """A loss of whole logits, as the TRL of `run` computes log-probabilities."""
    return LogitsLoss(
        has_cross_entropy=has_cross_entropy,
        log_probabilities="rows" if run.versions.trl_compares_by_rows else "kernel",
        copied_for_metrics=copied_for_metrics,
    )
