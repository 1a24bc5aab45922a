"""Full fine-tuning: every weight is trained, no adapter."""

from __future__ import annotations

from whichlora.methods.base import RANK_SETTINGS, Method
from whichlora.trainers.base import SUPERVISED_RATE

METHOD = Method(
    name="full",
    summary="all weights trained",
    trains_base=True,
    learning_rate=SUPERVISED_RATE,
    merges=False,
    ignores=RANK_SETTINGS | {"adapter_dtype", "modules_to_save", "target_modules"},
)
