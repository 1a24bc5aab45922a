"""DeepSpeed ZeRO-1: each rank keeps the optimizer's states of its share of the parameters.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` with `partition_grads=False`.
"""

from __future__ import annotations

from functools import partial

from whichlora.memory.event_list import EventList
from whichlora.parallel import deepspeed
from whichlora.parallel.base import (
    Message,
    Moments,
    RankKind,
    Spread,
    Strategy,
    loads_on_host,
)
from whichlora.parallel.flat_events import flat_requests
from whichlora.parallel.host_update import OMP_NUM_THREADS


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    part = deepspeed.Partitioned(rank.step, spread)
    return deepspeed.replicated_moments(part, moments, partitions_gradients=False)


def _requests(rank: RankKind, spread: Spread) -> EventList | None:
    part = deepspeed.Partitioned(rank.step, spread)
    return flat_requests(part, partitions_gradients=False)


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    # `reduce_ready_partitions_and_remove_grads` waits for the last micro-step
    part = deepspeed.Partitioned(rank.step, spread)
    # and adds to a buffer on the host, which is empty
    accumulates = int(rank.step.accumulates)
    copies = deepspeed.to_and_from_host(
        spread,
        part,
        accumulated=part.whole * part.width,
        stores=accumulates,
        fetches=accumulates,
        sent_back=part.width,
    )
    return (
        deepspeed.reduced(rank, spread, micro_steps=1),
        *copies,
        deepspeed.gathered_once(rank, spread),
    )


_OPTIONS = (deepspeed.BUCKET, deepspeed.OVERLAP, deepspeed.OFFLOAD_OPTIMIZER, OMP_NUM_THREADS)
STRATEGY = Strategy(
    name="zero1",
    summary="DeepSpeed: optimizer states divided",
    divides="data",
    keeps_weights=True,
    options=_OPTIONS,
    smallest=(("offload", ("optimizer",)),),
    check=deepspeed.check,
    takes_images=True,
    runs_alone=True,
    split=deepspeed.narrowed,
    moments=_moments,
    requests=_requests,
    update_share=deepspeed.update_share,
    messages=_messages,
    host_update=deepspeed.flat_host_update,
    on_host=deepspeed.on_host,
    saving=deepspeed.saving,
    loading=loads_on_host,
    training_arguments=partial(deepspeed.training_arguments, stage=1),
    read_accelerator=partial(deepspeed.read_accelerator, stage=1, options=_OPTIONS),
    notes=deepspeed.notes,
)
