"""DeepSpeed ZeRO-2: each rank keeps the states and gradients of its share of the parameters.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` with `partition_grads=True`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from whichlora.memory.event_list import EventList
from whichlora.parallel import deepspeed, zero1
from whichlora.parallel.base import Message, Moments, RankKind, Spread
from whichlora.parallel.flat_events import flat_requests


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    part = deepspeed.Partitioned(rank.step, spread)
    return deepspeed.replicated_moments(part, moments, partitions_gradients=True)


def _requests(rank: RankKind, spread: Spread) -> EventList | None:
    part = deepspeed.Partitioned(rank.step, spread)
    return flat_requests(part, partitions_gradients=True)


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    part = deepspeed.Partitioned(rank.step, spread)
    steps = rank.step.run.gradient_accumulation_steps
    copies = deepspeed.to_and_from_host(
        spread,
        part,
        accumulated=part.whole * part.width,  # each parameter that the partition touches, whole
        stores=steps if steps > 1 else 0,
        fetches=steps - 1,
        sent_back=part.width,
    )
    return (
        deepspeed.reduced(rank, spread, micro_steps=None),
        *copies,
        deepspeed.gathered_once(rank, spread),
    )


STRATEGY = replace(
    zero1.STRATEGY,
    name="zero2",
    summary="DeepSpeed: optimizer states and gradients divided",
    moments=_moments,
    requests=_requests,
    messages=_messages,
    training_arguments=partial(deepspeed.training_arguments, stage=2),
    read_accelerator=partial(deepspeed.read_accelerator, stage=2, options=zero1.STRATEGY.options),
)
