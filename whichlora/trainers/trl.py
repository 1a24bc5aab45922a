"""What trainers of TRL share.

Source: TRL 1.16 `DPOConfig`, `KTOConfig`, `_BaseConfig` of trainer/base_config.py.
"""

from __future__ import annotations

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

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
