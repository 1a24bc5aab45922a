"""What a user does with a fine-tuning beside its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from whichlora.errors import ConfigError
from whichlora.spec.plan import Keeping
from whichlora.spec.run import MOST_COUNT
from whichlora.spec.words import unknown

MergeOn = Literal["gpu", "cpu", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeConfig:
    """Settings of the stages around the training.

    Args:
        eval_rows: rows of an evaluation whose logits `compute_metrics` gets; 0: the loss alone
            (`prediction_loss_only`).
        eval_accumulation_steps: batches after which kept logits move to the host; None: at the end.
        eval_seq_len: tokens of the longest row that is evaluated; None: as many as the run trains
            on; 0: nothing is evaluated.
        merge_on: where the adapter is merged into the base; none: it is not.
        keeping: how many checkpoints are kept.

    Raises:
        ConfigError: no whole number, below its least, or an unknown place.
    """

    eval_rows: int = 0
    eval_accumulation_steps: int | None = None
    eval_seq_len: int | None = None
    merge_on: MergeOn = "gpu"
    keeping: Keeping = field(default_factory=Keeping)

    def __post_init__(self) -> None:
        for name, least in (("eval_rows", 0), ("eval_accumulation_steps", 1)):
            value = getattr(self, name)
            if value is None and least == 1:
                continue
            if type(value) is not int or not least <= value <= MOST_COUNT:
                raise ConfigError(
                    f"{name}: must be a whole number from {least} to {MOST_COUNT:,}, got {value!r}"
                )
        if self.eval_accumulation_steps is not None and not self.eval_rows:
            raise ConfigError("eval_accumulation_steps: moves kept logits; give eval_rows, too")
        if self.merge_on not in get_args(MergeOn):
            raise ConfigError(unknown("merge_on", self.merge_on, get_args(MergeOn)))
