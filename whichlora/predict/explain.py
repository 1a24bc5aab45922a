"""Why a run needs what it needs: the ledger at its peak, and what other choices would change.

Nothing here predicts: the lines are the ledger's, and each alternative is the same job with one
setting changed, predicted like any other run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from whichlora.errors import ConfigError
from whichlora.memory import allocator, kv_cache
from whichlora.memory.entries import Entry
from whichlora.memory.training import Ledger
from whichlora.methods import get_method
from whichlora.predict import changes
from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import count_run
from whichlora.predict.judgement import allocated_bytes, corrected
from whichlora.predict.ledger_lines import Line, layer_lines, lines_at
from whichlora.predict.parts import part_bytes
from whichlora.predict.predict import predict_counted
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import round_up
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.rendering import Rendered
from whichlora.spec.results import Prediction
from whichlora.spec.run import KvCache, Quant, RunConfig

RANKS = (4, 8, 16, 32, 64)
STORAGES: tuple[Quant, ...] = ("none", "int8", "nf4-dq")
SHRUNK = 0.95  # of an entry's bytes: with twice as many GPUs a shared one has a half


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same job with something changed.

    Args:
        name: what is changed, in words.
        settings: what is changed, in the names of `RunConfig`.
    """

    name: str
    settings: Mapping[str, Any]
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """One engine's key-value cache for the sequences of the run.

    Args:
        block_tokens: tokens of one block; what a sequence needs is rounded up to it.
        kept_tokens: tokens of a sequence that the widest layer keeps.
        token_bytes: what one more token of one sequence takes, in all layers.
        block_bytes: what one more block of one sequence takes.
    """

    kv_cache: str
    block_tokens: int
    kept_tokens: int
    token_bytes: int
    block_bytes: int
    cache_bytes: int
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One entry at the peak, and the same with twice as many GPUs.

    Args:
        num_bytes, doubled_bytes: on the rank that needs most.
    """

    part: str
    what: str
    num_bytes: int
    doubled_bytes: int

    @property
    def shrinks(self) -> bool:
        return self.doubled_bytes < SHRUNK * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Rendered):
    """One prediction, taken apart.

    Args:
        lines: what is allocated at the peak, largest first; adds up to `peak_allocated_bytes`.
        card: what lies between that and the device memory used.
        layer: what one checkpointed layer keeps while it is recomputed, tensor by tensor; without
            checkpointing these are members of `lines`.
        moments: allocated bytes of every moment that could have been the peak.
        methods: the job by method, or by storage of the weights in inference.
        savings: the job with one choice made differently, the largest saving first; where two
            choices change, the name says both.
        ranks: the job by rank; none where no adapter is trained.
        caches: the job by engine, in inference.
        strategies: the job by parallel strategy, where it has several GPUs.
        scaling: there, what twice as many GPUs with the same batch each change at the peak.
    """

    prediction: Prediction
    lines: tuple[Line, ...]
    card: tuple[Line, ...]
    layer: tuple[Line, ...]
    moments: Mapping[str, int]
    methods: tuple[Alternative, ...]
    savings: tuple[Alternative, ...]
    ranks: tuple[Alternative, ...]
    caches: tuple[CacheUse, ...]
    strategies: tuple[Alternative, ...] = ()
    scaling: tuple[Scaling, ...] = ()

    def saved_bytes(self, alternative: Alternative) -> int:
        """What `alternative` needs less of the device; negative where it needs more.

        An engine with a preallocated pool takes the same in any case: there it is what is
        allocated inside.
        """
        before, after = self.prediction.memory, alternative.prediction.memory
        run = self.prediction.run
        if run.phase == "inference" and run.kv_cache in allocator.POOL_SHARE:
            return before.peak_allocated_bytes - after.peak_allocated_bytes
        return before.device_used_bytes - after.device_used_bytes

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `whichlora explain --json`: extended but never broken."""

        def rows(alternatives: tuple[Alternative, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "name": alternative.name,
                    "settings": {
                        name: value.to_dict() if isinstance(value, ParallelConfig) else value
                        for name, value in alternative.settings.items()
                    },
                    "saved_bytes": self.saved_bytes(alternative),
                    **alternative.prediction.to_dict(),
                }
                for alternative in alternatives
            ]

        of_several_gpus = {}
        if self.strategies:
            of_several_gpus = {
                "strategies": rows(self.strategies),
                "scaling": [dataclasses.asdict(scaling) for scaling in self.scaling],
            }
        return {
            "prediction": self.prediction.to_dict(),
            "lines": [dataclasses.asdict(line) for line in self.lines],
            "card": [dataclasses.asdict(line) for line in self.card],
            "layer": [dataclasses.asdict(line) for line in self.layer],
            "moments": dict(self.moments),
            "methods": rows(self.methods),
            "savings": rows(self.savings),
            "ranks": rows(self.ranks),
            "caches": [
                {
                    "kv_cache": cache.kv_cache,
                    "block_tokens": cache.block_tokens,
                    "kept_tokens": cache.kept_tokens,
                    "token_bytes": cache.token_bytes,
                    "block_bytes": cache.block_bytes,
                    "cache_bytes": cache.cache_bytes,
                    **cache.prediction.to_dict(),
                }
                for cache in self.caches
            ],
            **of_several_gpus,
        }


def explain(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration
) -> Explanation:
    """Take the prediction of `run` on `gpu` apart.

    Raises:
        ConfigError: settings that exclude each other.
    """
    predictions: dict[RunConfig, Prediction] = {}

    def predicted(changed: RunConfig) -> Prediction:
        """Of one resolved run there is one prediction: many alternatives are the run itself."""
        job = resolve(model, changed, gpu)
        if job.run not in predictions:
            predictions[job.run] = predict_counted(count_run(job), calibration)
        return predictions[job.run]

    def alternatives(choices: Iterator[tuple[str, dict[str, Any]]]) -> tuple[Alternative, ...]:
        predictions = []
        for name, settings in choices:
            try:
                prediction = predicted(replace(run, **settings))
            except ConfigError:  # this device or this method does not have that choice
                continue
            predictions.append(Alternative(name=name, settings=settings, prediction=prediction))
        return tuple(predictions)

    prediction = predicted(run)
    job = resolve(model, run, gpu)
    counted = ledger(job)
    moments = {
        moment: allocated_bytes(corrected(part_bytes(job, counted, moment), calibration.memory))
        for moment in counted.moments
    }
    lines, card = lines_at(job, counted, prediction.memory, calibration)
    training = job.run.phase == "finetune"
    changed = (
        iter(()) if job.has_pool else changes.changes(job.run, model)
    )  # a pool takes what is saved
    savings = alternatives(changed)
    used = prediction.memory.device_used_bytes
    explained = Explanation(
        prediction=prediction,
        lines=lines,
        card=card,
        layer=layer_lines(job) if training and job.run.gradient_checkpointing else (),
        moments=moments,
        methods=alternatives(changes.methods(run) if training else _storages(job)),
        savings=tuple(
            sorted(savings, key=lambda saving: saving.prediction.memory.device_used_bytes - used)
        ),
        ranks=alternatives(_ranks(run)) if training else (),
        caches=(),
        strategies=alternatives(changes.strategies(job.run)),
        scaling=_scaling(model, job, counted, prediction.memory.moment),
    )
    if training or not job.model.can_generate or job.has_pool:
        return explained
    caches = []
    for name in get_args(KvCache):
        try:
            caches.append(_cache_use(model, predicted(replace(run, kv_cache=name)), gpu))
        except ConfigError:
            continue
    return replace(explained, caches=tuple(caches))


def _storages(job: ResolvedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Quantisations of a checkpoint, or the forms of an engine's own files."""
    run, engine = job.run, job.engine
    if engine.stored_by:
        options = dict(run.serving_options)
        current = options.get(engine.stored_by)
        yield "weights not quantised" if current is None else f"weights {current}", {}
        for form in engine.compared_forms:
            changed = options | {engine.stored_by: form}
            if form != current:
                yield f"weights {form}", {"serving_options": tuple(sorted(changed.items()))}
        return
    for quant in dict.fromkeys((*STORAGES, run.quant or "none")):
        yield f"weights {quant}" if quant != "none" else "weights not quantised", {"quant": quant}


def _ranks(run: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if "r" in get_method(run.method).ignores:
        return
    for r in sorted({*RANKS, run.r}):
        yield f"r {r}", {"r": r}


def _scaling(
    model: ModelSpec, job: ResolvedRun, counted: Ledger, moment: str
) -> tuple[Scaling, ...]:
    """What twice as many GPUs change of each entry at `moment`; the largest entries first."""
    config = job.run.parallel
    if config.is_one_device:
        return ()
    nodes = config.nodes if config.nodes == 1 else 2 * config.nodes
    try:
        doubled = replace(config, gpus=2 * config.gpus, nodes=nodes)
        moments = ledger(resolve(model, replace(job.run, parallel=doubled), job.gpu)).moments
    except ConfigError:  # more than the model can be divided into
        return ()
    if moment not in moments:
        return ()
    now, then = (_by_fact(entries) for entries in (counted.moments[moment], moments[moment]))
    scaled = [
        Scaling(part=part, what=what, num_bytes=size, doubled_bytes=then.get((part, what), 0))
        for (part, what), size in now.items()
        if size
    ]
    return tuple(sorted(scaled, key=lambda scaling: -scaling.num_bytes))


def _by_fact(entries: Iterable[Entry]) -> dict[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = entry.part, entry.what
        sizes[key] = sizes.get(key, 0) + int(entry.num_bytes)
    return sizes


def _cache_use(model: ModelSpec, prediction: Prediction, gpu: GpuSpec) -> CacheUse:
    job = resolve(model, prediction.run, gpu)
    run = job.run
    block = kv_cache.BLOCK_TOKENS[run.kv_cache]
    tokens = run.prompt_len + run.max_new_tokens - 1

    def sequence_bytes(count: int) -> int:
        size = kv_cache.cache_bytes(
            model,
            batch_size=1,
            tokens=count,
            kv_cache=run.kv_cache,
            element_bytes=job.dtypes.compute_bytes,
            stored=run.cache_format,
        )
        return int(size)

    block_bytes = sequence_bytes(block) - sequence_bytes(0)
    kept_tokens = max(
        (kv_cache.kept_tokens(layer, tokens, kv_cache=run.kv_cache) for layer, _ in model.layers()),
        default=round_up(tokens, block),
    )
    return CacheUse(
        kv_cache=run.kv_cache,
        block_tokens=block,
        kept_tokens=kept_tokens,
        token_bytes=block_bytes // block,
        block_bytes=block_bytes,
        cache_bytes=run.batch_size * sequence_bytes(tokens),
        prediction=prediction,
    )
