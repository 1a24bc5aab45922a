"""Changes that make a run fit which does not: each is tried, and predicted as any other run.

Nothing here knows a formula: the choices are those of `predict.changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import get_method
from whichlora.parallel import get_strategy
from whichlora.predict import changes
from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import count_run
from whichlora.predict.judged import judged_memory
from whichlora.predict.parallel_choice import candidates
from whichlora.predict.predict import judge_counted
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.parallel import AUTO, ONE_DEVICE, ParallelConfig
from whichlora.spec.results import Prediction, WayOut
from whichlora.spec.run import RunConfig

MOST = 3
MOST_SPREADS, MOST_CARDS = 24, 4
MOST_OF_A_KIND = 3
# Kinds of changes by what they cost, the least first: time, then precision, then what is learned.
# One change of a kind is enough. Where no kind helps alone, they are combined in this order.
_KINDS = (
    ("batch_size", "gradient_accumulation_steps"),  # the same steps, in smaller pieces
    ("use_reentrant",),
    ("attn",),
    ("loss_head",),
    ("gradient_checkpointing",),
    ("parallel",),
    ("precision", "base_dtype"),
    ("optimizer",),
    ("method", "method_options", "quant", "prepare_kbit"),
    ("target_modules",),
    ("seq_len",),
)
# losses that belong to another trainer
_NOT_ALONE = frozenset(name for name, head in LOSS_HEADS.items() if head.own_trainer)
_WORTH = 0.98  # of the memory: a change that leaves more of it is not combined with others


@dataclass(frozen=True, slots=True)
class _Trial:
    """The run with `settings` in place of its own, on `gpu`."""

    settings: dict[str, Any]
    gpu: GpuSpec
    used_bytes: int
    fits: bool

    def way(self, gpu: str = "") -> WayOut:
        return WayOut(
            settings=self.settings,
            gpu=gpu,
            device_used_bytes=self.used_bytes,
            usable_bytes=self.gpu.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class _TrialRuns:
    """Predicts changed runs; None where device, method or trainer refuse the change."""

    model: ModelSpec
    run: RunConfig
    calibration_of: Callable[[GpuSpec], Calibration]

    def __call__(self, settings: dict[str, Any], gpu: GpuSpec) -> _Trial | None:
        calibration = self.calibration_of(gpu)
        try:
            job = resolve(self.model, replace(self.run, **settings), gpu)
            judged = judged_memory(job, calibration)  # without a replay
            if judged.bounds()[0] > gpu.memory_bytes:
                return _Trial(settings, gpu, int(judged.device_used_bytes), fits=False)
            prediction = judge_counted(count_run(job), calibration)
        except ConfigError:
            return None
        return _Trial(
            settings, gpu, prediction.memory.device_used_bytes, prediction.verdict == "fits"
        )


def ways_out(
    model: ModelSpec,
    prediction: Prediction,
    gpu: GpuSpec,
    calibration_of: Callable[[GpuSpec], Calibration],
    cards: Iterable[GpuSpec],
) -> tuple[WayOut, ...]:
    """At most `MOST` runs that surely fit in place of the one of `prediction`, which does not.

    Args:
        cards: other accelerators, of which the smallest that is enough is named.
    """
    trials = _TrialRuns(model, prediction.run, calibration_of)
    kinds = list(_changes_by_kind(prediction.run, model))
    fitting: list[_Trial] = []
    for changed in kinds:
        fitting += _first(trials(settings, gpu) for settings in changed)
        if len(fitting) == MOST - 1:
            break
    if not fitting:
        fitting += _combined(kinds, trials, gpu, prediction.memory.device_used_bytes)
    ways = [trial.way() for trial in fitting]
    return (*ways, *_on_other_gpus(prediction, gpu, trials, cards))[:MOST]


def _first(tries: Iterable[_Trial | None]) -> list[_Trial]:
    """The first that fits, if there is one; those behind it are not tried."""
    return next(([trial] for trial in tries if trial is not None and trial.fits), [])


def _changes_by_kind(run: RunConfig, model: ModelSpec) -> Iterator[list[dict[str, Any]]]:
    """For each of `_KINDS`, the settings that the run may have instead."""
    choices = (*changes.methods(run), *changes.changes(run, model))
    alone = [
        settings
        for _, settings in choices
        if settings
        and settings.get("loss_head") not in _NOT_ALONE
        and not ("method" in settings and get_method(settings["method"]).trains_base)
    ]
    yield _smaller_batches(run)
    for names in _KINDS[1:]:
        if "parallel" in names:
            spreads = filter(_computes_at_once, _spreads(run.parallel))
            yield [{"parallel": each} for each in spreads if each != run.parallel]
        else:
            yield [settings for settings in alone if _kind_of(settings) == names][:MOST_OF_A_KIND]


def _kind_of(settings: dict[str, Any]) -> tuple[str, ...]:
    return next(names for names in _KINDS if not settings.keys().isdisjoint(names))


def _smaller_batches(run: RunConfig) -> list[dict[str, Any]]:
    """Parts of the batch with as many more accumulation steps, the largest first."""
    sizes = []
    size, steps = run.batch_size, run.gradient_accumulation_steps
    while size > 1:
        by = 2 if size % 2 == 0 else size
        size, steps = size // by, by * steps
        of_steps = {} if run.parallel.global_batch_size else {"gradient_accumulation_steps": steps}
        sizes.append({"batch_size": size, **of_steps})
    return sizes


def _combined(
    kinds: Sequence[Sequence[dict[str, Any]]], trials: _TrialRuns, gpu: GpuSpec, used_bytes: int
) -> list[_Trial]:
    """Changes of several kinds, combined in their order until the run fits; nothing if never.

    A kind that did not help may help the second time, as a smaller batch does under adapters. What
    turns out not to be needed is left out again, the most expensive first.
    """
    joined: dict[str, Any] = {}
    for changed in (*kinds[:-2], *kinds):
        tries = [trials(joined | settings, gpu) for settings in changed]
        if fitting := _first(tries):
            return [_without_unneeded(fitting[0], trials)]
        least = min(filter(None, tries), key=lambda trial: trial.used_bytes, default=None)
        if least is not None and least.used_bytes < _WORTH * used_bytes:
            joined, used_bytes = least.settings, least.used_bytes
    return []


def _without_unneeded(trial: _Trial, trials: _TrialRuns) -> _Trial:
    for names in reversed(_KINDS):
        fewer = {name: value for name, value in trial.settings.items() if name not in names}
        if fewer and len(fewer) < len(trial.settings):
            trial = next(iter(_first([trials(fewer, trial.gpu)])), trial)
    return trial


def _on_other_gpus(
    prediction: Prediction, gpu: GpuSpec, trials: _TrialRuns, cards: Iterable[GpuSpec]
) -> Iterator[WayOut]:
    """The run as it is on the smallest other card, or on more of the same."""
    run, most = prediction.run, prediction.memory.interval_bytes[1]
    larger = [
        card
        for card in sorted(cards, key=lambda card: (card.memory_bytes, card.key))
        if card.kind == gpu.kind and card.memory_bytes > max(most, gpu.memory_bytes)
    ]
    if run.parallel.is_one_device:
        fitting = _first(trials({}, card) for card in larger[:MOST_CARDS])
        yield from (trial.way(trial.gpu.key) for trial in fitting)
    for times in (2, 4):
        if gpu.is_timed and prediction.memory.device_used_bytes <= times * gpu.memory_bytes:
            gpus = times * run.parallel.gpus
            configs = _spreads(replace(run.parallel, gpus=gpus, strategy=AUTO, options=()))
            fitting = _first(trials({"parallel": config}, gpu) for config in configs)
            yield from (trial.way() for trial in fitting)
            if fitting:
                return


def _spreads(config: ParallelConfig) -> list[ParallelConfig]:
    """Strategies for the GPUs of `config`, those first with which all of them compute at once.

    One GPU is left the run without a strategy.
    """
    if config.gpus == 1:
        return [replace(config, strategy=ONE_DEVICE, options=())]
    every = candidates(replace(config, strategy=AUTO, options=()))
    return sorted(every, key=lambda each: not _computes_at_once(each))[:MOST_SPREADS]


def _computes_at_once(config: ParallelConfig) -> bool:
    if config.is_one_device:
        return True
    strategies = map(get_strategy, config.names)
    return all(each.divides == "data" or each.size_option for each in strategies)
