"""Predictions of many runs, which share what their lengths and their number do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from whichlora.parallel.base import RankKind
from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import CountedRun, count_run, count_served
from whichlora.predict.predict import JudgedRun, judge_counted, predict_counted
from whichlora.predict.quantities import moment_parts, run_moments
from whichlora.predict.resolve import ResolvedRun, of_fullest_card, resolve, respread
from whichlora.serving.base import Engine, Served
from whichlora.serving.step_time import Service
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count
from whichlora.spec.parallel import AUTO, AUTO_INTERCONNECT
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig

# What a run asks of an engine that has started; the rest is what the engine is started with.
LOAD = (
    "batch_size",
    "prompt_len",
    "max_new_tokens",
    "context",
    "shared_prompt_fraction",
    "request_rate",
    "length_spread",
)


Moments = Mapping[str, Mapping[str, Count]]


class SharedLedgers:
    """Bytes of one run on many cards: those of a kind and a compute capability hold the same.

    The context of a device, time and what fits are each card's own.

    Kind: exact. Source: `memory` asks a GPU for its kind, its backend and its capability alone,
    but for its context, and for a pool that is a share of its memory.
    """

    def __init__(self) -> None:
        self._replayed: dict[tuple[Any, ...], tuple[Moments, bool]] = {}
        self._of_batches: dict[tuple[Any, ...], dict[int, Moments]] = {}

    def run_moments(self, job: ResolvedRun, kinds: Sequence[RankKind] = ()) -> tuple[Moments, bool]:
        """As of `quantities.run_moments`."""
        key = _same_bytes(job)
        if key is None:
            return run_moments(job, kinds)
        if key not in self._replayed:
            self._replayed[key] = run_moments(job, kinds)
        moments, is_replayed = self._replayed[key]
        return _on_card(job, moments), is_replayed

    def batches(self, job: ResolvedRun) -> Callable[[int], Moments]:
        """Moments of `job` by its batch size, as of `quantities.moment_parts`."""
        key = _same_bytes(job)  # once for all sizes: its hash is that of a whole model
        counted = {} if key is None else self._of_batches.setdefault(key, {})

        def moments(batch_size: int) -> Moments:
            if batch_size not in counted:
                counted[batch_size] = moment_parts(job, batch_size=batch_size)
            return _on_card(job, counted[batch_size])

        return moments


def _on_card(job: ResolvedRun, moments: Moments) -> Moments:
    """`moments` of another card on that of `job`."""
    return {name: {**parts, "context": job.context_bytes} for name, parts in moments.items()}


def _same_bytes(job: ResolvedRun) -> tuple[Any, ...] | None:
    """What two jobs have in common that take the same bytes; None where the card decides."""
    divided = job.layout is not None or job.has_pool
    if divided or (job.run.phase == "finetune" and job.trainer.rollout(job.run) is not None):
        return None
    return job.run, job.dtypes, job.targets, job.model, job.gpu.kind, job.gpu.compute_capability


class Predictor:
    """Predicts as `predict` does, and starts a serving engine once for all that is asked of it.

    So it resolves a run once for all strategies. Runs are told apart by the names of model and GPU.
    """

    def __init__(self) -> None:
        self._resolved: dict[tuple[Any, ...], ResolvedRun] = {}
        self._started: dict[tuple[RunConfig, str], tuple[ResolvedRun, Service]] = {}
        self._last: tuple[tuple[Any, ...], CountedRun] | None = None

    def predict(
        self, model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration
    ) -> Prediction:
        """Judge one run on one device; args and errors as of `predict`."""
        return predict_counted(self.count(model, run, gpu), calibration)

    def judge(
        self, model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration
    ) -> JudgedRun:
        """Memory, time and verdict of one run on one device; args and errors as of `predict`."""
        return judge_counted(self.count(model, run, gpu), calibration)

    def count(self, model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> CountedRun:
        """Count one run on one device; args and errors as of `predict`."""
        if run.phase != "inference":
            return count_run(self._resolve(model, run, gpu))
        key = replace(run, **_NO_LOAD), gpu.key
        if key not in self._started:
            counted = count_run(self._resolve(model, run, gpu))
            if counted.service is not None:
                self._started[key] = counted.job, counted.service
            return counted
        job, service = self._started[key]
        load = {name: getattr(run, name) for name in LOAD}
        job = replace(job, run=replace(job.run, **load))
        loaded = under_load(job.engine, job.served, service)
        return count_served(of_fullest_card(job, loaded.start), loaded)

    def predict_over(
        self, model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration
    ) -> Prediction:
        """As `predict`, of a run that may have been counted over other links just before."""
        parallel = replace(run.parallel, interconnect=AUTO_INTERCONNECT)
        key = _beside_parallel(run), parallel, gpu.key
        if self._last is None or self._last[0] != key:
            self._last = key, self.count(model, run, gpu)
        counted = over_links(self._last[1], run.parallel.interconnect)
        return predict_counted(counted, calibration)

    def _resolve(self, model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> ResolvedRun:
        parallel = run.parallel
        if parallel.is_one_device or parallel.global_batch_size is not None:
            return resolve(model, run, gpu)
        key = _beside_parallel(run), replace(parallel, strategy=AUTO, options=()), gpu.key
        if key not in self._resolved:
            self._resolved[key] = resolve(model, run, gpu)
        return respread(self._resolved[key], parallel)


def over_links(counted: CountedRun, interconnect: str) -> CountedRun:
    """`counted` over other links, of which nothing that is counted knows."""
    job, ranks = counted.job, counted.ranks
    if job.layout is None or ranks is None or job.run.parallel.interconnect == interconnect:
        return counted
    config = replace(job.layout.config, interconnect=interconnect)
    run = replace(job.run, parallel=replace(job.run.parallel, interconnect=interconnect))
    return replace(
        counted,
        job=replace(job, run=run, layout=replace(job.layout, config=config)),
        ranks=replace(ranks, config=config),
    )


def under_load(engine: Engine, served: Served, service: Service) -> Service:
    """`service`, which another load has started, for `served`."""
    assert engine.start is not None  # as it was for the other
    load = engine.load_of_start(served)
    if load not in service.starts:
        service.starts[load] = engine.start(served)
    return Service(start=service.starts[load], starts=service.starts, timers=service.timers)


# Every setting but how it is spread, read at once: a value for each strategy takes longer.
_beside_parallel = attrgetter(*(each.name for each in fields(RunConfig) if each.name != "parallel"))
_NO_LOAD: dict[str, Any] = {
    name: getattr(RunConfig(model="", phase="inference"), name) for name in LOAD
}
