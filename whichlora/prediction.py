"""Runs become `Prediction`s: the ledger, the work and a calibration, joined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from whichlora import timing, work
from whichlora.architecture import ModelSpec
from whichlora.calibration import Calibration, MemoryModel
from whichlora.memory import allocator
from whichlora.memory.generation import inference_ledger
from whichlora.memory.ledger import PARTS, Ledger, trained_params, training_ledger
from whichlora.notes import notes_on
from whichlora.numeric import TWO_SIDED_Z, WIDEST, Count, Real, largest
from whichlora.resolution import Job, resolve
from whichlora.results import MemoryPrediction, Prediction, TimePrediction, TracedPeak, Verdict
from whichlora.specs import GpuSpec, RunConfig

MEMORY_CONFIDENCE = 0.95
TIME_CONFIDENCE = 0.90
MEMORY_ONLY = "; memory only"  # ends the basis of what has no time


def _sizes(job: Job, given: Mapping[str, Count]) -> dict[str, Count]:
    return {name: given.get(name, getattr(job.run, name)) for name in job.size_names}


def ledger(job: Job, **sizes: Count) -> Ledger:
    """The moments of `job`.

    Args:
        sizes: of `Job.size_names`, in place of the run's own; arrays broadcast.
    """
    parts = (job.model, job.run, job.stack, job.method, job.gpu, job.targets)
    if job.run.phase == "inference":
        return inference_ledger(*parts, **_sizes(job, sizes))
    return training_ledger(*parts, **_sizes(job, sizes))


def num_trained(job: Job, r: Count | None = None) -> Count:
    """Parameters that `job` trains, at rank `r` where it is not the run's own."""
    run = job.run
    return trained_params(
        job.model,
        job.targets,
        job.method,
        run.r if r is None else r,
        modules_to_save=run.modules_to_save,
        bias=run.bias,
    )


def part_bytes(job: Job, found: Ledger, moment: str) -> dict[str, Count]:
    """Bytes of every part at `moment`, before any calibration; adds up to the card's use."""
    parts: dict[str, Count] = dict.fromkeys(PARTS, 0)
    for entry in found.moments[moment]:
        parts[entry.part] = parts[entry.part] + entry.num_bytes
    parts["temporary"] = parts["temporary"] + found.workspace_bytes
    parts["allocator"] = found.idle_bytes
    parts["context"] = allocator.context_bytes(job.gpu)
    return parts


ALLOCATED_PARTS = tuple(part for part in PARTS if part not in ("allocator", "context"))


def _spread(model: MemoryModel, parts: Mapping[str, float], names: tuple[str, ...]) -> float:
    """Standard deviation in bytes of the sum of `names`."""
    index = {part: i for i, part in enumerate(PARTS)}
    variance = sum(
        parts[a] * parts[b] * model.covariance[index[a]][index[b]]
        for a in names
        for b in names
        if parts[a] and parts[b]
    )
    total = sum(parts[name] * model.mean[name] for name in names)
    return math.sqrt(max(0.0, variance) + (model.noise * total) ** 2)


def predict_memory(job: Job, calibration: Calibration) -> tuple[MemoryPrediction, int]:
    """Peak memory of `job`, and the least it can be at the stated confidence.

    The second value is a bound of live tensors and context alone: when a request fails, the
    allocator drops its idle cache first, so only live tensors make a run fail.
    """
    model = calibration.memory
    found = ledger(job)
    by_moment = {moment: part_bytes(job, found, moment) for moment in found.moments}

    def corrected(parts: Mapping[str, Count], names: tuple[str, ...]) -> float:
        return sum(float(parts[name]) * model.mean[name] for name in names)

    moment = max(by_moment, key=lambda name: corrected(by_moment[name], ALLOCATED_PARTS))
    parts = by_moment[moment]
    breakdown = {name: round(float(parts[name]) * model.mean[name]) for name in PARTS}
    pool = allocator.pool_bytes(job.gpu, job.run.kv_cache) if job.run.phase == "inference" else 0
    allocated = sum(breakdown[name] for name in ALLOCATED_PARTS)
    if pool:
        breakdown["allocator"] = max(0, pool - allocated - breakdown["context"])
    else:  # idle segments are given back before a request fails
        room = job.gpu.memory_bytes - allocated - breakdown["context"]
        breakdown["allocator"] = max(0, min(breakdown["allocator"], room))
    reserved = allocated + breakdown["allocator"]
    used = reserved + breakdown["context"]
    z = TWO_SIDED_Z[MEMORY_CONFIDENCE]
    live = (*ALLOCATED_PARTS, "context")
    least = sum(breakdown[name] for name in live) - z * _spread(model, parts, live)
    live_width = z * _spread(model, parts, ALLOCATED_PARTS)
    fixed = pool and allocated + breakdown["context"] <= pool  # a pool is as large as it is
    reserve_width = 0.0 if fixed else z * _spread(model, parts, (*ALLOCATED_PARTS, "allocator"))
    width = 0.0 if fixed else z * _spread(model, parts, PARTS)
    low = float(used) if pool else max(least, used - width)
    return (
        MemoryPrediction(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            device_used_bytes=used,
            interval_bytes=(round(min(low, used)), round(used + width)),
            allocated_interval_bytes=(round(allocated - live_width), round(allocated + live_width)),
            reserved_interval_bytes=(
                round(reserved if pool else max(allocated - live_width, reserved - reserve_width)),
                round(reserved + reserve_width),
            ),
            breakdown=breakdown,
            moment=moment,
            confidence=MEMORY_CONFIDENCE,
        ),
        round(least),
    )


def judge(memory: MemoryPrediction, least: int, gpu: GpuSpec) -> Verdict:
    """Whether `memory` is within what `gpu` has, `least` being its lower bound of live tensors."""
    if memory.interval_bytes[1] <= gpu.memory_bytes:
        return "fits"
    return "fails" if least > gpu.memory_bytes else "undecided"


def step_features(job: Job, **sizes: Count) -> dict[str, Real]:
    """Time features of one optimizer step of `job`.

    Args:
        sizes: of `Job.size_names`, in place of the run's own; arrays broadcast.
    """
    counts = _sizes(job, sizes)
    done = work.training_work(
        job.model,
        job.run,
        job.stack,
        job.method,
        job.targets,
        **counts,
        num_trained=num_trained(job, counts["r"]),
    )
    return timing.features(done, job.gpu, dtype=job.dtype)


def forward_features(
    job: Job,
    *,
    context: Count,
    decoding: bool,
    batch_size: Count | None = None,
    r: Count | None = None,
) -> dict[str, Real]:
    """Time features of one forward: the prompt pass, or one decoding step.

    Args:
        batch_size, r: in place of the run's own.
    """
    done = work.inference_work(
        job.model,
        job.run,
        job.stack,
        method=job.method,
        targets=job.targets,
        batch_size=job.run.batch_size if batch_size is None else batch_size,
        r=job.run.r if r is None else r,
        context=context,
        decoding=decoding,
    )
    return timing.features(done, job.gpu, dtype=job.dtype)


def mean_context(prompt_len: Count, max_new_tokens: Count) -> Count:
    """Tokens that the average decoding step sees."""
    return prompt_len + largest(1, (max_new_tokens - 1) // 2)


def time_interval(total: float, deviation: float) -> tuple[float, float]:
    """Bounds of `total` seconds at `TIME_CONFIDENCE`, its log having that `deviation`."""
    factor = math.exp(min(TWO_SIDED_Z[TIME_CONFIDENCE] * deviation, WIDEST))
    return total / factor, total * factor


def predict_step(
    job: Job, calibration: Calibration, *, seq_len: int | None = None
) -> TimePrediction:
    """Time of one optimizer step."""
    run = job.run
    model = calibration.time["finetune"]
    length = seq_len or run.seq_len
    found = step_features(job, seq_len=length)
    step_s, parts = timing.seconds(model, found)
    low, high = time_interval(step_s, timing.log_deviation(model, found, step_s))
    tokens = run.batch_size * length * run.gradient_accumulation_steps
    return TimePrediction(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        prefill_s=None,
        decode_s_per_token=None,
        time_per_token_s=step_s / tokens,
        interval_s=(low, high),
        breakdown=parts,
        confidence=TIME_CONFIDENCE,
    )


def predict_generation(job: Job, calibration: Calibration) -> TimePrediction:
    """Time of one generation: the prompt pass gives the first token, decoding the others.

    An encoder without a head generates nothing: its one forward is the answer.
    """
    run = job.run
    prefill_model, decode_model = calibration.time["prefill"], calibration.time["decode"]
    prefill = forward_features(job, context=run.prompt_len, decoding=False)
    prefill_s, prefill_parts = timing.seconds(prefill_model, prefill)
    deviation = timing.log_deviation(prefill_model, prefill, prefill_s)
    if job.model.task == "encoder":
        tokens = run.batch_size * run.prompt_len
        low, high = time_interval(prefill_s, deviation)
        return TimePrediction(
            step_s=None,
            tokens_per_s=tokens / prefill_s,
            prefill_s=prefill_s,
            decode_s_per_token=None,
            time_per_token_s=prefill_s / tokens,
            interval_s=(low / tokens, high / tokens),
            breakdown=prefill_parts,
            confidence=TIME_CONFIDENCE,
        )
    steps = run.max_new_tokens - 1
    decode = forward_features(
        job, context=mean_context(run.prompt_len, run.max_new_tokens), decoding=True
    )
    decode_s, decode_parts = timing.seconds(decode_model, decode)
    decode_deviation = timing.log_deviation(decode_model, decode, decode_s)
    total = prefill_s + steps * decode_s
    # one run's errors in both phases come from one host and one device: they add up
    deviation = (prefill_s * deviation + steps * decode_s * decode_deviation) / total
    generated = run.batch_size * run.max_new_tokens
    low, high = time_interval(total, deviation)
    return TimePrediction(
        step_s=None,
        tokens_per_s=generated / total,
        prefill_s=prefill_s,
        decode_s_per_token=decode_s,
        time_per_token_s=total / generated,
        interval_s=(low / generated, high / generated),
        breakdown={name: prefill_parts[name] + steps * decode_parts[name] for name in decode_parts},
        confidence=TIME_CONFIDENCE,
    )


def unknown_time(*, training: bool) -> TimePrediction:
    """The time on a target whose rates nobody knows: any card of so much memory."""
    return TimePrediction(
        step_s=math.nan if training else None,
        tokens_per_s=math.nan,
        prefill_s=None if training else math.nan,
        decode_s_per_token=None if training else math.nan,
        time_per_token_s=math.nan,
        interval_s=(math.nan, math.nan),
        breakdown={},
        confidence=TIME_CONFIDENCE,
    )


def with_trace(job: Job, memory: MemoryPrediction, traced: TracedPeak) -> MemoryPrediction:
    """`memory` with the peaks of a trace; the card's part and the width of the interval stay.

    The trace does not see the libraries' workspaces, which lie in the allocator's pool.
    """
    workspace = allocator.workspace_bytes(job.gpu, training=job.run.phase == "finetune")
    context = memory.breakdown["context"]
    allocated = traced.peak_allocated_bytes + workspace
    reserved = min(
        traced.peak_reserved_bytes + workspace,
        max(allocated, job.gpu.memory_bytes - context),  # idle segments are given back in time
    )
    used = reserved + context
    parts = dict(traced.parts) | {"temporary": workspace}
    parts["traced"] = allocated - sum(size for name, size in parts.items() if name != "traced")

    def shifted(interval: tuple[int, int], by: int) -> tuple[int, int]:
        return max(0, interval[0] + by), interval[1] + by

    by_trace = allocated - memory.peak_allocated_bytes
    reserved_by_trace = reserved - memory.peak_reserved_bytes
    return replace(
        memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=used,
        interval_bytes=shifted(memory.interval_bytes, used - memory.device_used_bytes),
        allocated_interval_bytes=shifted(memory.allocated_interval_bytes, by_trace),
        reserved_interval_bytes=shifted(memory.reserved_interval_bytes, reserved_by_trace),
        breakdown=parts | {"allocator": reserved - allocated, "context": context},
        moment=traced.moment,
    )


def predict(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    *,
    traced: TracedPeak | None = None,
) -> Prediction:
    """Judge one run on one device.

    Args:
        traced: peaks of a trace of the same run, which then stand for the ledger's.

    Raises:
        ConfigError: settings that exclude each other.
    """
    job = resolve(model, run, gpu)
    memory, least = predict_memory(job, calibration)
    traced_basis = ""
    if traced is not None:
        by_ledger = memory.peak_allocated_bytes
        memory = with_trace(job, memory, traced)
        least += memory.peak_allocated_bytes - by_ledger
        traced_basis = f"memory traced on the real code, {traced.note}; "
    training = job.run.phase == "finetune"
    phases: tuple[str, ...] = ("finetune",)
    if not training:
        phases = ("prefill",) if model.task == "encoder" else ("prefill", "decode")
    if not gpu.is_timed:
        time, phases = unknown_time(training=training), ()
    elif training:
        time = predict_step(job, calibration)
    else:
        time = predict_generation(job, calibration)
    verdict = judge(memory, least, gpu)
    num_params = model.num_params
    trained = num_trained(job) if training else 0
    if traced is not None:
        num_params, trained = traced.num_params, traced.num_trainable_params
    return Prediction(
        run=job.run,
        gpu=gpu.key,
        num_params=num_params,
        num_trainable_params=int(trained),
        memory=memory,
        time=time,
        usable_bytes=gpu.memory_bytes,
        fits=verdict == "fits",
        verdict=verdict,
        basis=traced_basis
        + calibration.basis(
            memory_runs=calibration.memory.num_runs,
            time_runs=calibration.time[phases[-1]].num_runs if phases else 0,
            phases=phases,
        )
        + ("" if gpu.is_timed else MEMORY_ONLY),
        notes=notes_on(job),
    )
