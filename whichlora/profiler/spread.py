"""What spreads a profiled run over its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whichlora.errors import MeasurementError
from whichlora.predict.resolve import layout_of
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer

_TRAINER = "transformers.Trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreading:
    """Empty on one GPU.

    Args:
        training: what `TrainingArguments` take.
        quant_storage: the dtype whose elements hold 4-bit codes.
        micro_batches: that are computed at once.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    quant_storage: str = "uint8"
    micro_batches: int = 1

    @property
    def divides(self) -> bool:
        """Whether the ranks divide the model, which is made on the host then."""
        return bool(self.training.keys() & {"fsdp", "deepspeed"})


def spreading(run: RunConfig) -> Spreading:
    """What spreads `run` over its GPUs.

    Raises:
        ConfigError: a strategy that the Trainer has no key for.
        MeasurementError: one that can't be profiled.
    """
    layout = layout_of(run)
    if layout is None:
        return Spreading()
    config = layout.config
    if config.nodes > 1:
        raise MeasurementError(f"nodes: {config.nodes} can't be profiled from one of them")
    if layout.launcher != "torchrun" or get_trainer(run.trainer).library_class != _TRAINER:
        raise MeasurementError(
            f"parallel: {config.strategy} with trainer {run.trainer} can't be profiled; use "
            "profile: none"
        )
    training = layout.training_arguments(run)
    zero = training.get("deepspeed", {}).get("zero_optimization", {})
    if zero.get("stage") == 3:
        raise MeasurementError(
            "parallel: stage 3 divides a checkpoint while it loads, and profiles make random "
            "weights; use profile: none"
        )
    storage = layout.model_arguments(run).get("bnb_4bit_quant_storage", "uint8")
    return Spreading(
        training=training, quant_storage=storage, micro_batches=layout.data_parallel_size
    )
