"""One run on some cards, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from whichlora.memory.reserved import early_replays
from whichlora.page.asked import HEADLINES, UNKNOWN, Asked, Part, document, link
from whichlora.page.form import command
from whichlora.predict.cost_words import of_training, per_hour, per_million, price_lines
from whichlora.predict.words import VERDICTS, amount_in_words, describe
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.results import Answers, Prediction
from whichlora.units import format_bytes, format_count, format_seconds


def compared_parts(asked: Asked, gpus: Sequence[str]) -> Iterator[Part]:
    """The table at once, again if whole replays say otherwise, and with the largest batches."""
    with early_replays():
        answers = asked.predicted(gpus)
    waiting = ["…"] * len(answers)
    first = _part(asked, answers, waiting)
    yield first
    answers = asked.predicted(gpus)
    whole = _part(asked, answers, waiting)
    if whole != first:
        yield whole
    is_one_type = not any("+" in gpu for gpu in gpus)
    if answers[0].run.phase == "finetune" and is_one_type:
        largest = asked.predicted(gpus, maximise="batch_size")
        fits = {_cards_of(each): each.verdict == "fits" for each in largest}
        most = {_cards_of(each): str(each.run.batch_size) for each in largest}
        names = [_cards_of(answer) for answer in answers]
        sizes = [most[name] if fits.get(name) else UNKNOWN for name in names]
        yield _part(asked, answers, sizes)


def _part(asked: Asked, answers: Answers[Prediction], largest: Sequence[str]) -> Part:
    is_training, whole = answers[0].run.phase == "finetune", asked.data is not None
    costs = ("The training takes", "It costs") if whole else ("Per million tokens",)
    verdicts = {answer.verdict for answer in answers}
    data = (answers[0].training,) if answers[0].training is not None else ()
    return {
        "part": "compare",
        "verdict": next(verdict for verdict in HEADLINES if verdict in verdicts),
        "headline": _best(answers),
        "title": describe(replace(answers[0].run, parallel=ONE_GPU)),
        "about": "".join(map(amount_in_words, data)),
        "columns": [
            *("Cards", "Strategy", "Each needs", "Each has", "Fits", "Largest batch"),
            "Time per step" if is_training else "Time per token",
            *("Tokens per second", "Per hour", *costs),
        ],
        "rows": [_row(asked, *pair) for pair in zip(answers, largest, strict=True)],
        "notes": _notes(answers),
        "commands": [command(asked.question)],
        "document": document(answers),
    }


def _row(asked: Asked, answer: Prediction, largest: str) -> Part:
    time, parallel, total = answer.time, answer.run.parallel, answer.training
    costs = [per_million(answer)]
    if asked.data is not None:
        took = UNKNOWN if total is None else format_seconds(total.total_s)
        costs = [took, of_training(answer)]
    return {
        "name": _cards_of(answer),
        "verdict": answer.verdict,
        "cells": [
            UNKNOWN if parallel.is_one_device else parallel.in_words,
            format_bytes(answer.memory.device_used_bytes),
            format_bytes(answer.usable_bytes),
            VERDICTS[answer.verdict],
            largest,
            format_seconds(time.step_s or time.time_per_token_s),
            format_count(time.tokens_per_s),
            per_hour(answer),
            *costs,
        ],
        "question": link({**asked.question, "gpu": answer.gpu, "gpus": str(parallel.gpus)}),
    }


def _cards_of(answer: Prediction) -> str:
    count = answer.run.parallel.gpus
    return answer.gpu if count == 1 or "+" in answer.gpu else f"{count} x {answer.gpu}"


def _best(answers: Sequence[Prediction]) -> str:
    """Which cards are fastest and which cheapest, of those that fit."""
    fitting = [answer for answer in answers if answer.verdict == "fits"]
    if not fitting:
        return "None of them surely fits"
    words = []
    if timed := [answer for answer in fitting if answer.time.is_known]:
        fastest = max(timed, key=lambda answer: answer.time.tokens_per_s)
        words.append(f"fastest: {_cards_of(fastest)}")
    costs = {
        _cards_of(answer): money
        for answer in timed
        if answer.cost and (money := answer.cost.money(answer.cost.s_per_million)) is not None
    }
    if costs:
        words.append(f"cheapest: {min(costs, key=lambda name: costs[name])}")
    return ", ".join([f"{len(fitting)} of {len(answers)} fit", *words])


def _notes(answers: Answers[Prediction]) -> list[str]:
    """Prices, what is refused, notes and bases, each once."""
    refused = [f"{each.gpu or each.model}: {each.reason}" for each in answers.refused]
    notes = dict.fromkeys(note for answer in answers for note in answer.notes)
    bases = dict.fromkeys(f"basis: {answer.basis}" for answer in answers)
    return [*price_lines(answers), *refused, *notes, *bases]
