"""What several GPUs add to a prediction: its ranks, what they send, and the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from whichlora.memory.training import PARTS
from whichlora.predict.words import describe
from whichlora.spec.parallel import ONE_DEVICE, ONE_GPU
from whichlora.spec.results import (
    Communication,
    MessagePrediction,
    Prediction,
    RankPrediction,
    SavingPrediction,
    SeveralGpus,
    ranges,
)
from whichlora.spec.run import RunConfig
from whichlora.terminal.sheet import Sheet, show
from whichlora.terminal.tables import say
from whichlora.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

MOST_KINDS = 6  # columns; more are the stages of a long pipeline, whose middle ones are alike


def print_spread(console: Console, prediction: Prediction) -> None:
    """Below the answer of one run: nothing where it has one GPU."""
    several = prediction.several_gpus
    if several is None:
        return
    if len(several.ranks) > 1:
        show(console, kinds_sheet(several.ranks))
    if several.communication.messages:
        show(console, messages_sheet(several.communication.messages))
    for line in spread_lines(prediction, several):
        say(console, line)


def count_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Of each run that is asked with several numbers of GPUs, which of them is best, and at what.

    GPU time is what a price per hour is paid for.
    """
    groups: dict[tuple[str, RunConfig], list[Prediction]] = {}
    for prediction in predictions:
        run = replace(prediction.run, parallel=ONE_GPU, gradient_accumulation_steps=1)
        groups.setdefault((prediction.gpu, run), []).append(prediction)
    for (gpu, run), group in groups.items():
        if len({prediction.run.parallel.gpus for prediction in group}) < 2:
            continue
        name = f"{describe(run)} on {gpu}: " if len(groups) > 1 else ""
        fitting = [prediction for prediction in group if prediction.verdict == "fits"]
        if not fitting:
            yield f"{name}it surely fits with none of these numbers of GPUs"
            continue
        fewest = min(fitting, key=lambda each: (each.run.parallel.gpus, _s_per_token(each)))
        words = [f"fewest GPUs: {_gpus_of(fewest)}"]
        if all(prediction.time.is_known for prediction in fitting):
            fastest = min(fitting, key=_s_per_token)
            cheapest = min(fitting, key=_gpu_s_per_token)
            words.append(
                f"fastest: {_gpus_of(fastest)}, {format_count(fastest.time.tokens_per_s)} tokens/s"
            )
            hours = 1e6 * _gpu_s_per_token(cheapest) / 3600
            words.append(
                f"least GPU time: {_gpus_of(cheapest)}, {hours:.3g} GPU-hours per million tokens"
            )
        yield name + "; ".join(words)


def _gpus_of(prediction: Prediction) -> str:
    config = prediction.run.parallel
    return "1" if config.strategy == ONE_DEVICE else f"{config.gpus} ({config.in_words})"


def _s_per_token(prediction: Prediction) -> float:
    return 1 / prediction.time.tokens_per_s if prediction.time.is_known else 0.0


def _gpu_s_per_token(prediction: Prediction) -> float:
    return prediction.run.parallel.gpus * _s_per_token(prediction)


def kinds_sheet(ranks: Sequence[RankPrediction]) -> Sheet:
    """A column for each kind of rank, those that need most where there are many."""
    shown = sorted(ranks, key=_used_bytes, reverse=True)[:MOST_KINDS]
    shown = [rank for rank in ranks if rank in shown]  # in their own order
    rows = [("ranks", *(ranges(rank.ranks) for rank in shown))]
    rows.append(("at", *(rank.moment for rank in shown)))
    for part in PARTS:
        sizes = [rank.breakdown.get(part, 0) for rank in shown]
        if any(sizes):
            rows.append((part, *(format_bytes(size) if size else "-" for size in sizes)))
    rows.append(("device memory used", *(format_bytes(_used_bytes(rank)) for rank in shown)))
    if any(rank.host_bytes for rank in shown):
        rows.append(("pinned host memory", *(format_bytes(rank.host_bytes) for rank in shown)))
    names = tuple(rank.name for rank in shown)
    left_out = len(ranks) - len(shown)
    return Sheet(
        title="each kind of rank" + (f", but {left_out} that need less" if left_out else ""),
        columns=("part", *names),
        right=names,
        rows=rows,
    )


def _used_bytes(rank: RankPrediction) -> int:
    return sum(rank.breakdown.values())


def messages_sheet(messages: Sequence[MessagePrediction]) -> Sheet:
    """A row for all messages that differ in bytes alone: adapters have several shapes."""
    alike: dict[tuple[str, str, int, str], list[MessagePrediction]] = {}
    for message in messages:
        key = message.what, message.collective, message.size, message.hidden_by
        alike.setdefault(key, []).append(message)
    numbers = ("times", "bytes", "time")
    rows = [
        (
            name,
            collective.replace("_", "-"),
            f"{size}",
            f"{sum(message.count for message in equal)}",
            _least_to_most(message.num_bytes for message in equal),
            format_seconds(sum(message.seconds for message in equal)),
            hidden_by,
        )
        for (name, collective, size, hidden_by), equal in alike.items()
    ]
    return Sheet(
        title="what a rank sends in an optimizer step; bytes of the whole tensor",
        columns=("what", "collective", "ranks", *numbers, "meanwhile"),
        right=("ranks", *numbers),
        rows=rows,
    )


def _least_to_most(sizes: Iterable[int]) -> str:
    ordered = sorted(set(sizes))
    return " to ".join(map(format_bytes, dict.fromkeys((ordered[0], ordered[-1]))))


def spread_lines(prediction: Prediction, several: SeveralGpus) -> Iterator[str]:
    """The global batch, what is sent, and host memory, a sentence each."""
    run = prediction.run
    sequences = several.global_batch_size
    at_once = sequences // (run.batch_size * run.gradient_accumulation_steps)
    yield (
        f"global batch of an optimizer step: {sequences} (batch size {run.batch_size} x "
        f"{run.gradient_accumulation_steps} accumulation steps x {at_once} at once)"
    )
    if several.communication.num_bytes:
        yield _sent(several.communication)
    if len(several.ranks) == 1 and run.parallel.gpus > 1:
        yield f"all {run.parallel.gpus} GPUs hold the same amounts"
    if several.host_bytes:
        node = "a node" if run.parallel.nodes > 1 else "the machine"
        pinned = f"{format_bytes(several.host_bytes)} pinned on {node}"
        yield f"host memory: {pinned}, {_of_host(several)}"
    if several.loading_host_bytes:
        loaded = format_bytes(several.loading_host_bytes)
        yield f"host memory while loading: {loaded} of all processes of a node, {_of_host(several)}"
    if several.saving is not None:
        yield _saving(several.saving)


def _saving(saving: SavingPrediction) -> str:
    text = f"saving: {saving.in_words}"
    if saving.device_bytes:
        text += f"; a GPU gathers {format_bytes(saving.device_bytes)} at a time"
    return f"{text}; {saving.instead} writes shares instead" if saving.instead else text


def _of_host(several: SeveralGpus) -> str:
    if several.host_memory_bytes is None:
        return "whose memory is not known; --host-memory states it"
    return f"which has {format_bytes(several.host_memory_bytes)}"


def _sent(communication: Communication) -> str:
    text = f"a rank sends {format_bytes(communication.num_bytes)} per optimizer step"
    if math.isnan(communication.exposed_s):
        return f"{text}; the links are not known, so that no time is counted for it"
    return (
        f"{text}: the step waits {format_seconds(communication.exposed_s)} for it, "
        f"{format_seconds(communication.overlapped_s)} overlap with computing"
    )
