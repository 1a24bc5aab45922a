"""What a calibration makes of counted bytes and passes: peak memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from whichlora.memory.training import least_parts
from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import CountedBlock, check_layout, ranks_work
from whichlora.predict.judgement import (
    MemoryJudgement,
    Pass,
    TimeJudgement,
    joined,
    judge_memory,
    judge_time,
    least_bytes,
)
from whichlora.predict.quantities import (
    moment_parts,
    of_each_source,
    passes,
    passes_alone,
    pool_bytes,
    run_moments,
    step_features,
    training_step,
)
from whichlora.predict.rank_time import RanksJudgement, RanksWork, judge_ranks, links_of
from whichlora.predict.resolve import ResolvedRun
from whichlora.serving.step_time import Service
from whichlora.spec.numeric import Count, Real
from whichlora.timing import model as timing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def judge_moments(
    job: ResolvedRun,
    moments: Mapping[str, Mapping[str, Count]],
    calibration: Calibration,
    *,
    is_replayed: bool = False,
    service: Service | None = None,
) -> MemoryJudgement:
    """Peak memory of `job`, whose bytes have been counted.

    Args:
        moments: bytes by part at each, of `moment_parts` or `run_moments`.
        service: the engine of `job`, where it has been started.
    """
    return judge_memory(
        moments,
        calibration.memory,
        device_bytes=job.gpu.memory_bytes,
        pool_bytes=pool_bytes(job, service),
        is_replayed=is_replayed,
    )


def judged_memory(job: ResolvedRun, calibration: Calibration, **sizes: Count) -> MemoryJudgement:
    """Peak memory of `job`, with the estimate of what the allocator keeps.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.

    Raises:
        ConfigError: what a strategy refuses.
    """
    check_layout(job)
    return judge_moments(job, moment_parts(job, **sizes), calibration)


def least_training_bytes(
    job: ResolvedRun, calibration: Calibration, *, batch_size: Count, seq_len: Count, least_r: Count
) -> Real:
    """Device memory that fine-tuning takes at least, whatever its rank is from `least_r` on."""
    if job.layout is not None:  # what a strategy leaves of these parts is its own
        return 0.0
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "r": least_r}
    parts = of_each_source(job, lambda **counts: least_parts(training_step(job, **counts)), sizes)
    return least_bytes(parts, calibration.memory)


def judged_run(job: ResolvedRun, calibration: Calibration) -> MemoryJudgement:
    """Peak memory of `job`; what the allocator keeps is replayed where its events are known."""
    moments, is_replayed = run_moments(job)
    return judge_moments(job, moments, calibration, is_replayed=is_replayed)


def judged_time(job: ResolvedRun, calibration: Calibration, **sizes: Count) -> TimeJudgement:
    """Time of one optimizer step of `job`, or of one generation.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    calibration = calibration.for_engine(job.run.engine, job.gpu)
    ranks = ranks_work(job, **sizes)
    if ranks is None:
        return judge_time(passes(job, **sizes), calibration.time)
    return judged_ranks(job, ranks, calibration, passes_alone(job, **sizes)).time


def step_s(job: ResolvedRun, calibration: Calibration, seq_len: int) -> float:
    """Seconds of one optimizer step of `job` at that length, with what several GPUs wait."""
    if job.layout is not None:
        return float(judged_time(job, calibration, seq_len=seq_len).total_s)
    features = step_features(job, seq_len=seq_len)
    return float(timing.seconds(calibration.time["finetune"], features)[0])


def judged_ranks(
    job: ResolvedRun, ranks: RanksWork, calibration: Calibration, alone: Sequence[Pass] = ()
) -> RanksJudgement:
    """Time of one optimizer step of `job`, whose ranks' work has been counted.

    Args:
        alone: what each rank does by itself beside the step.
    """
    links, _ = links_of(ranks.config, job.gpu, calibration.machines)
    judged = judge_ranks(ranks, calibration.time["finetune"], links)
    if not alone:
        return judged
    return replace(judged, time=joined(judged.time, judge_time(alone, calibration.time)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrediction:
    """The numbers of `Prediction` for every run of a block, bytes and seconds as floats.

    All runs of a block have the same model, method, dtypes and device, and differ in sizes.

    Args:
        least_bytes: lower bound of live tensors and context; a run needs at least this much.
        time_s: one optimizer step; inference: one generated token.
    """

    peak_allocated_bytes: Array
    device_used_bytes: Array
    low_bytes: Array
    high_bytes: Array
    least_bytes: Array
    time_s: Array
    low_s: Array
    high_s: Array


def judge_block(counted: CountedBlock, calibration: Calibration) -> BlockPrediction:
    """Judge every run of a block that has been counted."""
    import numpy as np

    def whole(values: Real) -> Array:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), counted.shape)

    job, num_units = counted.job, counted.num_units
    memory = judge_moments(job, counted.moments, calibration)
    least, low, high = memory.bounds()
    calibration = calibration.for_engine(job.run.engine, job.gpu)
    if counted.ranks is None:
        time = judge_time(counted.passes, calibration.time)
    else:
        time = judged_ranks(job, counted.ranks, calibration, counted.passes).time
    low_s, high_s = time.interval()
    return BlockPrediction(
        peak_allocated_bytes=whole(memory.peak_allocated_bytes),
        device_used_bytes=whole(memory.device_used_bytes),
        low_bytes=whole(low),
        high_bytes=whole(high),
        least_bytes=whole(least),
        time_s=whole(time.total_s / num_units),
        low_s=whole(low_s / num_units),
        high_s=whole(high_s / num_units),
    )
