"""What each kind of rank holds, and what the ranks send, of a run on several GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whichlora.parallel.base import Message, RankKind
from whichlora.parallel.communication import CommunicationTime
from whichlora.parallel.layout import Layout
from whichlora.predict.coefficients import Calibration
from whichlora.predict.host_memory import HostUse
from whichlora.predict.judgement import judge_memory
from whichlora.predict.parts import part_bytes
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import Count, added
from whichlora.spec.results import (
    Communication,
    MessagePrediction,
    RankPrediction,
    SeveralGpus,
)
from whichlora.timing.links import RING_FACTORS


def several_gpus(
    job: ResolvedRun,
    layout: Layout,
    kinds: Sequence[RankKind],
    moments: Mapping[str, Mapping[str, Count]],
    calibration: Calibration,
    messages: Sequence[Sequence[Message]],
    communication: Sequence[CommunicationTime],
    *,
    exceeds_host: bool,
    host: HostUse,
    host_memory_bytes: int | None,
) -> SeveralGpus:
    """What several GPUs add to the prediction of `job`.

    Args:
        kinds: of its ranks.
        moments: bytes by part at each, of the ranks together.
        messages: of every kind of rank.
        communication: what they take; empty where the links are not known.
        exceeds_host: a node has less memory than they need.
        host, host_memory_bytes: what all ranks of a node take of its memory, and what it has.
    """
    of_kinds = (moments,) if len(kinds) == 1 else (_moments(job, layout, kind) for kind in kinds)
    ranks = tuple(
        _rank(job, layout, kind, held, calibration)
        for kind, held in zip(kinds, of_kinds, strict=True)
    )
    return SeveralGpus(
        ranks=ranks,
        exceeds_host=exceeds_host,
        host_bytes=host.pinned_bytes,
        host_memory_bytes=host_memory_bytes,
        loading_host_bytes=host.loading_bytes,
        saving=host.saving,
        communication=max(
            (
                _communication(of_kind, communication[place] if communication else None)
                for place, of_kind in enumerate(messages)
            ),
            key=lambda sent: sent.num_bytes,
        ),
        global_batch_size=job.run.batch_size * job.micro_batches,
    )


def _moments(job: ResolvedRun, layout: Layout, kind: RankKind) -> dict[str, dict[str, Count]]:
    counted = layout.ledger(kind)
    return {moment: part_bytes(job, counted, moment) for moment in counted.moments}


def _rank(
    job: ResolvedRun,
    layout: Layout,
    kind: RankKind,
    moments: Mapping[str, Mapping[str, Count]],
    calibration: Calibration,
) -> RankPrediction:
    judged = judge_memory(
        moments, calibration.memory, device_bytes=job.gpu.memory_bytes, pool_bytes=0
    )
    return RankPrediction(
        name=kind.name,
        ranks=kind.ranks,
        moment=judged.moments[judged.position],
        peak_allocated_bytes=judged.peak_allocated_bytes,
        breakdown=judged.breakdown,
        host_bytes=int(added(entry.num_bytes for entry in layout.on_host(kind))),
    )


def sent_bytes(message: Message) -> int:
    """What one rank sends in all of `message`.

    Kind: exact, of ring algorithms. Source: NCCL's performance page: each of n ranks sends
    (n-1)/n of a tensor that is gathered or scattered, and twice that of one that is reduced.
    """
    share = (message.size - 1) / message.size
    factor = share * RING_FACTORS[message.collective] if message.collective in RING_FACTORS else 1.0
    return int(message.count * message.num_bytes * factor)


def _communication(messages: Sequence[Message], time: CommunicationTime | None) -> Communication:
    seconds = [float(sent.total_s) for sent in time.sent] if time else [math.nan] * len(messages)
    return Communication(
        num_bytes=sum(map(sent_bytes, messages)),
        exposed_s=float(time.exposed_s) if time else math.nan,
        overlapped_s=float(time.overlapped_s) if time else math.nan,
        messages=tuple(
            MessagePrediction(
                what=message.what,
                collective=message.collective,
                num_bytes=int(message.num_bytes),
                count=int(message.count),
                size=message.size,
                hidden_by=message.hidden_by,
                seconds=total_s,
            )
            for message, total_s in zip(messages, seconds, strict=True)
            if message.size > 1 or message.collective not in RING_FACTORS
        ),
    )
