"""Full fine-tuning: every weight is trained, no adapter."""

from __future__ import annotations

from whichlora.methods.base import Method

METHOD = Method(
    name="full",
    summary="all weights trained",
    trains_base=True,
    merges=False,
    ignores=frozenset(
        {
            "r",
            "lora_alpha",
            "lora_dropout",
            "target_modules",
            "modules_to_save",
            "bias",
            "use_rslora",
            "loraplus_lr_ratio",
            "adapter_dtype",
        }
    ),
)
