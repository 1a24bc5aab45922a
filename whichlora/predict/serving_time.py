"""What users of a serving engine wait, with intervals: timed steps under its scheduler's rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from whichlora.predict.coefficients import Calibration
from whichlora.predict.judgement import TIME_CONFIDENCE, time_interval
from whichlora.predict.resolve import ResolvedRun
from whichlora.predict.serving_links import (
    exchange_s,
    host_bytes_per_s,
    machines_of,
    reduction_s,
    sends_s,
)
from whichlora.serving import get_engine
from whichlora.serving.base import Served
from whichlora.serving.cpu_timer import CpuTimer
from whichlora.serving.draft_time import DraftingTimer, drafting_timer
from whichlora.serving.hosted_time import HostedTimer, hosted_timer
from whichlora.serving.pipeline_time import PipelineTimer, pipeline_timer
from whichlora.serving.scheduler import (
    PERCENTILES,
    Load,
    Rules,
    Waits,
    percentile,
    simulate,
    steady_token_s,
)
from whichlora.serving.step_time import Service, Step, StepTimer, step_timer
from whichlora.spec.results import ServingTime
from whichlora.spec.run import MOST_COUNT, RunConfig

Timer = StepTimer | PipelineTimer | HostedTimer | DraftingTimer | CpuTimer


def serving_time(
    job: ResolvedRun, served: Served, service: Service, calibration: Calibration
) -> ServingTime | None:
    """Waits of what `job` asks for; None where the engine or the device is not timed.

    Args:
        served: `job` as the engine of `service` is asked to serve it, which starts for it.
    """
    timer = _timer(job, served, service, calibration)
    if timer is None:
        return None
    return _with_intervals(_asked(job.run, served, service, timer))


def steady_time_per_token_s(
    job: ResolvedRun, served: Served, service: Service, calibration: Calibration
) -> float:
    """Seconds for each token that all clients of `job` get; not known where it is not timed.

    Args: as of `serving_time`.
    """
    timer = _timer(job, served, service, calibration)
    if timer is None:
        return math.nan
    request = _asked(job.run, served, service, timer)
    return steady_token_s(request.rules, request.load, request.timer.seconds) / request.scale


def _timer(
    job: ResolvedRun, served: Served, service: Service, calibration: Calibration
) -> Timer | None:
    """Of the steps of `service`, made once; None where the engine or the device is not timed.

    So is a load whose requests the engine refuses.
    """
    if served.refused_requests:
        return None
    logged = logged_timer(job, served, calibration)
    if logged is not None:
        return logged
    if job.engine.stepping is None or service.start.untimed:
        return None
    stepping = job.engine.stepping(served)
    is_on_gpus = stepping.hosted is None or not stepping.hosted.is_alone
    if is_on_gpus and not all(card.is_timed for card in job.gpu.beside or (job.gpu,)):
        return None
    timer: StepTimer | PipelineTimer | HostedTimer | DraftingTimer
    if stepping not in service.timers:
        ranks, stages = stepping.ranks, stepping.num_stages
        machines = machines_of(job, calibration.machines)
        reducing = reduction_s(ranks, job.gpu, machines)
        sending = sends_s(ranks, stages, job.gpu, machines)
        exchanging = exchange_s(
            stepping.copies, job.gpu, machines, gathered_share=stepping.gathered_share
        )
        if reducing is None or sending is None or exchanging is None:
            return None
        if stepping.hosted is not None:
            timer = hosted_timer(
                served,
                stepping.hosted,
                stepping=stepping,
                link_bytes_per_s=host_bytes_per_s(job.gpu, machines),
            )
        elif stages > 1:
            timer = pipeline_timer(served, stepping=stepping, reduction_s=reducing, sends_s=sending)
        elif (drafts := stepping.drafts) is not None:
            timer = drafting_timer(
                served, drafts, stepping=stepping, reduction_s=reducing, exchange_s=exchanging
            )
        else:
            timer = step_timer(
                served, stepping=stepping, reduction_s=reducing, exchange_s=exchanging
            )
        service.timers[stepping] = timer
    return service.timers[stepping]


def logged_timer(job: ResolvedRun, served: Served, calibration: Calibration) -> CpuTimer | None:
    """Of the steps that logs of the same file on this device state; None where there are none."""
    if job.engine.logged_timer is None:
        return None
    return job.engine.logged_timer(served, calibration.logged_times)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is simulated: of a pipeline one of its batches, with its share of the requests.

    Args:
        scale: answers of all batches over those of one.
    """

    rules: Rules
    load: Load
    timer: Timer
    scale: float


def _asked(run: RunConfig, served: Served, service: Service, timer: Timer) -> _Asked:
    """The rules of the engine, and the load of the run.

    A pipeline has as many batches under way as stages, with equally many requests, and each batch
    its share of the pool. Engines that share experts have equally many requests each, and step
    together. Engines do not divide a batch: requests that come at once and whose
    prompts fit one step stay one batch until answers end, so that the first answers take longer
    than here (github.com/vllm-project/vllm/issues/41682). The chunks of a prompt that is read alone
    follow each other from stage to stage, where other batches leave these free. An engine that
    has one batch for all GPUs overlaps passes of one step alone.

    Kind: estimate. Source: vLLM 0.33.0 v1/engine/core.py:208 batch_queue_size; SGLang 0.5.23
    srt/managers/scheduler.py:1241 pp_max_micro_batch_size.
    """
    start, stepping = service.start, timer.stepping
    stages, is_open = stepping.num_stages, run.request_rate is not None
    clients = -(-run.batch_size // stepping.copies)
    length = run.prompt_len + run.max_new_tokens
    pool_tokens = min(start.pool.num_tokens(length), start.shared_cells or MOST_COUNT)
    held = pool_tokens // length  # a batch has one of them at least
    batches = max(1, min(stages, held, stages if is_open else clients))
    if not get_engine(run.serving).fills_stages:
        batches = 1
    share = -(-clients // batches)
    max_num_seqs = start.max_num_seqs(served.context)
    load = Load(
        prompt_len=run.prompt_len,
        new_tokens=run.max_new_tokens,
        cached_prompt=served.shared_tokens * stepping.caches_prompts,
        concurrency=share,
        spread=run.length_spread,
        requests_per_s=None
        if run.request_rate is None
        else run.request_rate / batches / stepping.copies,
    )
    rules = Rules(
        max_num_seqs=max(1, min(max_num_seqs, stepping.max_num_seqs or max_num_seqs) // batches),
        max_step_tokens=stepping.max_step_tokens,
        mixes=stepping.mixes,
        whole_prompts=stepping.whole_prompts,
        pool_tokens=pool_tokens // batches,
        reserved_tokens=stepping.reserved_tokens,
        keeps_blocks=stepping.keeps_blocks,
        front_s=stepping.front_s + stepping.tokenized_s * load.prompt_len,
        plans_ahead=stepping.plans_ahead,
        chunk_share=stepping.chunk_share(batches),
        accepted=stepping.accepted,
    )
    if isinstance(timer, PipelineTimer):
        timer = replace(timer, batches=batches)
    scale = batches * stepping.copies if is_open else run.batch_size / share
    return _Asked(rules=rules, load=load, timer=timer, scale=scale)


def _with_intervals(asked: _Asked) -> ServingTime:
    """At the predicted times, and at both ends of their interval.

    Of a concurrency all waits but `front_s` go with the steps; of arrivals they do not, nor where
    steps with a prompt err otherwise than those without.
    """
    rules, load, timer, scale = asked.rules, asked.load, asked.timer, asked.scale

    def at(factor: float, of_prompts: float) -> Waits:
        seconds = timer.seconds
        if factor == of_prompts == 1.0:
            return simulate(rules, load, seconds)
        return simulate(
            rules,
            load,
            lambda step: (of_prompts if step.prompt_tokens else factor) * seconds(step),
        )

    factors = _ends(timer, timer.deviation)
    of_prompts = factors
    if isinstance(timer, HostedTimer):
        of_prompts = _ends(timer, timer.prompt_deviation)
    waits = at(1.0, 1.0)
    is_open = load.requests_per_s is not None
    goes_with_steps = not is_open and of_prompts == factors
    ends = [
        waits.slower(factor, rules.front_s) if goes_with_steps else at(factor, of_prompt)
        for factor, of_prompt in zip(factors, of_prompts, strict=True)
    ]
    running = _running(rules, load, waits)
    cached = running * (load.prompt_len + load.new_tokens / 2)
    middle = Step(decoding=running, cached_tokens=cached, sampled=running)
    return ServingTime(
        ttft_s=percentile(waits.ttft_s, 50),
        tpot_s=percentile(waits.tpot_s, 50),
        mean_ttft_s=sum(waits.ttft_s) / len(waits.ttft_s),
        output_tokens_per_s=scale * waits.output_tokens_per_s,
        requests_per_s=scale * waits.requests_per_s,
        interval_ttft_s=_interval(percentile(end.ttft_s, 50) for end in ends),
        interval_tpot_s=_interval(percentile(end.tpot_s, 50) for end in ends),
        interval_output_tokens_per_s=_interval(scale * end.output_tokens_per_s for end in ends),
        ttft_percentiles_s=_percentiles(waits.ttft_s),
        tpot_percentiles_s=_percentiles(waits.tpot_s),
        queue_grows=waits.queue_grows,
        length_spread=load.spread,
        step_sequences=running,
        step_parts_s=timer.parts(middle),
        confidence=TIME_CONFIDENCE,
    )


def _ends(timer: Timer, deviation: float) -> tuple[float, float]:
    """Times a step may take at least and at most, over what is predicted."""
    fast, slow = (float(end) for end in time_interval(1.0, deviation))
    return fast, slow * timer.stepping.slowest


def _running(rules: Rules, load: Load, waits: Waits) -> int:
    """Sequences that decode at once; of arrivals by Little's law."""
    concurrency = float(load.concurrency)
    if load.requests_per_s is not None:
        held_s = load.new_tokens * percentile(waits.tpot_s, 50)
        concurrency = waits.requests_per_s * held_s
    in_pool = rules.pool_tokens // (load.prompt_len + load.new_tokens)
    return max(1, min(round(concurrency), rules.max_num_seqs, in_pool))


def _interval(ends: Iterable[float]) -> tuple[float, float]:
    low, high = sorted(ends)
    return low, high


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    return {share: percentile(values, share) for share in PERCENTILES}
