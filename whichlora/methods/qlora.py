"""QLoRA: LoRA over a 4-bit base (Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

from dataclasses import replace

from whichlora.methods import lora

METHOD = replace(
    lora.METHOD,
    name="qlora",
    summary="low-rank adapters on a 4-bit base (NF4, double quantisation)",
    base_quant="nf4-dq",
    serve="as-trained",
)
