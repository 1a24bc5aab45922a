"""DeepSpeed ZeRO-2: each rank keeps the states and gradients of its share of the parameters.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` with `partition_grads=True`.
"""

from __future__ import annotations

from whichlora.parallel import deepspeed
from whichlora.parallel.base import Message, Moments, RankKind, Spread, Strategy


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    part = deepspeed.Partitioned(rank.step, spread)
    return deepspeed.replicated_moments(part, moments, partitions_gradients=True)


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    return (
        deepspeed.reduced(rank, spread, micro_steps=None),
        deepspeed.gathered_once(rank, spread),
    )


STRATEGY = Strategy(
    name="zero2",
    summary="DeepSpeed: optimizer states and gradients divided",
    divides="data",
    options=(deepspeed.BUCKET, deepspeed.OVERLAP, deepspeed.OFFLOAD_OPTIMIZER),
    smallest=(("offload", ("optimizer",)),),
    check=deepspeed.check,
    split=deepspeed.narrowed,
    moments=_moments,
    update_share=deepspeed.update_share,
    messages=_messages,
    on_host=deepspeed.on_host,
    training_arguments=deepspeed.training_arguments,
    notes=deepspeed.notes,
)
