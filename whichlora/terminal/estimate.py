"""Predictions as a table, one of them as a breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.spec.results import MemoryPrediction, Prediction, Refused
from whichlora.terminal.tables import new_table, open_console, print_table, say
from whichlora.terminal.words import VERDICTS, refusals, variant
from whichlora.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console


def print_predictions(predictions: Sequence[Prediction], refused: Sequence[Refused] = ()) -> None:
    """A table of all predictions; the byte breakdown as well when there is only one."""
    console = open_console()
    numbers = ("batch", "tokens", "peak", "95 % interval", "of the device", "time", "tokens/s")
    rows = []
    for one in predictions:
        memory, time = one.memory, one.time
        low, high = memory.interval_bytes
        run = one.run
        if run.phase == "finetune":
            tokens = str(run.seq_len)
            seconds = f"{format_seconds(time.step_s or 0)} /step" if time.is_known else "-"
        else:
            tokens = f"{run.prompt_len}+{run.max_new_tokens}"
            seconds = f"{format_seconds(time.time_per_token_s)} /token" if time.is_known else "-"
        rows.append(
            (
                run.model,
                variant(run),
                str(run.batch_size),
                tokens,
                format_bytes(memory.device_used_bytes),
                f"{format_bytes(low)} - {format_bytes(high)}",
                f"{memory.device_used_bytes / one.usable_bytes:.0%}",
                seconds,
                format_count(time.tokens_per_s),
                VERDICTS[one.verdict],
                one.gpu,
            )
        )
    print_table(
        console,
        ("model", "what", *numbers, "fits", "device"),
        rows,
        right=numbers,
        lift=("device", "tokens", "model", "what"),
        spare=("tokens/s", "of the device", "95 % interval"),
    )
    if len(predictions) == 1:
        _print_breakdown(console, predictions[0])
    for text in refusals(refused):
        say(console, text)
    for text in dict.fromkeys(one.basis for one in predictions):
        say(console, f"basis: {text}")
    for text in dict.fromkeys(note for one in predictions for note in one.notes):
        say(console, f"note: {text}")


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


def _print_breakdown(console: Console, one: Prediction) -> None:
    table = new_table(f"at {one.memory.moment}", "bytes", "share", right=("bytes", "share"))
    total = one.memory.device_used_bytes
    for part, size in one.memory.breakdown.items():
        if size:
            table.add_row(part, format_bytes(size), f"{size / total:.1%}")
    table.add_row("device memory used", format_bytes(total), "100.0%")
    console.print(table)
    _print_counters(console, one.memory)
    low, high = one.time.interval_s
    what = "step" if one.run.phase == "finetune" else "token"
    if one.time.is_known and one.time.prefill_s is not None and one.time.decode_s_per_token:
        say(
            console,
            f"prompt pass {format_seconds(one.time.prefill_s)}, then "
            f"{format_seconds(one.time.decode_s_per_token)} until every sequence has its next "
            "token; the time per token is of all sequences together",
        )
    interval = f"time per {what}: 90 % between {format_seconds(low)} and {format_seconds(high)}; "
    say(
        console,
        (interval if one.time.is_known else "")
        + f"parameters: {format_count(one.num_params)}"
        + (
            f", trained: {format_count(one.num_trainable_params)} "
            f"({one.num_trainable_params / one.num_params:.2%})"
            if one.num_trainable_params
            else ""
        ),
    )
