"""One run over unequal cards: all ranks hold the same, and wait for the slowest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.parallel import get_strategy
from whichlora.predict.coefficients import Calibration
from whichlora.predict.defaults import with_precision
from whichlora.predict.parallel_choice import best_spread
from whichlora.predict.rank_time import links_of
from whichlora.serving import get_engine, list_engines
from whichlora.serving.base import Engine
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import AUTO, AUTO_INTERCONNECT, ParallelConfig
from whichlora.spec.results import Prediction, RankPrediction
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes, format_seconds

_SEVERITY = ("fits", "undecided", "fails")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Equal cards of a run.

    Args:
        ranks: that sit on them.
    """

    gpu: GpuSpec
    calibration: Calibration
    ranks: tuple[int, ...]


def over_cards(run: RunConfig, name: str, cards: Sequence[Card]) -> RunConfig:
    """`run` over all of `cards`, in a precision that each of them has.

    Args:
        name: of the cards together, as messages show it.

    Raises:
        ConfigError: it asks for another number of GPUs, or trains nothing.
    """
    count = sum(len(card.ranks) for card in cards)
    engine = get_engine(run.serving)
    if run.phase == "inference":
        is_staged = engine.num_stages(run) == count or not engine.shared_by
        if engine.takes_unequal and is_staged:
            return _served_by_all(run, name, engine, count)
        smallest = _smallest(cards).key
        engines = [engine.name for engine in list_engines().values() if engine.shared_by]
        raise ConfigError(
            f"gpu: {name}: {' and '.join(engines)} give every GPU as much, so that the smallest "
            f"decides; give --gpu {count}x{smallest}, or one card{_or_stages(engine, count)}"
        )
    config = run.parallel
    if config.is_one_device:
        config = ParallelConfig(strategy=AUTO, gpus=count)
    if config.gpus != count:
        raise ConfigError(f"gpus: {name} are {count} cards, got {config.gpus}; leave gpus out")
    least = next((card for card in cards if not card.gpu.has_bf16), cards[0])
    return with_precision(replace(run, parallel=config), least.gpu)


def _or_stages(engine: Engine, count: int) -> str:
    if not engine.takes_unequal:
        return ""
    return f", or a stage for each: --serving-option {engine.staged_by}={count}"


def _served_by_all(run: RunConfig, name: str, engine: Engine, count: int) -> RunConfig:
    options = dict(run.serving_options)
    if options.setdefault(engine.staged_by, count) != count:
        raise ConfigError(
            f"gpu: {name} are {count} cards, and {engine.staged_by} is "
            f"{options[engine.staged_by]}; leave it out"
        )
    return replace(run, serving_options=tuple(sorted(options.items())))


def serve_on_cards(
    run: RunConfig,
    name: str,
    cards: Sequence[Card],
    predicted: Callable[[RunConfig, Card], Prediction],
) -> Prediction:
    """`run` of an engine that gives each of `cards` a part, as the fullest of them has it."""
    everyone = tuple(card.gpu for card in cards for _ in card.ranks)
    first = cards[0]
    on_all = replace(first, gpu=replace(first.gpu, key=name, beside=everyone))
    return replace(predicted(run, on_all), gpu=name)


def predict_on_cards(
    run: RunConfig,
    name: str,
    cards: Sequence[Card],
    predicted: Callable[[RunConfig, Card], Prediction],
) -> Prediction:
    """`run`, which all of `cards` share, as the fullest and the slowest of them have it.

    Args:
        predicted: of a run on as many cards of one kind.

    Raises:
        ConfigError: a strategy whose ranks differ, or what one of the cards refuses.
    """
    if run.parallel.strategy == AUTO:
        return best_spread(run, lambda each: predict_on_cards(each, name, cards, predicted))
    _check_alike(run.parallel, cards)
    on_cards = [
        max(
            (
                predicted(replace(run, parallel=replace(run.parallel, interconnect=links)), card)
                for links in _interconnects(run.parallel, cards)
            ),
            key=_step_s,
        )
        for card in cards
    ]
    return _together(run, name, cards, on_cards)


def _check_alike(config: ParallelConfig, cards: Sequence[Card]) -> None:
    for strategy in map(get_strategy, config.names):
        if strategy.divides != "data":
            raise ConfigError(
                f"parallel: {strategy.name} on unequal cards is not modelled; use ddp, fsdp or "
                f"zero1 to zero3, or --gpu {_smallest(cards).key} --gpus {config.gpus} for the "
                "smallest"
            )


def _smallest(cards: Sequence[Card]) -> GpuSpec:
    return min((card.gpu for card in cards), key=lambda gpu: gpu.memory_bytes)


def _interconnects(config: ParallelConfig, cards: Sequence[Card]) -> list[str]:
    """The links that each card's usual machine has, of which the slower ones join them."""
    if config.interconnect != AUTO_INTERCONNECT:
        return [config.interconnect]
    usual = [links_of(config, card.gpu, card.calibration.machines)[0] for card in cards]
    return list(dict.fromkeys(links.key if links else AUTO_INTERCONNECT for links in usual))


def _step_s(prediction: Prediction) -> float:
    return prediction.time.time_per_token_s if prediction.time.is_known else math.inf


def _together(
    run: RunConfig, name: str, cards: Sequence[Card], on_cards: Sequence[Prediction]
) -> Prediction:
    fullest = max(on_cards, key=lambda each: each.memory.interval_bytes[1] / each.usable_bytes)
    slowest = max(on_cards, key=_step_s)
    verdict = max((each.verdict for each in on_cards), key=_SEVERITY.index)
    basis = slowest.basis
    if len({each.basis for each in on_cards}) > 1:
        basis = "; ".join(f"{each.gpu}: {each.basis}" for each in on_cards)
    config = replace(slowest.run.parallel, interconnect=run.parallel.interconnect)
    several = fullest.several_gpus
    if several is not None and slowest.several_gpus is not None:
        several = replace(
            several,
            ranks=tuple(map(_rank, cards, on_cards)),
            communication=slowest.several_gpus.communication,
        )
    return replace(
        fullest,
        run=replace(slowest.run, parallel=config),
        gpu=name,
        time=slowest.time,
        verdict=verdict,
        fits=verdict == "fits",
        basis=basis,
        notes=(
            f"all ranks hold as much: {fullest.gpu} is the fullest; they wait for {slowest.gpu}",
            *map(_card_note, on_cards),
            *dict.fromkeys(note for each in on_cards for note in each.notes),
        ),
        several_gpus=several,
    )


def _rank(card: Card, prediction: Prediction) -> RankPrediction:
    assert prediction.several_gpus is not None
    (rank,) = prediction.several_gpus.ranks
    return replace(rank, name=card.gpu.key, ranks=card.ranks)


def _card_note(prediction: Prediction) -> str:
    used = format_bytes(prediction.memory.device_used_bytes)
    text = f"{prediction.gpu}: {used} of {format_bytes(prediction.usable_bytes)}"
    if prediction.time.step_s is not None and prediction.time.is_known:
        text += f", {format_seconds(prediction.time.step_s)} a step if all cards were like it"
    return text
