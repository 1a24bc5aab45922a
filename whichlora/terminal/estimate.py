"""Predictions as a table, one of them as a breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.predict.words import VERDICTS
from whichlora.spec.results import MemoryPrediction, Prediction, Refused
from whichlora.terminal.costs import cost_of, per_million, price_lines
from whichlora.terminal.serving import print_served
from whichlora.terminal.several_gpus import count_lines, print_spread
from whichlora.terminal.tables import new_table, open_console, print_table, say
from whichlora.terminal.words import refusals, shared_notes, variants
from whichlora.trainers import get_trainer
from whichlora.units import format_bytes, format_count, format_seconds

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
    if len(predictions) == 1:
        _print_breakdown(console, predictions[0])
        print_spread(console, predictions[0])
    for text in count_lines(predictions):
        say(console, text)
    for text in refusals(refused):
        say(console, text)
    for text in _costs(predictions):
        say(console, text)
    for text in dict.fromkeys(prediction.basis for prediction in predictions):
        say(console, f"basis: {text}")
    for text in shared_notes(predictions):
        say(console, f"note: {text}")


def _costs(predictions: Sequence[Prediction]) -> list[str]:
    """What a million tokens of one run cost; of several, the prices behind their column."""
    first = predictions[0]
    if len(predictions) > 1 or first.cost is None:
        return price_lines(predictions)
    return cost_of(first.cost, first.cost.s_per_million, "1M tokens")


def _print_table(console: Console, predictions: Sequence[Prediction]) -> None:
    several = len(predictions) > 1  # the cost of one has a line of its own
    of_time = ("time", "tokens/s", *(("1M tokens",) if several else ()))
    numbers = ("batch", "tokens", "peak", "95 % interval", "of the device", *of_time)
    rows = []
    names = variants([p.run for p in predictions], [p.gpu for p in predictions])
    spread = any(not prediction.run.parallel.is_one_device for prediction in predictions)
    for prediction, name in zip(predictions, names, strict=True):
        memory, time = prediction.memory, prediction.time
        low, high = memory.interval_bytes
        run = prediction.run
        if run.phase == "finetune":
            tokens = str(run.seq_len)
            seconds = f"{format_seconds(time.step_s or 0)} /step" if time.is_known else "-"
        else:
            tokens = f"{run.prompt_len}+{run.max_new_tokens}"
            seconds = f"{format_seconds(time.time_per_token_s)} /token" if time.is_known else "-"
        rows.append(
            (
                run.model,
                name,
                *((str(run.parallel.gpus), run.parallel.in_words) if spread else ()),
                str(run.batch_size),
                tokens,
                format_bytes(memory.device_used_bytes),
                f"{format_bytes(low)} - {format_bytes(high)}",
                f"{memory.device_used_bytes / prediction.usable_bytes:.0%}",
                seconds,
                format_count(time.tokens_per_s),
                *((per_million(prediction),) if several else ()),
                VERDICTS[prediction.verdict],
                prediction.gpu,
            )
        )
    print_table(
        console,
        ("model", "what", *(("GPUs", "strategy") if spread else ()), *numbers, "fits", "device"),
        rows,
        right=("GPUs", *numbers),
        lift=("device", "tokens", "model", "what"),
        spare=("1M tokens", "tokens/s", "of the device", "95 % interval"),
    )


def _print_counters(console: Console, memory: MemoryPrediction) -> None:
    """The three numbers that a framework and a driver count, each with its interval."""
    confidence = f"{memory.confidence:.0%}".replace("%", " %")
    table = new_table("counter", "peak", f"{confidence} interval", right=("peak",))
    for name, peak, (low, high) in (
        ("allocated: live tensors", memory.peak_allocated_bytes, memory.allocated_interval_bytes),
        ("reserved by the allocator", memory.peak_reserved_bytes, memory.reserved_interval_bytes),
        ("used on the device", memory.device_used_bytes, memory.interval_bytes),
    ):
        table.add_row(name, format_bytes(peak), f"{format_bytes(low)} - {format_bytes(high)}")
    console.print(table)


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
    table = new_table(f"at {prediction.memory.moment}", "bytes", "share", right=("bytes", "share"))
    total = prediction.memory.device_used_bytes
    for part, size in prediction.memory.breakdown.items():
        if size:
            table.add_row(part, format_bytes(size), f"{size / total:.1%}")
    table.add_row("device memory used", format_bytes(total), "100.0%")
    console.print(table)
    if prediction.serving is not None:
        return
    _print_counters(console, prediction.memory)
    low, high = prediction.time.interval_s
    unit = "step" if prediction.run.phase == "finetune" else "token"
    if prediction.time.is_known and prediction.time.prefill_s is not None:
        _say_generation(console, prediction)
    interval = f"time per {unit}: 90 % between {format_seconds(low)} and {format_seconds(high)}; "
    say(
        console,
        (interval if prediction.time.is_known else "")
        + f"parameters: {format_count(prediction.num_params)}"
        + (
            f", trained: {format_count(prediction.num_trainable_params)} "
            f"({prediction.num_trainable_params / prediction.num_params:.2%})"
            if prediction.num_trainable_params
            else ""
        ),
    )
