"""An engine in the process of a training: its start, and what it holds when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.colocated import POOL, STEP, WEIGHTS, engine_entries
from whichlora.memory.entries import Entry
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import ROLLOUT, Ledger
from whichlora.predict.judgement import DEVIATION, SECONDS, Pass
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.serving import get_engine
from whichlora.serving.base import Start, Stepping
from whichlora.serving.step_time import Step, StepTimer, step_timer
from whichlora.spec.numeric import Count, added, is_plain
from whichlora.spec.parallel import ONE_GPU
from whichlora.trainers.base import Colocated, Rollout

_FREED = {
    "nothing": (STEP,),
    "cache": (STEP, POOL),
    "cache and weights": (STEP, POOL, WEIGHTS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedEngine:
    """An engine beside a trainer, started.

    Args:
        asked: how the trainer starts it.
        job: the serving that this is, as a run of its own.
    """

    asked: Colocated
    job: ResolvedRun
    start: Start

    @property
    def context(self) -> int:
        """Tokens of a sequence that it is started for."""
        return self.job.served.context

    def entries(self, step: TrainingStep) -> tuple[Entry, ...]:
        """All that it takes while answers are written."""
        shared = 0
        if self.asked.shares_weights:
            alone = replace(step, beside=())
            shared = added(each.num_bytes for each in alone.static if each.part == WEIGHTS.part)
        return engine_entries(
            self.start.entries_at(self.context),
            outside_bytes=self.start.outside_bytes,
            passing_bytes=self.start.passing_bytes,
            shared_bytes=shared,
        )

    def held(self, step: TrainingStep) -> tuple[Entry, ...]:
        """What of it is on the GPU while the model learns."""
        freed = _FREED[self.asked.gives_back]
        return tuple(entry for entry in self.entries(step) if entry.fact not in freed)

    def with_answers(self, counted: Ledger, step: TrainingStep) -> Ledger:
        """`counted` and the moment in which it writes answers, beside what the training holds.

        Kind: upper bound: its step of the most tokens. Source: TRL 1.16 `VLLMGeneration.generate`.
        """
        alone = replace(step, beside=())
        moment = (*alone.static, *self.entries(step))
        return replace(counted, moments=counted.moments | {f"{ROLLOUT}engine": moment})

    @property
    def fault(self) -> str:
        """Why it does not start, in the words of the trainer's options; empty where it does."""
        fault, asked, start = self.start.fault_at(self.context), self.asked, self.start
        if not fault:
            return ""
        told = fault.partition("; give")[0].replace("gpu_memory_utilization", asked.share_option)
        longest = 0 if start.fault else start.max_context(start.longest_context)
        if longest:
            way = f"give {asked.context_option} {longest} or less, or a larger {asked.share_option}"
        else:
            way = f"give a larger {asked.share_option}, a base in fewer bits, or a larger GPU"
        return (
            f"the {asked.engine} that writes answers does not start: {told}; {way}, or let the "
            "model itself write them"
        )

    def answer_passes(self, rollout: Rollout, sizes: Mapping[str, Count]) -> Iterator[Pass]:
        """Prompt pass and decoding of the answers that one optimizer step learns from.

        Sequences that the pool has no room for wait until others are done.

        Args:
            sizes: as of `rollout_sizes`; arrays broadcast.
        """
        names = ("batch_size", "prompt_len", "max_new_tokens")
        stepping = self.job.engine.stepping
        assert stepping is not None
        rules = stepping(self.job.served)
        timer = step_timer(self.job.served, stepping=rules, reduction_s=lambda num_bytes: 0.0)
        seconds = partial(self._seconds, timer, rules)
        counts = [sizes[name] for name in names]
        if is_plain(*counts):
            prompts_s, tokens_s = seconds(*counts)
        else:
            import numpy as np

            prompts_s, tokens_s = np.vectorize(seconds, otypes=[float, float])(*counts)
        known = {DEVIATION: timer.deviation}
        yield "prefill", 1 / rollout.steps, {SECONDS: prompts_s, **known}
        decoded = (rollout.new_tokens - 1) / rollout.steps
        yield "decode", decoded, {SECONDS: tokens_s, **known}

    def _seconds(
        self, timer: StepTimer, rules: Stepping, answers: float, prompt_len: float, new: float
    ) -> tuple[float, float]:
        """Of all prompts, and of one more token of each answer, those that wait included.

        Kind: estimate. Source: vLLM 0.33.0 v1/core/sched/scheduler.py; a prefix that answers to
        one prompt share is read for each.
        """
        length, answers = int(prompt_len + new), answers * self.asked.ranks
        room = self.start.pool.num_sequences(length)
        running = max(1, min(int(answers), self.start.max_num_seqs(length), room))
        tokens = answers * prompt_len
        steps = max(1, -(-int(tokens) // rules.max_step_tokens))
        part = tokens / steps
        reads = Step(
            decoding=0,
            cached_tokens=0,
            sampled=max(1, int(answers / steps)),
            prompt_tokens=int(part),
            prompt_pairs=part * (prompt_len + 1) / 2,
        )
        cached = running * (prompt_len + new / 2)
        writes = Step(decoding=running, cached_tokens=cached, sampled=running)
        waves = -(-int(answers) // running)
        return steps * timer.seconds(reads), waves * timer.seconds(writes)


def colocated_engine(job: ResolvedRun) -> ColocatedEngine | None:
    """The engine beside the trainer of `job`; None where there is none.

    Raises:
        ConfigError: the engine refuses the model, its form or the card.
    """
    if job.run.phase != "finetune":
        return None
    free = job.gpu.memory_bytes - allocator.idle_context_bytes(job.gpu)
    asked = job.trainer.colocated(job.run, job.model, job.gpu, free)
    if asked is None:
        return None
    shares = asked.shares_weights
    stated = dict(job.run.libraries)
    run = replace(
        job.run,
        phase="inference",
        libraries=tuple(sorted({asked.engine: asked.release, **stated}.items())),
        method=job.run.method if shares else "lora",
        serve="as-trained" if shares else None,
        serving=asked.engine,
        serving_options=tuple(sorted(asked.options.items())),
        context=asked.context or _own_context(job, asked),
        trainer="transformers",
        trainer_options=(),
        loss_head="hf",
        precision="auto",
        quant=job.run.quant or "none",
        prompt_len=1,
        max_new_tokens=1,
        batch_size=1,
        parallel=ONE_GPU,
    )
    try:
        served = resolve(job.model, run, job.gpu)
        assert served.engine.start is not None
        return ColocatedEngine(asked=asked, job=served, start=served.engine.start(served.served))
    except ConfigError as error:
        raise ConfigError(f"trainer: the {asked.engine} that writes answers: {error}") from error


def _own_context(job: ResolvedRun, asked: Colocated) -> int | None:
    """What its engine starts for where it is not told."""
    engine = get_engine(asked.engine)
    if engine.own_context is None:
        return job.model.max_position_embeddings
    return engine.own_context(job.model, engine.libraries(job.run))
