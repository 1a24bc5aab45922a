"""One run on every card of the catalog."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from whichlora.errors import ConfigError
from whichlora.page.asked import UNKNOWN, Asked, Part, link
from whichlora.page.form import cards, command
from whichlora.predict.cost_words import (
    cheapest_first,
    cheapest_hour,
    cheapest_of,
    cost_of,
    per_hour,
    per_million,
)
from whichlora.predict.largest import Placement, smallest_first
from whichlora.predict.words import VERDICTS, describe
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import list_gpus
from whichlora.units import format_bytes, format_seconds
from whichlora.workflow import combinations, estimates

_CARDS_AT_ONCE = 6  # placements in a part: a later question waits for no more


def card_parts(asked: Asked) -> Iterator[Part]:
    """The table of cards, again and again until all are in it.

    It is the answer itself where the question names no card.
    """
    (run,) = combinations.only_runs(combinations.combinations(asked.settings))
    catalog = list_gpus()
    placed: list[Placement] = []
    for number, gpu in enumerate(catalog, 1):
        with contextlib.suppress(ConfigError):  # this card can't run it
            placed += estimates.where(run, [gpu.key], notes=asked.files.notes)
        if number % _CARDS_AT_ONCE == 0 or number == len(catalog):
            order = [each for each in smallest_first(placed) if each.prediction is not None]
            cheap = [placement.gpu.key for placement in cheapest_first(order)]
            yield {
                "part": "cards",
                "columns": ["Card", "Memory", "Needs", "Fits", *_columns(run)],
                "rows": [_row(placement, asked) for placement in order],
                "cheapest_first": cheap,
                "cheapest": _cheapest(cheapest_of(order)),
                "cheapest_hour": cheapest_hour(order),
                "is_answer": not cards(asked.question),
                "title": describe(order[0].prediction.run) if order and order[0].prediction else "",
                "notes": [*asked.files.notes_of_step(run)],
                "commands": [command(asked.question, "where")],
                "done": number,
                "of": len(catalog),
            }


def _cheapest(best: Placement | None) -> list[str]:
    """The card on which a million tokens cost least, and how much; empty where none is known."""
    if best is None or best.prediction is None or best.prediction.cost is None:
        return []
    cost = best.prediction.cost
    return [best.gpu.key, cost_of(cost, cost.s_per_million, "a million tokens")[0]]


def _columns(run: RunConfig) -> tuple[str, ...]:
    """What is the most that fits a card, which time, and the costs."""
    costs = ("Per hour", "Per million tokens")
    if run.phase == "finetune":
        return "Largest batch", "Time per step", *costs
    if run.has_engine:
        return "Most at once", "Each further token", *costs
    return "Largest batch", "Time per token", *costs


def _row(placement: Placement, asked: Asked) -> Part:
    prediction = placement.prediction
    assert prediction is not None  # a refused card is in no row
    waits = prediction.time.step_s or prediction.time.time_per_token_s
    if prediction.serving is not None:
        engine = prediction.serving.time
        waits = float("nan") if engine is None else engine.tpot_s
    return {
        "name": placement.gpu.key,
        "verdict": prediction.verdict,
        "cells": [
            format_bytes(placement.gpu.memory_bytes),
            format_bytes(prediction.memory.device_used_bytes),
            VERDICTS[prediction.verdict],
            str(placement.batch_size) if placement.batch_size else UNKNOWN,
            format_seconds(waits),
            per_hour(prediction),
            per_million(prediction),
        ],
        "question": link({**asked.question, "gpu": placement.gpu.key}),
    }
