"""One run on one card: the byte bar, time, cost, the largest batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from whichlora.errors import ConfigError
from whichlora.page.asked import HEADLINES, UNKNOWN, Asked, Part, document
from whichlora.page.form import command
from whichlora.predict.cost_words import between, format_money, price_in_words, spot_in_words
from whichlora.predict.words import amount_in_words, describe
from whichlora.spec.results import Answers, Prediction
from whichlora.units import counted, format_bytes, format_count, format_seconds

_MILLION = 10**6

Fact = tuple[str, str, str]  # name, value and what qualifies it


def run_part(asked: Asked, answers: Answers[Prediction]) -> Part:
    """Verdict, bytes, time and cost of the first of `answers`."""
    prediction = answers[0]
    memory = prediction.memory
    full = max(memory.interval_bytes[1], prediction.usable_bytes)
    of_cards = asked.at_length(prediction.run.seq_len).question
    return {
        "part": "run",
        "title": f"{describe(prediction.run)}",
        "gpu": prediction.gpu,
        "verdict": prediction.verdict,
        "headline": HEADLINES[prediction.verdict],
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
        "interval": _interval(memory.interval_bytes, format_bytes),
        "usable": format_bytes(prediction.usable_bytes),
        "limit": prediction.usable_bytes / full,
        "bounds": [bound / full for bound in memory.interval_bytes],
        "moment": memory.moment.replace("_", " "),
        "facts": list(_facts(prediction)),
        "reason": prediction.serving.reason if prediction.serving is not None else "",
        "notes": list(prediction.notes),
        "basis": prediction.basis,
        "commands": [command(asked.question), command(of_cards, "where")],
        "document": document(answers),
    }


def _facts(prediction: Prediction) -> Iterator[Fact]:
    """What is said beside the bar."""
    memory = prediction.memory
    need = format_bytes(memory.device_used_bytes)
    yield "Memory", need, _interval(memory.interval_bytes, format_bytes)
    most = prediction.evaluation
    if most is not None:
        need = format_bytes(most.device_used_bytes)
        yield "Memory of evaluations", need, _interval(most.interval_bytes, format_bytes)
    yield from _times(prediction)
    yield from _whole(prediction)
    yield from _costs(prediction)
    trained = prediction.num_trainable_params
    if trained:
        share = f"{trained / prediction.num_params:.2%} of {format_count(prediction.num_params)}"
        yield "Trained parameters", format_count(trained), share
    else:
        yield "Parameters", format_count(prediction.num_params), ""


def _times(prediction: Prediction) -> Iterator[Fact]:
    time = prediction.time
    if prediction.serving is not None:
        waits = prediction.serving.time
        yield "KV pool", f"{prediction.serving.kv_pool_tokens:,} tokens", ""
        if waits is not None:
            first, further = map(format_seconds, (waits.ttft_s, waits.tpot_s))
            yield "First token", first, _interval(waits.interval_ttft_s)
            yield "Each further token", further, _interval(waits.interval_tpot_s)
            yield "Tokens per second", format_count(waits.output_tokens_per_s), ""
    elif time.is_known:
        is_step = time.step_s is not None
        name = "Time per step" if is_step else "Time per token"
        yield name, format_seconds(time.step_s or time.time_per_token_s), _interval(time.interval_s)
        yield "Tokens per second", format_count(time.tokens_per_s), ""
        if is_step and prediction.training is None:
            yield "A million tokens take", format_seconds(_MILLION / time.tokens_per_s), ""


def _whole(prediction: Prediction) -> Iterator[Fact]:
    """The data, and the time that all of it takes."""
    total = prediction.training
    if total is None:
        return
    rows, _, more = amount_in_words(total).partition(", ")
    yield "Data", rows, more
    steps = counted(total.num_steps, "step")
    if not math.isnan(total.total_s):
        steps = f"{_interval(total.interval_s)}; {steps}"
    yield "The whole training", format_seconds(total.total_s), steps


def _costs(prediction: Prediction) -> Iterator[Fact]:
    """Money and electricity of all the data, or of a million tokens."""
    total, cost = prediction.training, prediction.cost
    if cost is None:
        return
    seconds = cost.s_per_million if total is None else total.total_s
    what = "A million tokens" if total is None else "The training"
    money, price = UNKNOWN, "no price of this card is known"
    if cost.offer is not None:
        money = format_money(cost.money(seconds), cost.offer.currency)
        price = f"at {price_in_words(cost.offer, cost.num_gpus)}{spot_in_words(cost)}"
    yield f"{what} cost{'s' if total is not None else ''}", money, price
    kwh = cost.kwh(seconds)
    if kwh is not None:
        yield "Electricity of that", f"{between(kwh)} kWh", "of the boards alone"


def _interval(bounds: tuple[float, float], show: Callable[[float], str] = format_seconds) -> str:
    low, high = map(show, bounds)
    return f"{low} to {high}"


def largest_part(asked: Asked, gpu: str) -> Part:
    """The largest batch, and what qualifies the number."""
    try:
        largest = asked.predicted([gpu], maximise="batch_size")[0]
    except ConfigError as error:
        return {"part": "largest", "name": "Largest batch", "value": UNKNOWN, "note": str(error)}
    size = largest.run.batch_size if largest.verdict == "fits" else 0
    served = largest.run.phase == "inference" and largest.run.has_engine
    note = next(note for note in largest.notes if note not in asked.files.notes)
    return {
        "part": "largest",
        "name": "Most sequences at once" if served else "Largest batch",
        "value": str(size),
        "note": note.rpartition(": ")[2],
    }
