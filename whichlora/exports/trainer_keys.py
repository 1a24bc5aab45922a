"""A recipe in the Trainer's keys, which the tools that are built on it share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.exports.recipe import Recipe
from whichlora.spec.plan import SAVED_SHARE
from whichlora.spec.run import RunConfig

# Keys of the Trainer → settings of a run. Exporters write such tables, importers read them.
BATCH: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def written(run: RunConfig, table: Mapping[str, str]) -> dict[str, Any]:
    """The keys of `table` with the settings of `run`."""
    return {key: getattr(run, setting) for key, setting in table.items()}


def optimising(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """How long, how fast and in which precision is trained, in the Trainer's keys."""
    return {
        "num_train_epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "optim": run.trainer_optim,
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        **({"tf32": True} if run.precision == "tf32" else {}),
    }


def saving(recipe: Recipe) -> dict[str, Any]:
    """When checkpoints are written, in the Trainer's keys, which tools built on it share."""
    keeping = recipe.keeping
    if not keeping.saves:
        return {"save_strategy": "no"}
    return {
        "save_strategy": "steps",
        "save_steps": keeping.save_steps or SAVED_SHARE,
        "save_total_limit": keeping.save_total_limit,
    }


def evaluating(recipe: Recipe) -> dict[str, Any]:
    """When the validation rows are evaluated, in the Trainer's keys; empty without them."""
    if not (recipe.validation and recipe.keeping.evaluates):
        return {}
    if recipe.keeping.eval_steps is None:
        return {"eval_strategy": "epoch"}
    return {"eval_strategy": "steps", "eval_steps": recipe.keeping.eval_steps}


def padding_note(recipe: Recipe, *supported: str) -> tuple[str, ...]:
    """A note if the tool pads to the longest row and the recipe batches otherwise.

    Args:
        supported: other batchings that the tool has.
    """
    if recipe.batching in (None, "longest", *supported):
        return ()
    return (
        f"batches were to be {recipe.batching}; here rows are padded to the longest of their "
        "batch, so total time and tokens differ",
    )
