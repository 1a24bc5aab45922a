"""One run → `Prediction`, or a block of runs → arrays: counted, then judged by a calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.memory import allocator
from whichlora.memory.images import attending
from whichlora.memory.inference import Generation, inference_ledger
from whichlora.memory.layer_passes import offloaded_bytes
from whichlora.memory.optimizer import Update
from whichlora.memory.reserved import replayed_idle_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import (
    Ledger,
    least_parts,
    trained_params,
    training_ledger,
)
from whichlora.parallel.base import RankKind
from whichlora.predict.coefficients import Calibration
from whichlora.predict.host_memory import (
    HostUse,
    host_fault,
    host_use,
    memory_of_node,
    saving_note,
)
from whichlora.predict.judgement import (
    MEMORY_CONFIDENCE,
    TIME_CONFIDENCE,
    MemoryJudgement,
    Pass,
    TimeJudgement,
    joined,
    judge_memory,
    judge_time,
    least_bytes,
)
from whichlora.predict.notes import host_notes, notes_on
from whichlora.predict.parts import part_bytes
from whichlora.predict.rank_time import (
    RanksJudgement,
    RanksWork,
    count_ranks,
    features_of_step,
    judge_ranks,
    link_notes,
    links_of,
    update_of_step,
)
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.predict.rollout import check_rollout, rollout_job, rollout_sizes, with_rollout
from whichlora.predict.serving import (
    service_of,
    serving_notes,
    serving_prediction,
    start_ledger,
    taken_bytes,
)
from whichlora.predict.several_gpus import several_gpus
from whichlora.serving.step_time import Service
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count, Real, is_plain, largest
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
from whichlora.timing import model as timing
from whichlora.timing import work
from whichlora.timing.tower_work import tower_forward_work
from whichlora.units import format_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MEMORY_ONLY = "; memory only"  # ends the basis of what has no time


def _sizes(job: ResolvedRun, changed: Mapping[str, Count]) -> dict[str, Count]:
    return {name: changed.get(name, getattr(job.run, name)) for name in job.size_names}


def _served_sizes(job: ResolvedRun, changed: Mapping[str, Count]) -> dict[str, Count]:
    """Those of a generation, whose prompt has the method's own tokens, too, unless it is merged.

    Tokens that have keys and values alone are counted as those of a prompt: an upper bound.
    """
    counts = _sizes(job, changed)
    if job.run.serve == "as-trained":
        counts["prompt_len"] = counts["prompt_len"] + job.method.added_tokens
    return counts


def rank_kinds(job: ResolvedRun, **sizes: Count) -> tuple[RankKind, ...]:
    """The kinds of ranks of `job`, none on one GPU; args as of `ledger`."""
    return () if job.layout is None else job.layout.rank_kinds(training_step(job, **sizes))


def ledger(job: ResolvedRun, kinds: Sequence[RankKind] = (), **sizes: Count) -> Ledger:
    """The moments of `job`.

    Args:
        kinds: of its ranks, where they are at hand.
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    if job.run.phase == "inference":
        service = service_of(job)
        if service is not None:
            return start_ledger(job, service.start)
        return inference_ledger(generation(job, **sizes))
    complete = partial(_with_answers, job, sizes)
    if job.layout is not None:
        return job.layout.merged_ledger(kinds or rank_kinds(job, **sizes), complete)
    step = training_step(job, **sizes)
    return complete(training_ledger(step), step)


def _with_answers(
    job: ResolvedRun, sizes: Mapping[str, Count], counted: Ledger, step: TrainingStep
) -> Ledger:
    """`counted` and the moments of what the model writes between steps, if it does."""
    inner = rollout_job(job)
    if inner is None or inner.run.kv_cache == "vllm":  # the pool is among what a step holds
        return counted
    written = generation(inner, **rollout_sizes(job, _sizes(job, sizes)))
    return with_rollout(counted, step, written)


def training_step(job: ResolvedRun, **sizes: Count) -> TrainingStep:
    """One optimizer step of `job`; args as of `ledger`."""
    counts = _sizes(job, sizes)
    counts["batch_size"] = counts["batch_size"] * job.trainer.sequences(job.run)
    counts["seq_len"] = counts["seq_len"] + job.method.virtual_tokens
    model, counts["seq_len"] = job.at_length(counts["seq_len"])
    step = TrainingStep(
        model=model,
        run=job.run,
        dtypes=job.dtypes,
        method=job.method,
        gpu=job.gpu,
        targets=job.targets,
        trainer=job.trainer,
        **counts,
    )
    return attending(step)


def generation(job: ResolvedRun, **sizes: Count) -> Generation:
    """One generation of `job`, or the forward of a model that makes none; args as of `ledger`."""
    return Generation(
        model=job.model,
        run=job.run,
        dtypes=job.dtypes,
        method=job.method,
        gpu=job.gpu,
        targets=job.targets,
        **_served_sizes(job, sizes),
    )


def num_trained(job: ResolvedRun, r: Count | None = None) -> Count:
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


def update_of(job: ResolvedRun, r: Count | None = None) -> Update:
    """What happens to the gradients of one step of `job`, at rank `r` where it is not its own."""
    return update_of_step(training_step(job, r=job.run.r if r is None else r))


def moment_parts(job: ResolvedRun, **sizes: Count) -> dict[str, dict[str, Count]]:
    """Bytes by part at each moment that can be the peak, before any calibration.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    return of_each_source(job, lambda **one: _by_part(job, ledger(job, **one)), sizes)


def of_each_source(
    job: ResolvedRun, count: Callable[..., dict[str, Any]], sizes: Mapping[str, Count]
) -> dict[str, Any]:
    """`count` of `sizes`, one length of an encoder after the other where a decoder has its own.

    Formulas of two lengths take that of the encoder as a number, and all other sizes as arrays.

    Args:
        count: sizes by name -> numbers or arrays by name, or such mappings by name.
    """
    lengths = sizes.get("seq_len", 1)
    target_len = job.model.target_len(job.run.target_len, lengths)
    if job.run.phase == "inference" or target_len is None or is_plain(lengths):
        return count(**sizes)
    import numpy as np

    lengths = np.asarray(lengths)
    merged: dict[str, Any] = {}
    for length in np.unique(lengths):
        of_length = count(**{**sizes, "seq_len": int(length)})
        merged = _merged(lengths == length, of_length, merged) if merged else of_length
    return merged


def _merged(where: Array, new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """`new` where it holds, else `old`."""
    import numpy as np

    return {
        name: _merged(where, value, old[name])
        if isinstance(value, Mapping)
        else np.where(where, value, old[name])
        for name, value in new.items()
    }


def _by_part(job: ResolvedRun, counted: Ledger) -> dict[str, dict[str, Count]]:
    return {moment: part_bytes(job, counted, moment) for moment in counted.moments}


def pool_bytes(job: ResolvedRun, service: Service | None = None) -> int:
    """What a serving engine takes of the device at once; 0 where memory is taken as needed.

    Args:
        service: the engine of `job`, where it has been started.
    """
    if job.run.phase == "finetune":
        return 0
    service = service or service_of(job)
    if service is None:
        return allocator.pool_bytes(job.gpu, job.run.kv_cache)
    return taken_bytes(job, service.start)


def step_features(job: ResolvedRun, **sizes: Count) -> dict[str, Real]:
    """Time features of one optimizer step of `job`.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    return of_each_source(job, lambda **one: features_of_step(training_step(job, **one)), sizes)


def features_by_length(
    features: Callable[[Count], Mapping[str, Real]], lengths: Collection[int]
) -> dict[int, dict[str, float]]:
    """`features` at each of `lengths`, which one call counts as an array.

    A workload has dozens of lengths, and a call for each takes most of the time of a search.
    """
    if len(lengths) < 2:
        return {length: dict(features(length)) for length in lengths}
    import numpy as np

    counted = features(np.array(list(lengths), dtype=np.float64))
    columns = [np.broadcast_to(column, len(lengths)).tolist() for column in counted.values()]
    rows = zip(*columns, strict=True)
    return {n: dict(zip(counted, row, strict=True)) for n, row in zip(lengths, rows, strict=True)}


def forward_features(
    job: ResolvedRun,
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
        job.dtypes,
        method=job.method,
        targets=job.targets,
        batch_size=job.run.batch_size if batch_size is None else batch_size,
        r=job.run.r if r is None else r,
        context=context,
        decoding=decoding,
        chip=timing.chip_of(job.gpu, job.dtype),
    )
    tower = generation(job, **_given(batch_size=batch_size, r=r)).tower
    if tower is not None and not decoding:
        chip = timing.chip_of(job.gpu, job.dtype)
        images = tower_forward_work(tower, chip=chip)
        done = work.Work.total((done, images))
    return timing.features(done, job.gpu, dtype=job.dtype)


def _given(**sizes: Count | None) -> dict[str, Count]:
    return {name: size for name, size in sizes.items() if size is not None}


def mean_context(prompt_len: Count, max_new_tokens: Count) -> Count:
    """Tokens that the average decoding step sees."""
    return prompt_len + largest(1, (max_new_tokens - 1) // 2)


def passes(job: ResolvedRun, **sizes: Count) -> tuple[Pass, ...]:
    """What one optimizer step is, or one generation.

    The prompt pass gives the first token, decoding the others. An encoder or a model of rewards
    generates nothing: its one forward is the answer.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    if job.run.phase == "finetune":
        return (("finetune", 1, step_features(job, **sizes)), *_rollout_passes(job, sizes))
    counts = _served_sizes(job, sizes)
    prompt_len, new_tokens = counts["prompt_len"], counts["max_new_tokens"]

    def forward(context: Count, *, decoding: bool) -> dict[str, Real]:
        return forward_features(
            job,
            context=context,
            decoding=decoding,
            batch_size=counts["batch_size"],
            r=counts["r"],
        )

    prefill: Pass = ("prefill", 1, forward(prompt_len, decoding=False))
    if not job.model.can_generate:
        return (prefill,)
    decode = forward(mean_context(prompt_len, new_tokens), decoding=True)
    return prefill, ("decode", new_tokens - 1, decode)


def _passes_alone(job: ResolvedRun, **sizes: Count) -> tuple[Pass, ...]:
    """Of several GPUs, what each does by itself; of one everything."""
    if job.layout is None:
        return passes(job, **sizes)
    return tuple(_rollout_passes(job, sizes)) if job.run.phase == "finetune" else ()


def _rollout_passes(job: ResolvedRun, sizes: Mapping[str, Count]) -> Iterator[Pass]:
    """Those of the answers that one optimizer step learns from."""
    inner, rollout = rollout_job(job), job.trainer.rollout(job.run)
    if inner is None or rollout is None:
        return
    for name, times, counted in passes(inner, **rollout_sizes(job, _sizes(job, sizes))):
        yield name, times / rollout.steps, counted


def num_tokens(job: ResolvedRun, **sizes: Count) -> Count:
    """What a step trains on, padding included, or a generation makes; one forward reads them.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own; arrays broadcast.
    """
    counts = _sizes(job, sizes)
    if job.run.phase == "finetune":
        sequences = counts["batch_size"] * job.trainer.sequences(job.run)
        return sequences * counts["seq_len"] * job.micro_batches
    made = "max_new_tokens" if job.model.can_generate else "prompt_len"
    return counts["batch_size"] * counts[made]


def ledger_and_idle(job: ResolvedRun, kinds: Sequence[RankKind] = ()) -> tuple[Ledger, int | None]:
    """The moments of `job`, and what a replay says that the allocator keeps, if there is one.

    Args as of `ledger`.

    Source: `memory.reserved`, where the events of the run are known.
    """
    if job.layout is not None or job.has_pool:  # no events are written of what these add
        return ledger(job, kinds), None
    run: TrainingStep | Generation
    if job.run.phase == "inference":
        run = generation(job)
        counted = inference_ledger(run)
    else:
        run = training_step(job)
        counted = ledger(job)
    live_bytes = counted.peak_allocated_bytes - counted.workspace_bytes
    return counted, replayed_idle_bytes(run, live_bytes=live_bytes)


def run_moments(
    job: ResolvedRun, kinds: Sequence[RankKind] = ()
) -> tuple[dict[str, dict[str, Count]], bool]:
    """Bytes by part at each moment, and whether a replay narrows the allocator's interval.

    Args as of `ledger`.

    It does so in training alone, where measured peaks have confirmed the narrower one.
    """
    counted, idle_bytes = ledger_and_idle(job, kinds)
    moments = _by_part(job, counted)
    if idle_bytes is not None:
        moments = {name: parts | {"allocator": idle_bytes} for name, parts in moments.items()}
    return moments, idle_bytes is not None and job.run.phase == "finetune"


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
    moments = _by_part(job, start_ledger(job, service.start))
    return CountedRun(job=job, moments=moments, is_replayed=False, passes=(), service=service)


def count_run(job: ResolvedRun, *, replayed: bool = True) -> CountedRun:
    """Count `job` once for any number of calibrations.

    Args:
        replayed: whether its requests are replayed, which takes ten times as long as the rest.

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
    moments, is_replayed = run_moments(job, kinds) if replayed else (moment_parts(job), False)
    ranks = ranks_work(job, kinds)
    return CountedRun(
        job=job,
        moments=moments,
        is_replayed=is_replayed,
        passes=_passes_alone(job),
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
    """
    return judge_moments(job, moment_parts(job, **sizes), calibration)


def least_training_bytes(
    job: ResolvedRun, calibration: Calibration, *, batch_size: Count, seq_len: Count, least_r: Count
) -> Real:
    """Device memory that fine-tuning takes at least, whatever its rank is from `least_r` on."""
    if job.layout is not None:  # what a strategy leaves of these parts is its own
        return 0.0
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "r": least_r}
    parts = of_each_source(job, lambda **one: least_parts(training_step(job, **one)), sizes)
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
    return judged_ranks(job, ranks, calibration, _passes_alone(job, **sizes)).time


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


def predict_memory(job: ResolvedRun, calibration: Calibration) -> tuple[MemoryPrediction, int]:
    """Peak memory of `job`, and the least it can be at the stated confidence."""
    return _memory_prediction(judged_run(job, calibration))


def _memory_prediction(judged: MemoryJudgement) -> tuple[MemoryPrediction, int]:
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
    memory, least = _memory_prediction(judged)
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
    if beyond_host:
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
        serving=serving,
        traced=traced,
    )


def _node(job: ResolvedRun, calibration: Calibration) -> tuple[int | None, str]:
    return memory_of_node(job.run.parallel, calibration.machines, calibration.this_host_bytes)


def finished(judged: JudgedRun, *, by_rank: bool = True) -> Prediction:
    """All that is said of a run that has been judged; args as of `predict_counted`."""
    counted, calibration, traced = judged.counted, judged.calibration, judged.traced
    job, gpu, timed = counted.job, counted.job.gpu, judged.timed
    passes = {} if timed is None else timed.pass_parts
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
    return (
        *([of_host] if of_host else ()),
        *of_engine,
        *notes_on(job),
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
    other = float(judged_time(as_usual, judged.calibration).total_s)
    stated = float(judged_time(job, judged.calibration).total_s)
    if stated < _SLOWER * other:
        return
    pass_name = "a step" if job.run.phase == "finetune" else "an answer"
    narrow = "float16" if job.dtypes.half == "fp16" else "bfloat16"
    yield (
        f"compute_dtype {job.run.compute_dtype}: {pass_name} takes {format_seconds(stated)}, with "
        f"bnb_4bit_compute_dtype=torch.{narrow} {format_seconds(other)} "
        f"({stated / other:.3g} times as fast)"
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
    """Count a block once for any number of calibrations; args as of `predict_block`.

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
        passes=_passes_alone(job, **sizes),
        ranks=ranks_work(job, **sizes),
        num_units=1.0 if job.run.phase == "finetune" else num_tokens(job, **sizes),
    )


def predict_block(
    job: ResolvedRun, calibration: Calibration, axes: Mapping[str, Count]
) -> BlockPrediction:
    """Judge every run of a block; equal to `predict` run by run.

    The sizes broadcast, so an open mesh (`numpy.ix_`) is counted along its axes where possible.

    Args:
        axes: integer arrays that broadcast; sizes that are not named are those of `job.run`.
    """
    return predict_counted_block(count_block(job, axes), calibration)


def predict_counted_block(counted: CountedBlock, calibration: Calibration) -> BlockPrediction:
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
