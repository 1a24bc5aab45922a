"""What a run holds, moves and computes: its moments, its passes and their time features."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.memory import allocator
from whichlora.memory.images import attending
from whichlora.memory.inference import Generation, inference_ledger
from whichlora.memory.optimizer import Update
from whichlora.memory.reserved import replayed_idle_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import Ledger, trained_params, training_ledger
from whichlora.parallel.base import RankKind
from whichlora.parallel.layout import Layout
from whichlora.predict.colocated import colocated_engine
from whichlora.predict.judgement import Pass
from whichlora.predict.parts import part_bytes
from whichlora.predict.rank_time import features_of_step, update_of_step
from whichlora.predict.resolve import ResolvedRun
from whichlora.predict.rollout import rollout_job, rollout_sizes, with_rollout
from whichlora.predict.serving import service_of, start_ledger, taken_bytes
from whichlora.serving.step_time import Service
from whichlora.spec.numeric import Count, Real, is_plain, largest
from whichlora.timing import model as timing
from whichlora.timing import serving_work, work
from whichlora.timing.running import RunningModel
from whichlora.timing.tower_work import tower_forward_work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


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
    inner, engine = rollout_job(job), colocated_engine(job)
    if engine is not None:
        return engine.with_answers(counted, step)
    if inner is None:
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
    engine = colocated_engine(job)
    if engine is not None:
        step = replace(step, beside=engine.held(step))
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


def running_model(job: ResolvedRun, r: Count | None = None) -> RunningModel:
    """The model of `job` as it computes, at rank `r` where it is not the run's own."""
    return RunningModel(
        model=job.model,
        run=job.run,
        dtypes=job.dtypes,
        method=job.method,
        targets=job.targets,
        r=job.run.r if r is None else r,
        chip=timing.chip_of(job.gpu, job.dtype),
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
    return of_each_source(job, lambda **counts: by_part(job, ledger(job, **counts)), sizes)


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


def by_part(job: ResolvedRun, counted: Ledger) -> dict[str, dict[str, Count]]:
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
    return of_each_source(
        job, lambda **counts: features_of_step(training_step(job, **counts)), sizes
    )


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
    running = running_model(job, r)
    done = serving_work.inference_work(
        running,
        batch_size=job.run.batch_size if batch_size is None else batch_size,
        context=context,
        decoding=decoding,
    )
    tower = generation(job, **_given(batch_size=batch_size, r=r)).tower
    if tower is not None and not decoding:
        images = tower_forward_work(tower, chip=running.chip)
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


def passes_alone(job: ResolvedRun, **sizes: Count) -> tuple[Pass, ...]:
    """Of several GPUs, what each does by itself; of one everything."""
    if job.layout is None:
        return passes(job, **sizes)
    return tuple(_rollout_passes(job, sizes)) if job.run.phase == "finetune" else ()


def _rollout_passes(job: ResolvedRun, sizes: Mapping[str, Count]) -> Iterator[Pass]:
    """Those of the answers that one optimizer step learns from."""
    inner, rollout = rollout_job(job), job.trainer.rollout(job.run)
    if inner is None or rollout is None:
        return
    written, engine = rollout_sizes(job, _sizes(job, sizes)), colocated_engine(job)
    if engine is not None:
        if job.gpu.is_timed:
            yield from engine.answer_passes(rollout, written)
        return
    for name, times, counted in passes(inner, **written):
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
    if job.has_pool:  # no events are written of what it adds
        return ledger(job, kinds), None
    if job.layout is not None:
        return _of_ranks(job, job.layout, kinds)
    run: TrainingStep | Generation
    if job.run.phase == "inference":
        run = generation(job)
        counted = inference_ledger(run)
    else:
        run = training_step(job)
        counted = ledger(job)
    live_bytes = counted.peak_allocated_bytes - counted.workspace_bytes
    return counted, replayed_idle_bytes(run, live_bytes=live_bytes)


def _of_ranks(
    job: ResolvedRun, layout: Layout, kinds: Sequence[RankKind]
) -> tuple[Ledger, int | None]:
    """The same of several GPUs, whose ranks all do the same."""
    kinds = kinds or rank_kinds(job)
    counted = ledger(job, kinds)
    if len(kinds) > 1:
        return counted, None
    (kind,) = kinds
    live_bytes = counted.peak_allocated_bytes - counted.workspace_bytes
    asked = (layout.config, partial(layout.requests, kind))
    return counted, replayed_idle_bytes(kind.step, live_bytes=live_bytes, of_rank=asked)


def run_moments(
    job: ResolvedRun, kinds: Sequence[RankKind] = ()
) -> tuple[dict[str, dict[str, Count]], bool]:
    """Bytes by part at each moment, and whether a replay narrows the allocator's interval.

    Args as of `ledger`.

    It does so in training on one GPU alone, where measured peaks have confirmed the narrower one.
    """
    counted, idle_bytes = ledger_and_idle(job, kinds)
    moments = by_part(job, counted)
    if idle_bytes is not None:
        moments = {name: parts | {"allocator": idle_bytes} for name, parts in moments.items()}
    narrows = job.layout is None and job.run.phase == "finetune"
    return moments, idle_bytes is not None and narrows
