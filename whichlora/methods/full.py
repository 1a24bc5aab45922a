"""Full fine-tuning: every weight is trained, no adapter."""

from __future__ import annotations

from whichlora.methods.base import Method

METHOD = Method(
    name="full",
    summary="all weights trained",
    peft_config=lambda run: None,
    trains_base=True,
)
