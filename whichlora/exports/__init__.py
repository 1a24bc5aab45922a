"""A fine-tuning in the formats of other tools: one function each."""

from __future__ import annotations

from collections.abc import Callable

from whichlora.exports import axolotl, llamafactory, skypilot, slurm, transformers, trl, unsloth
from whichlora.exports.recipe import DATA_FILE, Export, Recipe

FORMATS: dict[str, Callable[[Recipe], Export]] = {
    "transformers": transformers.export,
    "trl": trl.export,
    "axolotl": axolotl.export,
    "llamafactory": llamafactory.export,
    "unsloth": unsloth.export,
    "skypilot": skypilot.export,
    "slurm": slurm.export,
}

__all__ = ["DATA_FILE", "FORMATS", "Export", "Recipe"]
