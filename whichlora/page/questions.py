"""What the page says to a question, one part after the other, the quickest first.

Text is made in this package alone: the script of the page lays it out, and computes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from whichlora.config import DEFAULT_MODELS
from whichlora.errors import ConfigError, WhichLoraError
from whichlora.memory.reserved import early_replays
from whichlora.page.asked import HEADLINES, Asked, Part, link
from whichlora.page.compared import compared_parts
from whichlora.page.every_card import card_parts
from whichlora.page.form import DATA, Question, cards, command, data, with_number
from whichlora.page.one_run import largest_part, run_part
from whichlora.predict.cost_words import of_training, per_million
from whichlora.predict.words import VERDICTS, amount_in_words, describe, kind
from whichlora.spec.results import Prediction
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.store.models import list_models
from whichlora.trainers import RECIPE, suits_recipe
from whichlora.units import format_bytes, format_count, format_seconds
from whichlora.workflow import combinations
from whichlora.workflow.estimates import surely_fails

METHODS = ("lora", "qlora")  # asked of every model, where the question names none
_MILLION = 10**6
_ALL_ROWS = "every row is trained on here; `whichlora recommend` keeps 5 % for evaluation"


def answer(text: str) -> Iterator[str]:
    """The parts of the answer to the question in `text`, both as JSON.

    With a model, or a file that names one: "run", again if the whole replay of the allocator says
    otherwise than its beginning, then "largest", then "cards" until all are judged; of some cards
    "compare", as often; of any card "cards" alone. Without a model "models",
    the largest first. A fault is the last part, "refusal", with its message.
    """
    parts = parts_of({name: str(value) for name, value in json.loads(text).items()})
    try:
        for part in parts:
            yield json.dumps(part)
    except WhichLoraError as error:
        yield json.dumps({"part": "refusal", "text": str(error)})


def parts_of(question: Question) -> Iterator[Part]:
    """As `answer`.

    Raises:
        WhichLoraError: an unknown name, a fault of a file, or settings that exclude each other.
    """
    question = with_number(question)
    gpus = cards(question)
    if question.get("model", "").strip() or question.get("from"):
        asked = Asked.of(question)
        if len(gpus) > 1:
            yield from compared_parts(asked, gpus)
        elif gpus:
            yield from _one_run(asked, gpus[0])
        else:
            yield from card_parts(asked)
    elif len(gpus) == 1:
        yield from _models(question, gpus[0])
    elif gpus:
        raise ConfigError(f"model: name one, to compare it on {', '.join(gpus)}")
    else:
        raise ConfigError("gpu: name a card, such as 4090, or memory such as 24GB; or name a model")


def _one_run(asked: Asked, gpu: str) -> Iterator[Part]:
    with early_replays():
        answers = asked.predicted([gpu])
    first = run_part(asked, answers)
    yield first
    whole = run_part(asked, asked.predicted([gpu]))
    if whole != first:
        yield whole
    yield largest_part(asked, gpu)
    yield from card_parts(asked.at_length(answers[0].run.seq_len))


# --- every model


def _models(question: Question, gpu: str) -> Iterator[Part]:
    """The models of a plan that names none, the largest first, each in 16 bit if that fits."""
    sizes = {record.hub_id: record.params for record in list_models()}
    models = sorted(DEFAULT_MODELS, key=lambda name: -sizes[name])
    rows: dict[str, list[Part]] = {verdict: [] for verdict in HEADLINES}
    spec, title, about = find_target(gpu), "", ""
    estimated: list[str] = []
    times = ("A million tokens take", "They cost")
    if data(question) is not None:
        times = ("The training takes", "It costs")
    for number, model in enumerate(models, 1):
        asked = {**question, "model": model}
        tasks = [load_model(model).task]
        if _may_take_recipe(question) and suits_recipe(tasks, on_cpu=spec.is_cpu):
            asked["trainer"] = RECIPE
        try:
            best = _best_method(asked, gpu)
        except ConfigError:
            if number == len(models) and not any(rows.values()):
                raise
        else:
            asked["method"] = best.run.method
            rows[best.verdict].append(_model_row(best, asked))
            if best.verdict == "fits" and not title:
                title = describe(best.run)
            if best.training is not None:
                about = amount_in_words(best.training)
                estimated = [note for note in best.notes if note.startswith("lengths are")]
        yield {
            "part": "models",
            "columns": ["Model", "Parameters", "Method", "Needs", "Fits", *times],
            "gpu": spec.key,
            "usable": format_bytes(spec.memory_bytes),
            "title": title,
            "about": about,
            "rows": [row for verdict in HEADLINES for row in rows[verdict]],
            "notes": [*spec.notes, *estimated, *([_ALL_ROWS] if about else ())],
            "commands": [_recommend(question)],
            "done": number,
            "of": len(models),
        }


def _may_take_recipe(question: Question) -> bool:
    """Whether nobody says who trains, so that it is who `recommend` takes."""
    trains = question.get("phase", "finetune") == "finetune"
    return trains and not (question.get("trainer") or question.get("from"))


def _best_method(question: Question, gpu: str) -> Prediction:
    """The first method that fits, else the one that takes least.

    Raises:
        ConfigError: all are refused.
    """
    best: Prediction | None = None
    refusal = ConfigError("method: there is none")
    methods = (question["method"],) if question.get("method") else METHODS
    for method in methods:
        asked = Asked.of({**question, "method": method})
        try:
            (run,) = combinations.only_runs(combinations.combinations(asked.settings))
            is_last = method == methods[-1] and best is None
            is_training = run.phase == "finetune" and run.parallel.is_one_device
            # at one token: data may be shorter than the run
            if not is_last and is_training and surely_fails(replace(run, seq_len=1), gpu):
                continue
            prediction = asked.predicted([gpu])[0]
        except ConfigError as error:
            refusal = error
            continue
        if prediction.verdict == "fits":
            return prediction
        if best is None or prediction.memory.interval_bytes < best.memory.interval_bytes:
            best = prediction
    if best is None:
        raise refusal
    return best


def _model_row(prediction: Prediction, question: Question) -> Part:
    time, total = prediction.time, prediction.training
    known = time.is_known and time.step_s is not None
    seconds = _MILLION / time.tokens_per_s if known else math.nan
    costs = per_million(prediction)
    if total is not None:
        seconds, costs = total.total_s, of_training(prediction)
    return {
        "name": prediction.run.model,
        "verdict": prediction.verdict,
        "cells": [
            format_count(prediction.num_params),
            kind(prediction.run),
            format_bytes(prediction.memory.device_used_bytes),
            VERDICTS[prediction.verdict],
            format_seconds(seconds),
            costs,
        ],
        "question": link(question),
    }


def _recommend(question: Question) -> str:
    """The command that asks more of the same: serving, limits of time, a plan to run."""
    names = ("gpu", "gpus", "seq_len", *DATA)
    return command({name: text for name, text in question.items() if name in names}, "recommend")
