"""`parallel: auto`: which strategies accept a run, and the best of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from whichlora.errors import ConfigError
from whichlora.parallel import Strategy, get_strategy, list_strategies
from whichlora.predict.words import FITS
from whichlora.spec.numeric import added
from whichlora.spec.options import OptionValue
from whichlora.spec.parallel import AUTO, ParallelConfig
from whichlora.spec.results import MemoryPrediction, Prediction, TimePrediction, Verdict
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes, format_count

ON_CHOICE = (f"parallel {AUTO} ", "instead ")  # how notes begin that say why, and what else
MOST_RUNNERS_UP = 3  # in notes, one line each
MOST_REASONS = 3  # of a refusal, in its line
_OF_STRATEGY = "parallel: "  # how a refusal begins that a strategy makes
# Share of a step that its links may take where no strategy that divides the model can be faster:
# its GPUs compute no more in a second, and send more.
_HARDLY_WAITS = 0.05


class Judged(Protocol):
    """What tells ways to spread a run apart: a prediction, or what it is made of."""

    @property
    def memory(self) -> MemoryPrediction: ...
    @property
    def time(self) -> TimePrediction: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def exceeds_host(self) -> bool: ...


OfRun = TypeVar("OfRun", bound=Judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreading(Generic[OfRun]):
    """One way to spread a run.

    Args:
        config: the strategy, and those of its options that are not left at their defaults.
        prediction: of the run; its own config has every option.
    """

    config: ParallelConfig
    prediction: OfRun


def best_first(
    run: RunConfig, predicted: Callable[[RunConfig], OfRun]
) -> tuple[Spreading[OfRun], ...]:
    """`run` under every strategy that accepts it: the fastest that fit, then by memory.

    Those that divide the model are left out where one that divides the data surely fits and hardly
    waits for its links. Where none surely fits, what a strategy can keep off the GPUs is tried,
    too. Last is what the host can't hold.

    Args:
        predicted: judges a run whose strategy is named.

    Raises:
        ConfigError: none accepts it.
    """
    accepted: list[Spreading[OfRun]] = []
    refusals: Counter[str] = Counter()
    proposed = tuple(candidates(run.parallel))
    of_data = (config for config in proposed if _divides_data(config))
    of_model = (config for config in proposed if not _divides_data(config))
    for number, configs in enumerate((of_data, of_model, smallest_candidates(run.parallel))):
        for config in configs:
            try:
                prediction = predicted(replace(run, parallel=config))
            except ConfigError as error:
                refusals[str(error)] += 1
                continue
            accepted.append(Spreading(config=config, prediction=prediction))
        if _is_settled(accepted, tries_model=number > 0):
            break
    if not accepted:
        raise ConfigError(_why_none(refusals))
    return in_order(accepted)


def _why_none(refusals: Counter[str]) -> str:
    """Why no strategy accepts a run: each reason once, and no more than three.

    That a strategy is not for this run at all says nothing where another is refused otherwise.
    """
    of_run = Counter({r: n for r, n in refusals.items() if not r.startswith(_OF_STRATEGY)})
    told = (of_run or refusals).most_common()
    reason, number = told[0]
    if 2 * number > (of_run or refusals).total():  # what most of them refuse was asked wrongly
        return reason
    more = len(told) - MOST_REASONS
    first = "; ".join(reason for reason, _ in told[:MOST_REASONS])
    return f"{first}; and {more} more reasons" if more > 0 else first


def in_order(spreadings: Iterable[Spreading[OfRun]]) -> tuple[Spreading[OfRun], ...]:
    """The fastest that surely fit, then by memory, last what the host can't hold.

    Of those that fit in an unknown time, whatever divides the data comes first.
    """
    return tuple(sorted(spreadings, key=_order))


def _divides_data(config: ParallelConfig) -> bool:
    return get_strategy(config.names[0]).divides == "data"


def _is_settled(accepted: Sequence[Spreading[OfRun]], *, tries_model: bool) -> bool:
    """Whether the best is among `accepted`: all that are tried, or those that divide the data."""
    fitting = [each for each in accepted if each.prediction.verdict == "fits"]
    if tries_model or not fitting:
        return bool(fitting)
    time = in_order(fitting)[0].prediction.time
    waits_s: float = added(
        time.breakdown.get(part, 0.0) for part in ("communication", "contention")
    )
    return waits_s < _HARDLY_WAITS * (time.step_s or 0.0)


def _order(spreading: Spreading[OfRun]) -> tuple[int, float, bool, float]:
    prediction = spreading.prediction
    need = prediction.memory.interval_bytes[1]
    if prediction.verdict != "fits":
        return 2 if prediction.exceeds_host else 1, need, False, 0.0
    if prediction.time.is_known:
        return 0, -prediction.time.tokens_per_s, False, need
    return 0, 0.0, not _divides_data(spreading.config), need


def candidates(config: ParallelConfig) -> Iterator[ParallelConfig]:
    """`config` with each strategy, and each pair of a model's and a data's, that has its options.

    The strategy of a pair that divides the model stays within a node.

    Raises:
        ConfigError: no strategy has them.
    """
    names = dict(config.options)
    several = False
    for combined, sizes in _combinations(config):
        options = {option.name for strategy in combined for option in strategy.options}
        if set(names) <= options:
            several = True
            yield replace(
                config,
                strategy="+".join(strategy.name for strategy in combined),
                options=tuple(sorted((names | sizes).items())),
            )
    if not several:
        raise ConfigError(f"{', '.join(names)}: no strategy of parallel {AUTO} has these options")


def smallest_candidates(config: ParallelConfig) -> Iterator[ParallelConfig]:
    """`config` with each strategy that can hold less on a GPU than with its default options."""
    names = dict(config.options)
    for strategy in list_strategies().values():
        smallest = dict(strategy.smallest)
        known = {option.name for option in strategy.options}
        if smallest and set(names) <= known and not names.keys() & smallest.keys():
            options = tuple(sorted((names | smallest).items()))
            yield replace(config, strategy=strategy.name, options=options)


def is_in_the_trainer(config: ParallelConfig) -> bool:
    """Whether `TrainingArguments` have keys for its strategies, so that a train.py states them."""
    return all(get_strategy(name).is_in_the_trainer for name in config.names)


def is_tried_first(config: ParallelConfig) -> bool:
    """Whether it divides the data and keeps nothing off the GPUs, or is of one."""
    if config.is_one_device:
        return True
    smallest = get_strategy(config.names[0]).smallest
    return _divides_data(config) and not set(smallest) & set(config.options)


def not_in_the_trainer() -> list[str]:
    """Strategies that no train.py can state."""
    strategies = list_strategies().values()
    return [strategy.name for strategy in strategies if not strategy.is_in_the_trainer]


def every(config: ParallelConfig) -> tuple[ParallelConfig, ...]:
    """All of `candidates` and `smallest_candidates`."""
    return (*candidates(config), *smallest_candidates(config))


def _combinations(
    config: ParallelConfig,
) -> Iterator[tuple[tuple[Strategy, ...], dict[str, OptionValue]]]:
    strategies = list(list_strategies().values())
    for strategy in strategies:
        yield (strategy,), {}
    per_node = config.gpus_per_node
    for inner in strategies:
        if inner.divides != "model" or not inner.size_option:
            continue
        for outer in strategies:
            if outer.divides != "data":
                continue
            if inner.size_option in dict(config.options):
                yield (inner, outer), {}
                continue
            for size in range(2, min(per_node, config.gpus - 1) + 1):
                if per_node % size == 0:
                    yield (inner, outer), {inner.size_option: size}


def best_spread(run: RunConfig, predicted: Callable[[RunConfig], Prediction]) -> Prediction:
    """The best of `best_first`, with notes on the others; args as there."""
    return best_of_judged(run, predicted, lambda best: best)


def best_of_judged(
    run: RunConfig,
    judged: Callable[[RunConfig], OfRun],
    finished: Callable[[OfRun], Prediction],
) -> Prediction:
    """As `best_spread`, where of the others no more is known than what tells them apart.

    Args:
        finished: the prediction of what has been judged.
    """
    spreadings = best_first(run, judged)
    best = finished(spreadings[0].prediction)
    return replace(best, notes=(*choice_notes(spreadings), *best.notes))


def choice_notes(spreadings: Sequence[Spreading[OfRun]]) -> tuple[str, ...]:
    """Why the first of `spreadings` is the answer, and the next ones, a line each."""
    best, *others = spreadings
    where = f"{ON_CHOICE[0]}on {best.config.gpus} GPUs: {_in_words(best.config)}"
    fitting = sum(spreading.prediction.verdict == "fits" for spreading in spreadings)
    if not others:
        why = "is the only strategy that accepts the run"
    elif not fitting:
        why = f"needs least memory of {len(spreadings)}; none surely fits"
    elif fitting == 1:
        why = f"is the only one of {len(spreadings)} that surely fits"
    elif best.prediction.time.is_known:
        why = f"is the fastest of {fitting} that fit"
    elif _divides_data(best.config):
        why = f"divides the data with least memory; no time of the {fitting} that fit is known"
    else:
        why = f"needs least memory of {fitting} that fit"
    told = others[:MOST_RUNNERS_UP]
    told += [each for each in others[MOST_RUNNERS_UP:] if each.prediction.exceeds_host][:1]
    return f"{where} {why}", *_written_instead(spreadings), *map(_runner_up, told)


def _written_instead(spreadings: Sequence[Spreading[OfRun]]) -> tuple[str, ...]:
    """What run and export take where they have no key for the first; nothing where they have."""
    if is_in_the_trainer(spreadings[0].config):
        return ()
    written = (each for each in spreadings if is_in_the_trainer(each.config))
    instead = next(written, None)
    first = spreadings[0].config.strategy
    why = f"{ON_CHOICE[0]}of run and export: {first} has no key in the Trainer"
    if instead is None:
        return (f"{why}, nor has any other that accepts the run",)
    fits = FITS[instead.prediction.verdict]
    return (f"{why}; they take {_in_words(instead.config)}, which {fits}",)


def _runner_up(spreading: Spreading[OfRun]) -> str:
    prediction = spreading.prediction
    fits = FITS[prediction.verdict]
    if prediction.exceeds_host:
        fits += " in host memory"
    size = format_bytes(prediction.memory.device_used_bytes)
    speed = ""
    if prediction.time.is_known:
        speed = f", {format_count(prediction.time.tokens_per_s)} tokens/s"
    return f"{ON_CHOICE[1]}{_in_words(spreading.config)}: {size} on a GPU{speed}, {fits}"


def _in_words(config: ParallelConfig) -> str:
    words = [config.strategy]
    for name, value in config.options:
        text = "+".join(value) if isinstance(value, tuple) else str(value).lower()
        words.append(f"{name} {text}")
    return ", ".join(words)
