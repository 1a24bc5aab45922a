"""Predictions as a table, one of them as a breakdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whichlora.predict.cost_words import cost_of, of_training, per_million, price_lines
from whichlora.predict.words import VERDICTS, amount_in_words, headline
from whichlora.spec.results import MemoryPrediction, Prediction, Refused
from whichlora.terminal.assumed import assumed_lines, ways_out_lines
from whichlora.terminal.serving import (
    command_lines,
    print_served,
    rate_line,
    served_sheet,
    waits_lines,
    waits_sheet,
)
from whichlora.terminal.several_gpus import count_lines, print_spread
from whichlora.terminal.sheet import Document, Sheet, show
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import refusals, shared_notes, variants
from whichlora.trainers import get_trainer
from whichlora.units import counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console


def print_predictions(predictions: Sequence[Prediction], refused: Sequence[Refused] = ()) -> None:
    """A table of all predictions; the byte breakdown as well when there is only one."""
    console = open_console()
    served = [prediction for prediction in predictions if prediction.serving is not None]
    if served:
        print_served(console, served)
    if generated := [prediction for prediction in predictions if prediction.serving is None]:
        _print_table(console, generated)
    for text in (*assumed_lines(predictions), *ways_out_lines(predictions)):
        say(console, text)
    if len(predictions) == 1:
        _print_breakdown(console, predictions[0])
        print_spread(console, predictions[0])
    for text in _closing(predictions, refused):
        say(console, text)


def predictions_document(
    predictions: Sequence[Prediction], refused: Sequence[Refused] = ()
) -> Document:
    """The same for Markdown and for a notebook."""
    served = [prediction for prediction in predictions if prediction.serving is not None]
    generated = [prediction for prediction in predictions if prediction.serving is None]
    sheets = [*([served_sheet(served)] if served else ())]
    sheets += [*([_sheet(generated)] if generated else ())]
    if len(predictions) != 1:
        title = f"{len(predictions)} predictions"
        told = [*assumed_lines(predictions), *ways_out_lines(predictions)]
        return Document(title=title, sheets=sheets, lines=[*told, *_closing(predictions, refused)])
    (prediction,) = predictions
    serving = prediction.serving
    if serving is not None and serving.time is not None:
        sheets.append(waits_sheet(serving.time))
    sheets.append(_parts_sheet(prediction))
    if generated:
        sheets.append(_counters_sheet(prediction.memory))
    lines = [
        *_served_lines(prediction),
        *assumed_lines(predictions),
        *ways_out_lines(predictions),
        _size_and_interval(prediction),
        *_closing(predictions, refused),
    ]
    return Document(title=headline(prediction), sheets=sheets, lines=lines)


def _served_lines(prediction: Prediction) -> Iterator[str]:
    """What stands below the table of one engine: why it does not start, or how it is started."""
    serving = prediction.serving
    if serving is None:
        return
    if refusal := serving.refusal("it"):
        yield refusal
    if serving.time is not None:
        yield rate_line(serving.time)
    for i, line in enumerate(command_lines(prediction)):
        yield line.strip() if i else f"start it with: {line}"


def _closing(predictions: Sequence[Prediction], refused: Sequence[Refused]) -> Iterator[str]:
    """What is said below the tables."""
    yield from waits_lines(predictions)
    yield from count_lines(predictions)
    yield from refusals(refused)
    yield from _trainings(predictions)
    yield from _costs(predictions)
    for text in dict.fromkeys(prediction.basis for prediction in predictions):
        yield f"basis: {text}"
    for text in shared_notes(predictions):
        yield f"note: {text}"


def _trainings(predictions: Sequence[Prediction]) -> Iterator[str]:
    """The data, and how long the training of a single run takes over all of it."""
    totals = [each.training for each in predictions if each.training is not None]
    yield from dict.fromkeys(f"data: {amount_in_words(total)}" for total in totals)
    if len(predictions) == 1 and totals and not math.isnan(totals[0].total_s):
        low, high = map(format_seconds, totals[0].interval_s)
        took = format_seconds(totals[0].total_s)
        yield (
            f"the training: {took}, 90 % between {low} and {high}; "
            + counted(totals[0].num_steps, "step")
        )


def _costs(predictions: Sequence[Prediction]) -> list[str]:
    """What a million tokens of one run cost; of several, the prices behind their column."""
    first = predictions[0]
    if len(predictions) > 1 or first.cost is None:
        return price_lines(predictions)
    if first.training is not None:
        return cost_of(first.cost, first.training.total_s, "the training")
    return cost_of(first.cost, first.cost.s_per_million, "1M tokens")


def _print_table(console: Console, predictions: Sequence[Prediction]) -> None:
    sheet = _sheet(predictions)
    print_table(
        console,
        sheet.columns,
        sheet.rows,
        right=sheet.right,
        lift=("device", "tokens", "model", "what", "batch"),
        # beside the time of all the data that of a step says least
        spare=(
            *("1M tokens", "tokens/s", "of the device", "95 % interval"),
            *(("time",) if "training" in sheet.columns else ()),
        ),
    )


def _sheet(predictions: Sequence[Prediction]) -> Sheet:
    """One row per prediction."""
    several = len(predictions) > 1  # the cost of one has a line of its own
    whole = any(prediction.training is not None for prediction in predictions)
    costs: tuple[str, ...] = ("1M tokens",) if several else ()
    if whole:
        costs = ("training", "cost") if several else ("training",)
    of_time = ("time", "tokens/s", *costs)
    numbers = ("batch", "tokens", "peak", "95 % interval", "of the device", *of_time)
    rows = []
    names = variants([p.run for p in predictions], [p.gpu for p in predictions])
    spread = any(not prediction.run.parallel.is_one_device for prediction in predictions)
    for prediction, name in zip(predictions, names, strict=True):
        memory, time = prediction.memory, prediction.time
        low, high = memory.interval_bytes
        run = prediction.run
        if run.phase == "finetune":
            seconds = f"{format_seconds(time.step_s or 0)} /step" if time.is_known else "-"
        else:
            seconds = f"{format_seconds(time.time_per_token_s)} /token" if time.is_known else "-"
        rows.append(
            (
                run.model,
                name,
                *((str(run.parallel.gpus), run.parallel.in_words) if spread else ()),
                str(run.batch_size),
                run.lengths,
                format_bytes(memory.device_used_bytes),
                f"{format_bytes(low)} - {format_bytes(high)}",
                f"{memory.device_used_bytes / prediction.usable_bytes:.0%}",
                seconds,
                format_count(time.tokens_per_s),
                *(_training(prediction)[: len(costs)] if whole else ()),
                *((per_million(prediction),) if several and not whole else ()),
                VERDICTS[prediction.verdict],
                prediction.gpu,
            )
        )
    return Sheet(
        title="",
        columns=(
            *("model", "what", *(("GPUs", "strategy") if spread else ())),
            *(*numbers, "fits", "device"),
        ),
        right=("GPUs", *numbers),
        rows=rows,
    )


def _training(prediction: Prediction) -> tuple[str, str]:
    """Time and cost of all the data."""
    total = prediction.training
    return "-" if total is None else format_seconds(total.total_s), of_training(prediction)


def _counters_sheet(memory: MemoryPrediction) -> Sheet:
    """The three numbers that a framework and a driver count, each with its interval."""
    confidence = f"{memory.confidence:.0%}".replace("%", " %")
    rows = [
        (name, format_bytes(peak), f"{format_bytes(low)} - {format_bytes(high)}")
        for name, peak, (low, high) in (
            (
                "allocated: live tensors",
                memory.peak_allocated_bytes,
                memory.allocated_interval_bytes,
            ),
            (
                "reserved by the allocator",
                memory.peak_reserved_bytes,
                memory.reserved_interval_bytes,
            ),
            ("used on the device", memory.device_used_bytes, memory.interval_bytes),
        )
    ]
    columns = ("counter", "peak", f"{confidence} interval")
    return Sheet(title="", columns=columns, right=("peak",), rows=rows)


def _say_generation(console: Console, prediction: Prediction) -> None:
    """Prompt pass and decoding, of a generation or of the answers that a step learns from."""
    time, run = prediction.time, prediction.run
    if time.prefill_s is None or not time.decode_s_per_token:
        return
    rollout = get_trainer(run.trainer).rollout(run) if run.phase == "finetune" else None
    passes = (
        f"prompt pass {format_seconds(time.prefill_s)}, then "
        f"{format_seconds(time.decode_s_per_token)} until every sequence has its next token"
    )
    if rollout is None:
        say(console, f"{passes}; the time per token is of all sequences together")
        return
    written_s = time.prefill_s + (rollout.new_tokens - 1) * time.decode_s_per_token
    say(
        console,
        f"answers take {format_seconds(written_s / rollout.steps)} of a step: {rollout.batch_size} "
        f"at once; {passes}",
    )


def _print_breakdown(console: Console, prediction: Prediction) -> None:
    show(console, _parts_sheet(prediction))
    if prediction.serving is not None:
        return
    show(console, _counters_sheet(prediction.memory))
    if prediction.time.is_known and prediction.time.prefill_s is not None:
        _say_generation(console, prediction)
    say(console, _size_and_interval(prediction))


def _parts_sheet(prediction: Prediction) -> Sheet:
    """Bytes by part at the peak."""
    total = prediction.memory.device_used_bytes
    rows = [
        (part, format_bytes(size), f"{size / total:.1%}")
        for part, size in prediction.memory.breakdown.items()
        if size
    ]
    rows.append(("device memory used", format_bytes(total), "100.0%"))
    columns = (f"at {prediction.memory.moment.replace('_', ' ')}", "bytes", "share")
    return Sheet(title="", columns=columns, right=("bytes", "share"), rows=rows)


def _size_and_interval(prediction: Prediction) -> str:
    """The interval of the time, where one is known, and how many parameters there are."""
    parameters = f"parameters: {format_count(prediction.num_params)}"
    if trained := prediction.num_trainable_params:
        share = f"{trained / prediction.num_params:.2%}"
        parameters += f", trained: {format_count(trained)} ({share})"
    if prediction.serving is not None or not prediction.time.is_known:
        return parameters
    low, high = map(format_seconds, prediction.time.interval_s)
    unit = "step" if prediction.run.phase == "finetune" else "token"
    return f"time per {unit}: 90 % between {low} and {high}; {parameters}"
