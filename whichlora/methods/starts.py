"""Short names of LoRA whose A and B start otherwise: `pissa` is lora with that start.

PiSSA (arXiv:2404.02948), OLoRA (2406.01775), EVA (2410.07170), CorDA (2406.05223), LoftQ
(2310.08659), LoRA-GA (2407.05000), MiCA (2604.01694).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.methods import lora
from whichlora.methods.base import Method
from whichlora.methods.lora_starts import START
from whichlora.spec.run import RunConfig

# name: `init_lora_weights` of peft 0.21.2, and what the start reads
_STARTS = {
    "pissa": ("pissa", "the largest singular vectors of each weight"),
    "olora": ("olora", "Q and R of each weight"),
    "eva": ("eva", "singular vectors of each layer's inputs"),
    "corda": ("corda", "singular vectors of weights by the inputs' covariance"),
    "loftq": ("loftq", "what quantising each weight loses"),
    "lora-ga": ("lora_ga", "singular vectors of the first gradients"),
    "mica": ("mica", "the smallest singular vectors of each weight as a frozen B"),
}


def _with_start(name: str, start: str, reads: str) -> Method:
    def stated(run: RunConfig) -> RunConfig:
        return replace(run, method_options=((START.name, start),))

    def peft_config(run: RunConfig) -> Mapping[str, Any]:
        return lora.peft_config(stated(run))

    def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
        return lora.notes(stated(run), adapts_experts)

    return replace(
        lora.METHOD,
        adapts_table=False,
        name=name,
        summary=f"LoRA that starts from {reads}",
        peft_config=peft_config,
        read_peft=lambda config: None,  # lora with an option
        options=(),
        **lora.of_start(start),
        notes=notes,
    )


METHODS = tuple(_with_start(name, *start) for name, start in _STARTS.items())
