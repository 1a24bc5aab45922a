"""QDoRA: DoRA over a 4-bit base."""

from __future__ import annotations

from dataclasses import replace

from whichlora.methods import dora, qlora

METHOD = replace(
    dora.METHOD,
    name="qdora",
    summary="DoRA on a 4-bit base (NF4, double quantisation)",
    base_quant=qlora.METHOD.base_quant,
    serve=qlora.METHOD.serve,
)
