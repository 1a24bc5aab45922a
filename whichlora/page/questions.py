"""What the page says to a question, one part after the other, the quickest first.

Text is made here alone: the script of the page lays it out, and computes nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from whichlora.config import DEFAULT_MODELS
from whichlora.errors import ConfigError, WhichLoraError
from whichlora.page.form import Question, card, command, settings, stated
from whichlora.predict.largest import Placement, smallest_first
from whichlora.predict.words import VERDICTS, describe, kind
from whichlora.spec.results import SCHEMA_VERSION, Prediction
from whichlora.spec.run import TRANSFORMERS, RunConfig
from whichlora.store.gpus import find_target, list_gpus
from whichlora.store.models import list_models
from whichlora.units import format_bytes, format_count, format_seconds
from whichlora.workflow import combinations, estimates

Part = dict[str, Any]  # of an answer, as JSON; "part" says which

METHODS = ("lora", "qlora")  # asked of every model, where the question names none
_HEADLINES = {"fits": "Fits", "undecided": "May fit", "fails": "Does not fit"}
_MILLION = 10**6
_CARDS_AT_ONCE = 6  # placements in a part: a later question waits for no more


def answer(text: str) -> Iterator[str]:
    """The parts of the answer to the question in `text`, both as JSON.

    With a model: "run", then "largest", then "cards" until all are judged. Without one "models",
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
        WhichLoraError: an unknown name, or settings that exclude each other.
    """
    gpu = card(question)
    if not question.get("model", "").strip():
        yield from _models(question, gpu)
        return
    yield _run(question, gpu)
    yield _largest(question, gpu)
    yield from _cards(question)


def _runs(question: Question) -> Iterator[RunConfig | Any]:
    return combinations.combinations(combinations.with_cards(settings(question), [card(question)]))


def _predicted(question: Question, gpu: str, **options: Any) -> Prediction:
    """The prediction of the only run that `question` means.

    Raises:
        WhichLoraError: there is none.
    """
    return estimates.estimate(_runs(question), [gpu], **options)[0]


# --- one run


def _run(question: Question, gpu: str) -> Part:
    """Verdict, bytes and time."""
    answers = estimates.estimate(_runs(question), [gpu])
    prediction = answers[0]
    memory = prediction.memory
    full = max(memory.interval_bytes[1], prediction.usable_bytes)
    return {
        "part": "run",
        "title": f"{describe(prediction.run)}",
        "gpu": prediction.gpu,
        "verdict": prediction.verdict,
        "headline": _HEADLINES[prediction.verdict],
        "bytes": [
            {
                "name": name.replace("_", " "),
                "kind": name,
                "size": format_bytes(size),
                "num_bytes": size,
                "share": f"{size / memory.device_used_bytes:.1%}",
                "width": size / full,
            }
            for name, size in memory.breakdown.items()
            if size
        ],
        "need": format_bytes(memory.device_used_bytes),
        "interval": _between(memory.interval_bytes, format_bytes),
        "usable": format_bytes(prediction.usable_bytes),
        "limit": prediction.usable_bytes / full,
        "bounds": [bound / full for bound in memory.interval_bytes],
        "moment": memory.moment.replace("_", " "),
        "facts": _facts(prediction),
        "reason": prediction.serving.reason if prediction.serving is not None else "",
        "notes": list(prediction.notes),
        "basis": prediction.basis,
        "commands": [command(question), command(question, "where")],
        "document": json.dumps(
            {"schema_version": SCHEMA_VERSION} | estimates.document(answers), indent=1
        ),
    }


def _facts(prediction: Prediction) -> list[tuple[str, str, str]]:
    """Name, value and bounds of what is said beside the memory."""
    memory, time = prediction.memory, prediction.time
    rows: list[tuple[str, str, str]] = []
    if prediction.serving is not None:
        waits = prediction.serving.time
        rows.append(("KV pool", f"{prediction.serving.kv_pool_tokens:,} tokens", ""))
        if waits is not None:
            first, further = map(format_seconds, (waits.ttft_s, waits.tpot_s))
            rows.append(("First token", first, _between(waits.interval_ttft_s)))
            rows.append(("Each further token", further, _between(waits.interval_tpot_s)))
            rows.append(("Tokens per second", format_count(waits.output_tokens_per_s), ""))
    elif time.is_known:
        name, seconds = "Time per token", time.time_per_token_s
        if time.step_s is not None:
            name, seconds = "Time per step", time.step_s
            per_million = format_seconds(_MILLION / time.tokens_per_s)
            rows.append(("A million tokens take", per_million, ""))
        rows.insert(0, (name, format_seconds(seconds), _between(time.interval_s)))
        rows.insert(1, ("Tokens per second", format_count(time.tokens_per_s), ""))
    need = format_bytes(memory.device_used_bytes)
    rows.insert(0, ("Memory", need, _between(memory.interval_bytes, format_bytes)))
    trained = prediction.num_trainable_params
    if trained:
        share = f"{trained / prediction.num_params:.2%} of {format_count(prediction.num_params)}"
        rows.append(("Trained parameters", format_count(trained), share))
    else:
        rows.append(("Parameters", format_count(prediction.num_params), ""))
    return rows


def _between(interval: tuple[float, float], show: Callable[[float], str] = format_seconds) -> str:
    low, high = map(show, interval)
    return f"{low} to {high}"


def _largest(question: Question, gpu: str) -> Part:
    """The largest batch, and what qualifies the number."""
    try:
        largest = _predicted(question, gpu, maximise="batch_size")
    except ConfigError as error:
        return {"part": "largest", "name": "Largest batch", "value": "–", "note": str(error)}
    size = largest.run.batch_size if largest.verdict == "fits" else 0
    served = largest.run.phase == "inference" and largest.run.serving != TRANSFORMERS
    name = "Most sequences at once" if served else "Largest batch"
    return {
        "part": "largest",
        "name": name,
        "value": str(size),
        "note": largest.notes[0].rpartition(": ")[2],
    }


# --- every card


def _cards(question: Question) -> Iterator[Part]:
    """The table of cards, again and again until all are in it."""
    (run,) = combinations.only_runs(_runs(question))
    catalog = list_gpus()
    placed: list[Placement] = []
    for number, gpu in enumerate(catalog, 1):
        with contextlib.suppress(ConfigError):  # this card can't run it
            placed += estimates.where(run, [gpu.key])
        if number % _CARDS_AT_ONCE == 0 or number == len(catalog):
            rows = [_card_row(placement, question) for placement in smallest_first(placed)]
            yield {
                "part": "cards",
                "columns": ["Card", "Memory", "Needs", "Fits", *_columns(run)],
                "rows": rows,
                "done": number,
                "of": len(catalog),
            }


def _columns(run: RunConfig) -> tuple[str, str]:
    """What is the most that fits a card, and which time."""
    if run.phase == "finetune":
        return "Largest batch", "Time per step"
    if run.serving != TRANSFORMERS:
        return "Most at once", "Each further token"
    return "Largest batch", "Time per token"


def _card_row(placement: Placement, question: Question) -> Part:
    prediction = placement.prediction
    assert prediction is not None  # a refused card is in no row
    waits: tuple[float, ...] = (prediction.time.step_s or prediction.time.time_per_token_s,)
    if prediction.serving is not None:
        engine = prediction.serving.time
        waits = (float("nan"),) if engine is None else (engine.tpot_s,)
    return {
        "gpu": placement.gpu.key,
        "verdict": prediction.verdict,
        "cells": [
            format_bytes(placement.gpu.memory_bytes),
            format_bytes(prediction.memory.device_used_bytes),
            VERDICTS[prediction.verdict],
            str(placement.batch_size) if placement.batch_size else "–",
            *map(format_seconds, waits),
        ],
        "question": _link({**question, "gpu": placement.gpu.key}),
    }


# --- every model


def _models(question: Question, gpu: str) -> Iterator[Part]:
    """The models of a plan that names none, the largest first, each in 16 bit if that fits."""
    sizes = {record.hub_id: record.params for record in list_models()}
    models = sorted(DEFAULT_MODELS, key=lambda name: -sizes[name])
    rows: dict[str, list[Part]] = {verdict: [] for verdict in _HEADLINES}
    spec, title = find_target(gpu), ""
    for number, model in enumerate(models, 1):
        asked = {**question, "model": model}
        best = _best_method(asked, gpu)
        if best is not None:
            asked["method"] = best.run.method
            rows[best.verdict].append(_model_row(best, asked))
            if best.verdict == "fits" and not title:
                title = describe(best.run)
        yield {
            "part": "models",
            "columns": ["Model", "Parameters", "Method", "Needs", "Fits", "A million tokens take"],
            "gpu": spec.key,
            "usable": format_bytes(spec.memory_bytes),
            "title": title,
            "rows": [row for verdict in _HEADLINES for row in rows[verdict]],
            "notes": list(spec.notes),
            "commands": [_recommend(question)],
            "done": number,
            "of": len(models),
        }


def _best_method(question: Question, gpu: str) -> Prediction | None:
    """The first method that fits, else the one that takes least; None where all are refused."""
    best: Prediction | None = None
    methods = (question["method"],) if question.get("method") else METHODS
    for method in methods:
        try:
            prediction = _predicted({**question, "method": method}, gpu)
        except ConfigError:
            continue
        if prediction.verdict == "fits":
            return prediction
        if best is None or prediction.memory.interval_bytes < best.memory.interval_bytes:
            best = prediction
    return best


def _model_row(prediction: Prediction, question: Mapping[str, str]) -> Part:
    time = prediction.time
    known = time.is_known and time.step_s is not None
    return {
        "model": prediction.run.model,
        "verdict": prediction.verdict,
        "cells": [
            format_count(prediction.num_params),
            kind(prediction.run),
            format_bytes(prediction.memory.device_used_bytes),
            VERDICTS[prediction.verdict],
            format_seconds(_MILLION / time.tokens_per_s) if known else "–",
        ],
        "question": _link(question),
    }


def _recommend(question: Question) -> str:
    """The command that asks more of the same: serving, limits of time, a plan to run."""
    asked = {name: text for name, text in question.items() if name in ("gpu", "gpus", "seq_len")}
    return command(asked, "recommend")


def _link(question: Mapping[str, str]) -> dict[str, str]:
    return {field.name: text for field, text in stated(question).items()}
