"""What a prediction assumed that its user did not state, and what it costs not to state it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.predict.defaults import is_dated, own_settings
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.results import Assumed, Prediction
from whichlora.spec.run import RunConfig

# Settings that move memory by much, in the order in which they are said.
MOVING = ("precision", "gradient_checkpointing", "optimizer", "attn", "seq_len")
NOTABLE = 0.1  # of the memory, from where on the trainer's own defaults are worth a figure


def assumed(
    model: ModelSpec,
    asked: RunConfig,
    prediction: Prediction,
    stated: Collection[str],
    used_bytes: Callable[[RunConfig], int] | None,
) -> Assumed | None:
    """What is not among `stated`; None where there is nothing.

    Args:
        asked: the run before anything was filled in.
        used_bytes: device memory of a run; None to leave the comparison out.
    """
    run = prediction.run
    settings = moving_settings(run, stated)
    if not settings:
        return None
    if is_dated(run):
        return Assumed(settings=settings, by_release=True)
    own = {
        name: value
        for name, value in own_settings(model, asked).items()
        if value != getattr(run, name)
    }
    if not own or used_bytes is None:
        return Assumed(settings=settings, own=own)
    return Assumed(settings=settings, own=own, own_bytes=_own_bytes(asked, own, run, used_bytes))


def moving_settings(run: RunConfig, stated: Collection[str]) -> dict[str, Any]:
    """What a fine-tuning has of the settings that move memory by much and are not `stated`."""
    if run.phase != "finetune":
        return {}
    settings = {name: getattr(run, name) for name in MOVING if name not in stated}
    return settings | ({"base_dtype": run.base_dtype} if "precision" in settings else {})


def _own_bytes(
    asked: RunConfig, own: dict[str, Any], run: RunConfig, used_bytes: Callable[[RunConfig], int]
) -> int | None:
    """Memory with the trainer's own defaults, of rows and GPUs as the run has them."""
    sizes = {name: getattr(run, name) for name in ("batch_size", "seq_len", "parallel")}
    try:
        return used_bytes(replace(asked, **own, **sizes))
    except ConfigError:  # such a run is not predicted
        return None
