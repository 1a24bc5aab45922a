"""One run → `Prediction`: counted, then judged by a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from whichlora.memory import allocator
from whichlora.predict.coefficients import Calibration
from whichlora.predict.colocated import colocated_engine
from whichlora.predict.counted import CountedRun, count_run
from whichlora.predict.host_memory import host_fault, memory_of_node, saving_note
from whichlora.predict.judged import judge_moments, judged_ranks, judged_time
from whichlora.predict.judgement import (
    MEMORY_CONFIDENCE,
    TIME_CONFIDENCE,
    MemoryJudgement,
    TimeJudgement,
    judge_time,
)
from whichlora.predict.notes import host_notes, notes_on
from whichlora.predict.quantities import num_tokens, num_trained, training_step
from whichlora.predict.rank_time import RanksJudgement, RanksWork, link_notes, links_of
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.predict.serving import serving_notes, serving_prediction
from whichlora.predict.several_gpus import several_gpus
from whichlora.serving.drafts import NOTE, beside_drafts
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import (
    MemoryPrediction,
    Prediction,
    ServingPrediction,
    SeveralGpus,
    TimePrediction,
    TracedPeak,
    Verdict,
)
from whichlora.spec.run import RunConfig
from whichlora.units import format_seconds

MEMORY_ONLY = "; memory only"  # ends the basis of what has no time


def memory_prediction(judged: MemoryJudgement) -> tuple[MemoryPrediction, int]:
    """Peak memory of a run, and the least it can be at the stated confidence."""
    least, low, high = judged.bounds()
    return (
        MemoryPrediction(
            peak_allocated_bytes=judged.peak_allocated_bytes,
            peak_reserved_bytes=judged.peak_reserved_bytes,
            device_used_bytes=judged.device_used_bytes,
            interval_bytes=(low, high),
            allocated_interval_bytes=judged.allocated_interval(),
            reserved_interval_bytes=judged.reserved_interval(),
            breakdown=judged.breakdown,
            moment=judged.moments[judged.position],
            confidence=MEMORY_CONFIDENCE,
        ),
        least,
    )


def verdict(least: int, high: int, device_bytes: int) -> Verdict:
    """Whether a run fits that needs at least `least` bytes and is predicted to use up to `high`."""
    if high <= device_bytes:
        return "fits"
    return "fails" if least > device_bytes else "undecided"


def _time_prediction(job: ResolvedRun, judged: TimeJudgement) -> TimePrediction:
    training = job.run.phase == "finetune"
    tokens, total_s = num_tokens(job), judged.total_s
    low, high = judged.interval()
    return TimePrediction(
        step_s=total_s if training else None,
        tokens_per_s=tokens / total_s,
        prefill_s=judged.pass_s.get("prefill"),
        decode_s_per_token=judged.pass_s.get("decode"),
        time_per_token_s=total_s / tokens,
        interval_s=(low, high) if training else (low / tokens, high / tokens),
        breakdown=judged.breakdown,
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


def with_trace(job: ResolvedRun, memory: MemoryPrediction, traced: TracedPeak) -> MemoryPrediction:
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

    def shifted(interval: tuple[int, int], num_bytes: int) -> tuple[int, int]:
        return max(0, interval[0] + num_bytes), interval[1] + num_bytes

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
    return predict_counted(count_run(resolve(model, run, gpu)), calibration, traced=traced)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """What tells one way to spread a run from another; `finished` says the rest of it.

    Args:
        calibration: of the engine that runs it.
        timed: None where nobody knows the time.
        beyond_host: why the host can't hold what ranks pin; empty where it can.
        engine_fault: why an engine beside the trainer does not start; empty where it does.
        traced: peaks of a trace, which stand for the ledger's.
    """

    counted: CountedRun
    calibration: Calibration
    memory: MemoryPrediction
    time: TimePrediction
    verdict: Verdict
    timed: TimeJudgement | None
    ranks: RanksJudgement | None
    beyond_host: str
    engine_fault: str
    serving: ServingPrediction | None
    traced: TracedPeak | None

    @property
    def exceeds_host(self) -> bool:
        """Whether a node has less memory than its ranks need."""
        return self.ranks is not None and bool(self.beyond_host)


def predict_counted(
    counted: CountedRun,
    calibration: Calibration,
    *,
    traced: TracedPeak | None = None,
    by_rank: bool = True,
) -> Prediction:
    """Judge one run that has been counted; args as of `predict`.

    Args:
        by_rank: whether it states what each kind of rank holds and sends.
    """
    return finished(judge_counted(counted, calibration, traced=traced), by_rank=by_rank)


def judge_counted(
    counted: CountedRun, calibration: Calibration, *, traced: TracedPeak | None = None
) -> JudgedRun:
    """Memory, time and verdict of one run that has been counted; args as of `predict`."""
    job, service = counted.job, counted.service
    gpu = job.gpu
    calibration = calibration.for_engine(job.run.engine, gpu)
    judged = judge_moments(
        job, counted.moments, calibration, is_replayed=counted.is_replayed, service=service
    )
    memory, least = memory_prediction(judged)
    if traced is not None:
        by_ledger = memory.peak_allocated_bytes
        memory = with_trace(job, memory, traced)
        least += memory.peak_allocated_bytes - by_ledger
    ranks = None
    if counted.ranks is not None:
        ranks = judged_ranks(job, counted.ranks, calibration, counted.passes)
    timed = None
    if gpu.is_timed and (counted.ranks or counted.passes):
        timed = judge_time(counted.passes, calibration.time) if ranks is None else ranks.time
    training = job.run.phase == "finetune"
    outcome = verdict(least, memory.interval_bytes[1], gpu.memory_bytes)
    beyond_host = host_fault(counted.host, _node(job, calibration))
    engine = colocated_engine(job)
    engine_fault = "" if engine is None else engine.fault
    if beyond_host or engine_fault:
        outcome = "fails"
    serving = None
    if service is not None:
        serving = serving_prediction(job, service, calibration)
        outcome = "fits" if serving.starts else "fails"
        if serving.is_close:
            outcome = "undecided"
    return JudgedRun(
        counted=counted,
        calibration=calibration,
        memory=memory,
        time=unknown_time(training=training) if timed is None else _time_prediction(job, timed),
        verdict=outcome,
        timed=timed,
        ranks=ranks,
        beyond_host=beyond_host,
        engine_fault=engine_fault,
        serving=serving,
        traced=traced,
    )


def _node(job: ResolvedRun, calibration: Calibration) -> tuple[int | None, str]:
    return memory_of_node(job.run.parallel, calibration.machines, calibration.this_host_bytes)


def finished(judged: JudgedRun, *, by_rank: bool = True) -> Prediction:
    """All that is said of a run that has been judged; args as of `predict_counted`."""
    counted, calibration, traced = judged.counted, judged.calibration, judged.traced
    job, gpu, timed = counted.job, counted.job.gpu, judged.timed
    passes = {} if timed is None else timed.fitted_parts
    num_params = job.model.num_params
    trained = num_trained(job) if job.run.phase == "finetune" else 0
    if traced is not None:
        num_params, trained = traced.num_params, traced.num_trainable_params
    return Prediction(
        run=job.run,
        gpu=gpu.key,
        num_params=num_params,
        num_trainable_params=int(trained),
        memory=judged.memory,
        time=judged.time,
        usable_bytes=gpu.memory_bytes,
        fits=judged.verdict == "fits",
        verdict=judged.verdict,
        basis=(f"memory traced on the real code, {traced.note}; " if traced else "")
        + calibration.basis(
            memory_runs=calibration.memory.num_runs,
            time_runs=calibration.time[[*passes][-1]].num_runs if passes else 0,
            passes=passes,
        )
        + ("" if gpu.is_timed else MEMORY_ONLY),
        notes=_notes(judged),
        several_gpus=(_several_gpus(judged, judged.ranks) if judged.ranks and by_rank else None),
        serving=judged.serving,
    )


def _notes(judged: JudgedRun) -> tuple[str, ...]:
    counted, timed, serving = judged.counted, judged.timed, judged.serving
    job, service = counted.job, counted.service
    of_host = judged.beyond_host or saving_note(counted.host, _node(job, judged.calibration))
    of_engine: tuple[str, ...] = ()
    if service and serving:
        of_engine = serving_notes(job, service.start, serving, judged.calibration)
    of_run = notes_on(job)
    return (
        *([of_host] if of_host else ()),
        *([judged.engine_fault] if judged.engine_fault else ()),
        *of_engine,
        *(beside_drafts(of_run, job.model) if NOTE in of_engine else of_run),
        *(host_notes(job, timed.pass_parts) if timed and judged.time.is_known else ()),
        *(_compute_dtype_note(judged) if timed and judged.time.is_known else ()),
        *(job.layout.notes(training_step(job)) if job.layout else ()),
        *(_link_notes(job, counted.ranks, judged.calibration) if counted.ranks and timed else ()),
    )


_SLOWER = 1.01  # of a time, from where on a note says so


def _compute_dtype_note(judged: JudgedRun) -> Iterator[str]:
    """What another dtype than the run's takes longer for products with 4-bit weights."""
    job, timed = judged.counted.job, judged.timed
    if timed is None or not job.dtypes.computes_four_bit_apart:
        return
    usual = replace(job.dtypes, four_bit_bytes=job.dtypes.half_bytes, recasts_four_bit=False)
    as_usual = replace(job, dtypes=usual, run=replace(job.run, compute_dtype="auto"))
    usual_s = float(judged_time(as_usual, judged.calibration).total_s)
    stated_s = float(judged_time(job, judged.calibration).total_s)
    if stated_s < _SLOWER * usual_s:
        return
    pass_name = "a step" if job.run.phase == "finetune" else "an answer"
    narrow = "float16" if job.dtypes.half == "fp16" else "bfloat16"
    yield (
        f"compute_dtype {job.run.compute_dtype}: {pass_name} takes {format_seconds(stated_s)}, "
        f"with bnb_4bit_compute_dtype=torch.{narrow} {format_seconds(usual_s)} "
        f"({stated_s / usual_s:.3g} times as fast)"
    )


def _link_notes(job: ResolvedRun, ranks: RanksWork, calibration: Calibration) -> tuple[str, ...]:
    links, line = links_of(ranks.config, job.gpu, calibration.machines)
    return link_notes(links, line, [rank.messages for rank in ranks.ranks], ranks.config)


def _several_gpus(judged: JudgedRun, of_ranks: RanksJudgement) -> SeveralGpus | None:
    counted, calibration = judged.counted, judged.calibration
    job, ranks = counted.job, counted.ranks
    if job.layout is None or ranks is None:
        return None
    return several_gpus(
        job,
        job.layout,
        counted.kinds,
        counted.moments,
        calibration,
        [rank.messages for rank in ranks.ranks],
        of_ranks.communication,
        exceeds_host=judged.exceeds_host,
        host=counted.host,
        host_memory_bytes=_node(job, calibration)[0],
    )
