"""The start of a serving engine, as a moment of a ledger and as an answer."""

from __future__ import annotations

from whichlora.memory import allocator
from whichlora.memory.training import Ledger
from whichlora.predict.resolve import ResolvedRun
from whichlora.serving.base import Start
from whichlora.spec.results import ServingPrediction

MOMENT = "serving"


def start_of(job: ResolvedRun) -> Start | None:
    """What the engine of `job` takes when it starts; None where it takes memory as it goes."""
    if not job.has_pool or job.engine.start is None:
        return None
    return job.engine.start(job.served)


def start_ledger(start: Start) -> Ledger:
    """The one moment of an engine: nothing is allocated for sequences later."""
    return Ledger(moments={MOMENT: start.entries}, idle_bytes=0, workspace_bytes=0)


def taken_bytes(job: ResolvedRun, start: Start) -> int:
    """What the engine takes of the GPU, the context of its process and graphs included."""
    context = allocator.context_bytes(job.gpu)
    return start.budget_bytes + start.outside_bytes + context


def serving_prediction(job: ResolvedRun, start: Start) -> ServingPrediction:
    """The answer of an engine: whether it starts, and how much it serves at once."""
    run, pool, served = job.run, start.pool, job.served
    concurrency = pool.max_concurrency(served.context)
    starts = not start.fault
    return ServingPrediction(
        engine=job.engine.name,
        version=getattr(served.libraries, job.engine.library, ""),
        starts=starts,
        reason=start.fault,
        context=served.context,
        kv_pool_bytes=pool.num_bytes,
        kv_pool_tokens=int(concurrency * served.context),
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
        max_concurrency=concurrency,
        max_context=pool.max_context(job.model.max_position_embeddings),
        concurrency=run.batch_size,
        max_running=min(start.max_num_seqs, pool.num_sequences(served.context)) if starts else 0,
        left_bytes=job.gpu.memory_bytes - taken_bytes(job, start),
        command=job.engine.command(served) if starts else "",
    )


def serving_notes(job: ResolvedRun, answer: ServingPrediction) -> tuple[str, ...]:
    """What a user must know of the answer, then the engine's own notes."""
    lines = []
    if answer.starts and answer.max_running < answer.concurrency:
        lines.append(
            f"{answer.max_running} of {answer.concurrency} sequences of {answer.context} tokens "
            "run at once, the others wait"
        )
    lines.append("no time: the scheduler of a serving engine is not predicted yet")
    return (*lines, *job.engine.notes(job.served))
