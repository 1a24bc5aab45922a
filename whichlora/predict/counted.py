"""Bytes and passes of a run or of a block of runs, counted once for any number of calibrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from whichlora.memory.layer_passes import offloaded_bytes
from whichlora.parallel.base import RankKind
from whichlora.predict.host_memory import HostUse, host_use
from whichlora.predict.judgement import Pass
from whichlora.predict.quantities import (
    by_part,
    moment_parts,
    num_tokens,
    passes_alone,
    rank_kinds,
    run_moments,
    training_step,
)
from whichlora.predict.rank_time import RanksWork, count_ranks
from whichlora.predict.resolve import ResolvedRun
from whichlora.predict.rollout import check_rollout
from whichlora.predict.serving import service_of, start_ledger
from whichlora.serving.step_time import Service
from whichlora.spec.numeric import Count

MomentsOf: TypeAlias = Callable[
    [ResolvedRun, Sequence[RankKind]], tuple[Mapping[str, Mapping[str, Count]], bool]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRun:
    """Bytes and passes of one run, which no calibration changes.

    Args:
        moments: bytes by part at each that can be the peak.
        is_replayed: whether the allocator's part of them comes from a replay.
        passes: what one optimizer step is, or one generation; of several GPUs what each does alone.
        kinds: of the ranks of several GPUs.
        ranks: what they do together.
        host: what all ranks of a node take of its memory.
        service: the engine that serves it, started; None where memory is taken as needed.
    """

    job: ResolvedRun
    moments: Mapping[str, Mapping[str, Count]]
    is_replayed: bool
    passes: tuple[Pass, ...]
    kinds: tuple[RankKind, ...] = ()
    ranks: RanksWork | None = None
    host: HostUse = field(default_factory=HostUse)
    service: Service | None = None


def count_served(job: ResolvedRun, service: Service) -> CountedRun:
    """Count `job`, which `service` answers."""
    moments = by_part(job, start_ledger(job, service.start))
    return CountedRun(job=job, moments=moments, is_replayed=False, passes=(), service=service)


def count_run(
    job: ResolvedRun, *, replayed: bool = True, moments_of: MomentsOf = run_moments
) -> CountedRun:
    """Count `job` once for any number of calibrations.

    Args:
        replayed: whether its requests are replayed, which takes ten times as long as the rest.
        moments_of: what counts its bytes then.

    Raises:
        ConfigError: what a strategy or the trainer refuses.
    """
    service = service_of(job)
    if service is not None:
        return count_served(job, service)
    if job.run.phase == "finetune":
        job.trainer.check(job.run)
    check_rollout(job)
    check_layout(job)
    kinds = rank_kinds(job)
    moments, is_replayed = moments_of(job, kinds) if replayed else (moment_parts(job), False)
    ranks = ranks_work(job, kinds)
    return CountedRun(
        job=job,
        moments=moments,
        is_replayed=is_replayed,
        passes=passes_alone(job),
        kinds=kinds,
        ranks=ranks,
        host=host_of(job, kinds),
    )


def host_of(job: ResolvedRun, kinds: Sequence[RankKind] = (), **sizes: Count) -> HostUse:
    """What all ranks of a node of `job` take of its memory; args as of `ledger`, no arrays.

    On one GPU these are the inputs of layers that a trainer keeps on the host.
    """
    if job.layout is not None:
        return host_use(job.layout, training_step(job, **sizes), kinds or rank_kinds(job, **sizes))
    run = job.run
    if run.phase != "finetune" or not run.gradient_checkpointing or not job.trainer.offloads(run):
        return HostUse()
    tokens = run.batch_size * run.seq_len
    return HostUse(pinned_bytes=int(offloaded_bytes(job.model, tokens=tokens)))


def ranks_work(
    job: ResolvedRun, kinds: Sequence[RankKind] = (), **sizes: Count
) -> RanksWork | None:
    """What the ranks of `job` compute and send; None on one GPU. Args as of `ledger`."""
    if job.layout is None:
        return None
    return count_ranks(job.layout, job.run, kinds or rank_kinds(job, **sizes))


def check_layout(job: ResolvedRun) -> None:
    """Refuse what the strategies of `job` refuse. Raises: ConfigError."""
    if job.layout is not None:
        job.layout.check(training_step(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedBlock:
    """Bytes and passes of every run of a block, which no calibration changes.

    Args:
        moments: bytes by part at each that can be the peak.
        passes: what one optimizer step is, or one generation.
        num_units: what a pass is divided by: 1, or the tokens of a generation.
        ranks: what the ranks of several GPUs do instead of the passes.
    """

    job: ResolvedRun
    shape: tuple[int, ...]
    moments: Mapping[str, Mapping[str, Count]]
    passes: tuple[Pass, ...]
    num_units: Count
    ranks: RanksWork | None = None


def count_block(job: ResolvedRun, axes: Mapping[str, Count]) -> CountedBlock:
    """Count every run of a block once for any number of calibrations.

    The sizes broadcast, so an open mesh (`numpy.ix_`) is counted along its axes where possible.

    Args:
        axes: integer arrays that broadcast; sizes that are not named are those of `job.run`.

    Raises:
        ConfigError: what a strategy refuses.
    """
    import numpy as np

    check_layout(job)

    sizes: dict[str, Count] = {
        name: np.asarray(values, dtype=np.float64) for name, values in axes.items()
    }
    return CountedBlock(
        job=job,
        shape=np.broadcast_shapes(*(values.shape for values in sizes.values())),
        moments=moment_parts(job, **sizes),
        passes=passes_alone(job, **sizes),
        ranks=ranks_work(job, **sizes),
        num_units=1.0 if job.run.phase == "finetune" else num_tokens(job, **sizes),
    )
