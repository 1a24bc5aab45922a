"""Many candidates judged at once: what `prediction.predict` says of one run, for arrays of runs.

A block is everything that is one setting outside (model, method, stack, device) and arrays inside:
batch size, length and rank in fine-tuning; batch size, prompt and new tokens in inference. The
arrays broadcast, so that an open mesh (`numpy.ix_`) is counted along its axes where it can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from whichlora import timing
from whichlora.calibration import Calibration, MemoryModel
from whichlora.memory import allocator
from whichlora.memory.ledger import PARTS
from whichlora.numeric import TWO_SIDED_Z, WIDEST, Count, Real
from whichlora.prediction import (
    ALLOCATED_PARTS,
    MEMORY_CONFIDENCE,
    TIME_CONFIDENCE,
    forward_features,
    ledger,
    mean_context,
    part_bytes,
    step_features,
)
from whichlora.resolution import Job
from whichlora.timing import FEATURES, TimeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_LIVE = (*ALLOCATED_PARTS, "context")

Features: TypeAlias = Mapping[str, Mapping[str, Real]]  # by phase


@dataclass(frozen=True, slots=True)
class Counts:
    """What the formulas count for every run of a block, before any calibration.

    Args:
        shape: of the block; every array broadcasts to it.
        moments: bytes by part at each moment that can be the peak.
        features: time features by phase: "finetune", or "prefill" and "decode".
        tokens: what a step trains on, or a generation makes (an encoder: reads).
        steps: decoding steps of a generation.
    """

    job: Job
    shape: tuple[int, ...]
    moments: tuple[Mapping[str, Count], ...]
    features: Features
    tokens: Count
    steps: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrediction:
    """The numbers of `Prediction` for every run of a block, bytes and seconds as floats.

    Args:
        least_bytes: lower bound of live tensors and context: what a run cannot do without.
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


def count(job: Job, axes: Mapping[str, Count]) -> Counts:
    """Bytes and work of every run of a block.

    Args:
        axes: integer arrays that broadcast; what is not named has the value of `job.run`.
    """
    import numpy as np

    values = [np.asarray(axes.get(name, getattr(job.run, name))) for name in job.size_names]
    floats = (np.asarray(value, dtype=np.float64) for value in values)
    sizes = dict(zip(job.size_names, floats, strict=True))
    found = ledger(job, **sizes)
    features, tokens, steps = (
        _training(job, sizes) if job.run.phase == "finetune" else _inference(job, sizes)
    )
    return Counts(
        job=job,
        shape=np.broadcast_shapes(*(value.shape for value in values)),
        moments=tuple(part_bytes(job, found, moment) for moment in found.moments),
        features=features,
        tokens=tokens,
        steps=steps,
    )


def _training(job: Job, sizes: Mapping[str, Count]) -> tuple[Features, Count, Count]:
    """Time features by phase, tokens and decoding steps."""
    tokens = sizes["batch_size"] * sizes["seq_len"] * job.run.gradient_accumulation_steps
    return {"finetune": step_features(job, **sizes)}, tokens, 0


def _inference(job: Job, sizes: Mapping[str, Count]) -> tuple[Features, Count, Count]:
    """The same of a generation."""
    batch_size, prompt_len, new_tokens, r = (sizes[name] for name in job.size_names)

    def forward(context: Count, *, decoding: bool) -> dict[str, Real]:
        return forward_features(job, context=context, decoding=decoding, batch_size=batch_size, r=r)

    prefill = {"prefill": forward(prompt_len, decoding=False)}
    if job.model.task == "encoder":
        return prefill, batch_size * prompt_len, new_tokens - 1
    decode = {"decode": forward(mean_context(prompt_len, new_tokens), decoding=True)}
    return prefill | decode, batch_size * new_tokens, new_tokens - 1


def judge_block(counts: Counts, calibration: Calibration) -> BlockPrediction:
    """`counts` in the light of `calibration`, every array of the shape of the block."""
    import numpy as np

    memory = _judge_memory(counts, calibration.memory)
    time_s, deviation = _judge_time(counts, calibration)
    factor = np.exp(np.minimum(TWO_SIDED_Z[TIME_CONFIDENCE] * deviation, WIDEST))
    return BlockPrediction(
        **memory,
        time_s=np.broadcast_to(time_s, counts.shape),
        low_s=np.broadcast_to(time_s / factor, counts.shape),
        high_s=np.broadcast_to(time_s * factor, counts.shape),
    )


def _at_peak(counts: Counts, model: MemoryModel) -> Array:
    """Bytes by part at the largest moment of each run, shape [num_parts, *block]."""
    import numpy as np

    parts = np.empty((len(PARTS), *counts.shape))
    first = counts.moments[0]
    differs = [any(moment[name] is not first[name] for moment in counts.moments) for name in PARTS]
    most: Real | None = None
    for moment in counts.moments:
        allocated: Real = 0.0
        for name in ALLOCATED_PARTS:
            allocated = allocated + moment[name] * model.mean[name]
        if most is None:
            for i, name in enumerate(PARTS):
                parts[i] = moment[name]
            most = np.broadcast_to(allocated, counts.shape)
            continue
        larger = np.broadcast_to(allocated > most, counts.shape)
        if larger.any():
            for i, name in enumerate(PARTS):
                if differs[i]:
                    np.copyto(parts[i], moment[name], where=larger)
            most = np.maximum(most, allocated)
    return parts


def _judge_memory(counts: Counts, model: MemoryModel) -> dict[str, Array]:
    import numpy as np

    job = counts.job
    parts = _at_peak(counts, model)
    mean = np.array([model.mean[name] for name in PARTS])
    live_deviation, deviation = _spreads(model, parts, mean)
    sizes = parts  # rounded in place, as the breakdown of one run is
    for i in range(len(PARTS)):
        sizes[i] *= mean[i]
        np.rint(sizes[i], out=sizes[i])
    index = {name: i for i, name in enumerate(PARTS)}
    context = sizes[index["context"]]
    allocated = sum(
        (sizes[index[name]] for name in ALLOCATED_PARTS[1:]), sizes[index[ALLOCATED_PARTS[0]]]
    )
    live = allocated + context
    pool = allocator.pool_bytes(job.gpu, job.run.kv_cache) if job.run.phase == "inference" else 0
    z = TWO_SIDED_Z[MEMORY_CONFIDENCE]
    least = np.rint(live - z * live_deviation)
    if pool:
        used = np.maximum(live, pool)
        low = used
        high = np.where(live > pool, used + z * deviation, used)
    else:  # idle segments are given back before a request fails
        idle = np.minimum(sizes[index["allocator"]], job.gpu.memory_bytes - live)
        used = live + np.maximum(0, idle)
        low = np.minimum(np.maximum(live - z * live_deviation, used - z * deviation), used)
        high = used + z * deviation
    return {
        "peak_allocated_bytes": allocated,
        "device_used_bytes": used,
        "low_bytes": np.rint(low),
        "high_bytes": np.rint(high),
        "least_bytes": least,
    }


def _spreads(model: MemoryModel, parts: Array, mean: Array) -> tuple[Array, Array]:
    """Standard deviations in bytes of what is live, and of everything."""
    import numpy as np

    flat = parts.reshape(len(PARTS), -1)
    covariance = np.array(model.covariance)
    found = []
    for names in (_LIVE, PARTS):
        chosen = [PARTS.index(name) for name in names]
        some = flat[chosen] if len(chosen) < len(PARTS) else flat
        inner = covariance[np.ix_(chosen, chosen)]
        variance = _quadratic(some, inner) + (model.noise * (mean[chosen] @ some)) ** 2
        found.append(np.sqrt(variance, out=variance).reshape(parts.shape[1:]))
    return found[0], found[1]


def _quadratic(columns: Array, matrix: Array) -> Array:
    """x·M·x for every column x; never negative."""
    import numpy as np

    diagonal = np.diagonal(matrix)
    if np.array_equal(matrix, np.diag(diagonal)):
        found = diagonal @ (columns * columns)
    else:
        found = np.einsum("ij,ij->j", matrix @ columns, columns)
    return np.asarray(np.maximum(found, 0.0))


def _judge_time(counts: Counts, calibration: Calibration) -> tuple[Real, Real]:
    """Seconds of one step or one generated token, and the deviation of their log."""
    import numpy as np

    parts = [_phase(found, calibration.time[phase]) for phase, found in counts.features.items()]
    seconds, deviation = parts[0]
    if counts.job.run.phase == "finetune":
        return seconds, deviation
    total = seconds
    if len(parts) > 1:
        decode_s, decode_deviation = parts[1]
        total = seconds + counts.steps * decode_s
        # one run's errors in both phases come from one host and one device: they add up
        deviation = (seconds * deviation + counts.steps * decode_s * decode_deviation) / total
    return total / np.asarray(counts.tokens), deviation


def _phase(found: Mapping[str, Real], model: TimeModel) -> tuple[Real, Real]:
    """Seconds of one pass, and the deviation of their log."""
    import numpy as np

    counted = timing.deciding(model, found)
    seconds: Real = sum(model.mean[name] * counted[name] for name in FEATURES)
    columns = np.stack(np.broadcast_arrays(*(counted[name] for name in FEATURES)))
    variance = _quadratic(columns.reshape(len(FEATURES), -1), np.array(model.covariance))
    relative = variance.reshape(columns.shape[1:]) / (seconds * seconds)
    return seconds, model.interval_scale * np.sqrt(relative + model.noise**2)


def predict_block(job: Job, calibration: Calibration, axes: Mapping[str, Count]) -> BlockPrediction:
    """Judge every run of a block; equal to `prediction.predict` run by run."""
    return judge_block(count(job, axes), calibration)
