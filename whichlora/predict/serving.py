"""The start of a serving engine, as a moment of a ledger and as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whichlora.memory import allocator
from whichlora.memory.training import Ledger
from whichlora.predict.coefficients import Calibration
from whichlora.predict.resolve import ResolvedRun
from whichlora.predict.serving_links import machines_of, nodes_note, num_nodes, unlinked
from whichlora.predict.serving_time import logged_timer, serving_time
from whichlora.predict.words import gpus_in_words
from whichlora.serving import get_engine, list_engines
from whichlora.serving.base import Served, Start
from whichlora.serving.step_time import Service
from whichlora.spec.checkpoint import lacking_storage
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes

MOMENT = "serving"
# Of the GPU's memory, what a pool is off by at most in 90 % of 116 published starts; 0.13 % in the
# median. Kind: measured, `docs/accuracy/serving.md`.
POOL_ERROR = 0.014


def service_of(job: ResolvedRun) -> Service | None:
    """The engine of `job`, started; None where it takes memory as it goes."""
    if not job.has_pool or job.engine.start is None:
        return None
    started = job.engine.start(job.served)
    return Service(start=started, starts={job.engine.load_of_start(job.served): started})


def start_ledger(job: ResolvedRun, start: Start) -> Ledger:
    """The one moment of an engine: nothing is allocated for sequences later."""
    entries = start.entries_at(job.served.context)
    return Ledger(moments={MOMENT: entries}, idle_bytes=0, workspace_bytes=0)


def taken_bytes(job: ResolvedRun, start: Start) -> int:
    """What the engine takes of the GPU, the context of its process and graphs included."""
    context = 0 if start.counts_process else allocator.idle_context_bytes(job.gpu)
    return start.budget_bytes + start.outside_bytes + context


def serving_prediction(
    job: ResolvedRun, service: Service, calibration: Calibration
) -> ServingPrediction:
    """The answer of an engine: whether it starts, how much it serves at once, and how fast."""
    run, served, start = job.run, job.served, service.start
    pool, fault = start.pool, start.fault_at(served.context)
    # llama.cpp allocates what sequences take, and its pool is what would fit
    is_known = start.pool_fact is None or start.states_pool
    margin = 0 if is_known else round(POOL_ERROR * job.gpu.memory_bytes)
    is_near = abs(start.closest(served.context)[0]) < margin
    refuses = start.fault or start.is_beyond(served.context)
    is_close = start.needs_context and not refuses and is_near
    return ServingPrediction(
        engine=job.engine.name,
        version=served.version,
        starts=not fault,
        reason=f"{fault}; {_unsure(margin)}" if fault and is_close else fault,
        context=served.context,
        is_close=is_close,
        kv_pool_bytes=pool.num_bytes,
        interval_kv_pool_bytes=(pool.num_bytes - margin, pool.num_bytes + margin),
        kv_pool_tokens=start.copies * pool.num_tokens(served.context),
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
        max_concurrency=start.copies * pool.max_concurrency(served.context),
        max_context=start.max_context(start.longest_context or job.model.max_position_embeddings),
        concurrency=run.batch_size,
        max_running=start.max_running(served.context, served.shared_tokens),
        left_bytes=job.gpu.memory_bytes - taken_bytes(job, start),
        command="" if fault else job.engine.command(_on_nodes(job, calibration)),
        lacking_storage=lacking_storage(job.model.config, run.quant or "none"),
        refuses="" if fault else served.refused_requests,
        time=None if fault else serving_time(job, served, service, calibration),
    )


def bounded(job: ResolvedRun) -> tuple[RunConfig, tuple[str, ...]]:
    """The run of `job` with so few sequences at once that the engine starts, and a note.

    Of an engine that starts with no more than have a block each, where nobody states how many: the
    largest power of two that has, since the pool is predicted. Others are as they are.
    """
    run, option = job.run, job.engine.bounded_by
    if not option or option in dict(run.serving_options) or job.engine.start is None:
        return run, ()
    start = job.engine.start(job.served)
    if not 0 < start.pool.num_blocks < start.least_blocks:
        return run, ()
    most = 1 << (start.pool.num_blocks.bit_length() - 1)
    options = tuple(sorted({**dict(run.serving_options), option: most}.items()))
    note = (
        f"{option} {most} is given, without which {job.served.release} does not start: its own "
        f"{start.least_blocks} is more than the blocks for states of sequences"
    )
    return replace(run, serving_options=options), (note,)


def _unsure(margin: int) -> str:
    return f"such a pool is predicted to ±{format_bytes(margin)}"


def serving_notes(
    job: ResolvedRun, start: Start, answer: ServingPrediction, calibration: Calibration
) -> tuple[str, ...]:
    """What a user must know of the answer, then the engine's own notes."""
    lines = []
    run, machines = job.run, machines_of(job, calibration.machines)
    lines += _idle_libraries(job)
    stated = job.engine.stated_nodes(run) is not None
    if note := nodes_note(job.engine.num_gpus(run), job.gpu, machines, stated=stated):
        lines.append(note)
    if answer.refuses:
        lines.append(answer.refuses)
    if answer.starts and answer.is_close:
        spare, what = start.closest(answer.context)
        margin = answer.interval_kv_pool_bytes[1] - answer.kv_pool_bytes
        lines.append(
            f"{what} leaves {format_bytes(spare)} of the pool, "
            f"and {_unsure(margin)}: it may not start"
        )
    if answer.starts and answer.max_running < answer.concurrency:
        lines.append(
            f"{answer.max_running} of {answer.concurrency} sequences of {answer.context} tokens "
            f"run at once on {gpus_in_words(job.engine.num_gpus(run))}, the others wait"
        )
    lines += _own_context_note(job, start, answer)
    shares = [option.name for option in job.engine.options if option.is_share]
    if answer.starts and answer.left_bytes < 0 and shares:
        lines.append(
            f"graphs and steps of the most tokens take {format_bytes(-answer.left_bytes)} more "
            f"than the GPU has: it can run out of memory; give a smaller {shares[0]}"
        )
    if answer.starts and answer.time is None and not answer.refuses:
        lines.append(f"no time: {_untimed(job, start, calibration)}")
    elif answer.time is not None and answer.time.queue_grows:
        lines.append(
            f"requests arrive faster than they are answered, {answer.time.requests_per_s:.3g} a "
            "second: the queue grows, and waits with it"
        )
    of_times: Sequence[str] = ()
    if answer.time is not None and logged_timer(job, job.served, calibration) is not None:
        lines.append("times by what the engine's logs on this device state of the same file")
    elif answer.time is not None:
        of_times = job.engine.time_notes(job.served)
    lines += job.engine.ignored_notes(job.run)
    return (*lines, *job.engine.notes(_on_nodes(job, calibration), start), *of_times)


def _own_context_note(job: ResolvedRun, start: Start, answer: ServingPrediction) -> list[str]:
    """That the engine does not start with the length that it takes by itself, where none is asked.

    Nothing where the run states one, or the config is another model's, whose length may differ.
    """
    own_context = job.engine.own_context
    if job.run.context is not None or not answer.starts or own_context is None:
        return []
    own = own_context(job.model, job.served.libraries)
    if own is None or job.model.shapes_of:
        return []
    of_own = start if start.at_context is None else start.at_context(own)
    if not of_own.lacks(own):
        return []
    return [
        f"no context is stated, so that {answer.context} tokens are judged; with the model's own "
        f"{own}, which {job.served.release} takes by itself, it does not start: the longest is "
        f"{start.max_context(own)}"
    ]


def _idle_libraries(job: ResolvedRun) -> list[str]:
    """Releases that are stated of engines that do not serve."""
    library_in_use = job.engine.library
    engines = {get_engine(name).library for name in list_engines()} - {library_in_use, ""}
    return [
        f"libraries {library}={version} changes nothing under serving {job.engine.name}"
        for library, version in job.run.libraries
        if library in engines
    ]


def _on_nodes(job: ResolvedRun, calibration: Calibration) -> Served:
    """What is served, on the machines that have its GPUs."""
    nodes = job.engine.stated_nodes(job.run)
    if nodes is None:
        nodes = num_nodes(job.engine.num_gpus(job.run), job.gpu, calibration.machines)
    return replace(job.served, nodes=nodes)


def _untimed(job: ResolvedRun, start: Start, calibration: Calibration) -> str:
    if job.engine.stepping is None:
        return f"the steps of {job.engine.name} are not predicted"
    if not job.gpu.is_timed:
        return f"the rates of {job.gpu.key} are not known"
    if start.untimed:
        return start.untimed
    machines, stated = machines_of(job, calibration.machines), job.engine.stated_nodes(job.run)
    return unlinked(job.engine.num_gpus(job.run), job.gpu, machines, stated=stated)
