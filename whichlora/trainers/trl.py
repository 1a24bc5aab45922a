"""What trainers of TRL share.

Source: TRL 1.16 `DPOConfig`, `KTOConfig`, `_BaseConfig` of trainer/base_config.py. What older ones
do is read in a release of each minor version, 0.8.6 to 1.16.0.
"""

from __future__ import annotations

from collections.abc import Callable

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.trainers.base import Defaults, LogitsLoss

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

# Strategies whose `Params4bit` lie on the CPU or nowhere when TRL sees them ("is_sharded_qlora").
_SHARDS = frozenset({"fsdp", "zero3"})
# `peft_module_casting_to_bf16`
CAST = ("lm_head", "embed_tokens", "wte", "wpe")


LIBRARY = "trl"
UNDER_UNSLOTH = "without Unsloth's kernels, so that this takes more"


def defaults(libraries: Libraries) -> Defaults:
    """Of a trainer that is given the name of a model, whatever dtype its checkpoint has.

    Read: `create_model_from_path` of utils.py tells transformers float32 from 0.27 on. Before,
    nobody tells it a dtype, and its releases of that time take float32.
    """
    return Defaults(
        told_dtype="float32",
        autocasts=libraries.trl_autocasts,
        checkpoints=libraries.trl_checkpoints,
    )


def is_sharded(run: RunConfig) -> bool:
    """Whether trainers that ask leave a 4-bit base as it is, with adapters of its width.

    Source: TRL 0.12 sft_trainer.py, line 242, "one should never call [...] when doing QLoRA + FSDP
    / DS-Zero3"; `prepare_peft_model` of 0.22 to 0.25.
    """
    return not _SHARDS.isdisjoint(run.parallel.names)


def since(release: str) -> Callable[[RunConfig], bool]:
    """Whether the TRL of a run is `release` or a later one."""
    return lambda run: not run.versions.older("trl", release)


def cast_before(release: str) -> Callable[[RunConfig], tuple[str, ...]]:
    """What is cast to bf16 on a prepared 4-bit base by every TRL before `release`."""
    return lambda run: CAST if run.versions.older("trl", release) else ()


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
