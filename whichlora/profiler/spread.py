"""What spreads a profiled run over its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from whichlora.errors import MeasurementError
from whichlora.methods import with_defaults
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
        quantised: the base is.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    quant_storage: str = "uint8"
    micro_batches: int = 1
    quantised: bool = False

    @property
    def divides(self) -> bool:
        """Whether the ranks divide the model."""
        return bool(self.training.keys() & {"fsdp", "deepspeed"})

    @property
    def is_installed(self) -> bool:
        """Whether the library is here that spreads it, which no extra of ours installs."""
        return "deepspeed" not in self.training or find_spec("deepspeed") is not None

    @property
    def divides_while_loading(self) -> bool:
        """Whether no rank ever has all weights: DeepSpeed's stage 3, unless they are quantised."""
        return self._is_stage_3 and not self.quantised

    @property
    def loads_on_host(self) -> bool:
        """Whether the model is made there, and each rank takes its part of it."""
        return self.divides and not self._is_stage_3

    @property
    def _is_stage_3(self) -> bool:
        zero = self.training.get("deepspeed", {}).get("zero_optimization", {})
        return bool(zero.get("stage") == 3)


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
    storage = layout.model_arguments(run).get("bnb_4bit_quant_storage", "uint8")
    return Spreading(
        training=layout.training_arguments(run),
        quant_storage=storage,
        micro_batches=layout.data_parallel_size,
        quantised=with_defaults(run).quant != "none",
    )
