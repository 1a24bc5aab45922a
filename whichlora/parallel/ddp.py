"""DistributedDataParallel: every rank has all of the model and its own micro-batch.

Source: torch 2.13 `torch/nn/parallel/distributed.py` and `reducer.cpp`; accelerate 1.15
`Accelerator.prepare_model`, whose `DistributedDataParallelKwargs` leave
`gradient_as_bucket_view` at False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.event_list import EventList
from whichlora.memory.step import TrainingStep
from whichlora.parallel.base import (
    Message,
    Moments,
    RankKind,
    Spread,
    Strategy,
    loads_on_host,
)
from whichlora.parallel.ddp_events import BUCKET_BYTES, bucket_requests
from whichlora.parallel.gradients import GRADIENTS, as_accumulated, without
from whichlora.spec.numeric import Count, floor_div
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.run import RunConfig

_AFTER_LAYERS = ("embedding_backward", "optimizer_step")
BUCKETS = Fact(
    part="gradients",
    what="buckets of DistributedDataParallel",
    shape="[trained_params]",
    dtype="of the parameter",
    why="the reducer copies gradients into flat buckets, which it keeps from step to step",
    source="torch reducer.cpp initialize_buckets; DDP(gradient_as_bucket_view=False)",
)


def bucket_bytes(step: TrainingStep) -> Count:
    """Bytes of all buckets: as many as the gradients, whatever the cap of one bucket is.

    Kind: exact. Source: torch 2.13 `Reducer::initialize_buckets`.
    """
    return step.gradients.total


def _check(step: TrainingStep, spread: Spread) -> None:
    """Refuse parameters that never get a gradient, which the reducer waits for.

    Source: transformers 5.23 `Trainer._ddp_find_unused_parameters`: only without checkpointing.
    """
    tower = step.model.tower
    unused = tower is not None and tower.idle and step.trains_tower
    if unused and step.run.gradient_checkpointing:
        raise ConfigError(
            "parallel: ddp waits for all gradients, and blocks of the tower of "
            f"{step.model.name} get none; use freeze_vision_tower, or gradient_checkpointing: "
            "false"
        )
    if step.model.skips_layers and step.run.gradient_checkpointing:
        raise ConfigError(
            f"parallel: ddp waits for all gradients, and the layers of {step.model.name} that "
            "rows without images skip get none; use gradient_checkpointing: false, or zero2"
        )


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    buckets = Entry(BUCKETS, bucket_bytes(rank.step))
    if spread.options["gradient_as_bucket_view"]:
        moments = {name: _as_views(rank.step, name, entries) for name, entries in moments.items()}
    return {
        name: entries if name == "loading" else (*entries, buckets)
        for name, entries in moments.items()
    }


def _requests(rank: RankKind, spread: Spread) -> EventList | None:
    return None if spread.options["gradient_as_bucket_view"] else bucket_requests(rank.step)


def _as_views(step: TrainingStep, name: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """`entries` where gradients are views of the buckets, which `zero_grad` does not free."""
    # `Reducer::mark_variable_ready_dense` makes them views when they are reduced: gradients of
    # earlier micro-steps, under `no_sync`, are tensors of their own until then
    if step.accumulates and name not in ("first_layer_backward", *_AFTER_LAYERS):
        return entries
    return without(as_accumulated(step).get(name, entries), *GRADIENTS)


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    total = rank.step.gradients.total
    full = floor_div(total, BUCKET_BYTES)
    buckets = (
        ("full buckets", BUCKET_BYTES, full),
        ("last bucket", total - full * BUCKET_BYTES, 1),
    )
    return tuple(
        Message(
            what=f"gradients: {which}",
            collective="all_reduce",
            num_bytes=num_bytes,
            count=count,
            size=spread.size,
            hidden_by="backward",
            # the Trainer's `no_sync` leaves out all micro-steps of a step but the last
            micro_steps=1,
        )
        for which, num_bytes, count in buckets
    )


def _training_arguments(run: RunConfig, spread: Spread) -> dict[str, Any]:
    """None: the Trainer wraps a model in DDP wherever there are several processes."""
    if spread.options["gradient_as_bucket_view"]:
        raise ConfigError(
            "gradient_as_bucket_view: true has no key in TrainingArguments; use false, or give "
            "the Trainer's accelerator a DistributedDataParallelKwargs yourself"
        )
    return {}


def _accelerate(run: RunConfig, spread: Spread) -> dict[str, Any]:
    return {"distributed_type": "MULTI_GPU"}


def _read_accelerator(accelerator: Mapping[str, Any]) -> dict[str, OptionValue] | None:
    """Accelerate's names of it are MULTI_GPU, MULTI_CPU, and so on."""
    return {} if str(accelerator["distributed_type"]).startswith("MULTI_") else None


STRATEGY = Strategy(
    name="ddp",
    summary="all of the model on every GPU, gradients averaged",
    divides="data",
    keeps_weights=True,
    options=(
        Option(
            name="gradient_as_bucket_view",
            summary="gradients are views of DDP's buckets",
            default=False,
        ),
    ),
    check=_check,
    takes_images=True,
    moments=_moments,
    requests=_requests,
    messages=_messages,
    loading=loads_on_host,
    training_arguments=_training_arguments,
    accelerate=_accelerate,
    read_accelerator=_read_accelerator,
)
