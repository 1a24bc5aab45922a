"""What a serving engine answers: whether it starts, and how much it serves at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whichlora.predict.words import not_started
from whichlora.search.feasibility import Candidate
from whichlora.spec.results import Prediction, ServingPrediction, ServingTime
from whichlora.spec.run import RunConfig
from whichlora.terminal.sheet import Sheet, show
from whichlora.terminal.tables import new_table, print_table, print_whole, say
from whichlora.terminal.words import variants
from whichlora.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_POOL = ("context", "asked", "at once", "pool", "tokens", "longest", "left")
_PARTS = {
    "products": "products, or reading their weights",
    "attention": "attention, or reading keys and values",
    "elementwise": "norms, activations, sampling",
    "kernels": "starting kernels on the GPU",
    "communication": "adding up between GPUs",
    "drafts": "drafting the next tokens",
    "sends": "sending states to the next stage",
    "pipeline_idle": "waiting for the slowest stage",
    "engine": "the engine's host",
    "host": "layers and experts on the host",
    "weight_copies": "copying weights from the host to the GPU",
    "crossings": "waits of GPU and host for each other",
}
_WAITS = ("first token", "per token", "tokens/s")


def print_served(console: Console, predictions: Sequence[Prediction]) -> None:
    """A table of predictions with an engine; the pool in lines as well where there is only one."""
    sheet = served_sheet(predictions)
    print_table(
        console,
        sheet.columns,
        sheet.rows,
        right=sheet.right,
        lift=("device", "model", "what", "context", "asked"),
        spare=("left", "tokens", "longest", "pool"),
    )
    for prediction in predictions:
        for line in not_started(prediction):
            say(console, line)
    if len(predictions) == 1 and predictions[0].serving is not None:
        _print_pool(console, predictions[0].serving)
        for line in command_lines(predictions[0]):
            say(console, line, whole=True)


def served_sheet(predictions: Sequence[Prediction]) -> Sheet:
    """One row per prediction with an engine."""
    names = variants([p.run for p in predictions], [p.gpu for p in predictions])
    rows = []
    for prediction, name in zip(predictions, names, strict=True):
        serving = prediction.serving
        if serving is not None:
            cells = (*_cells(serving, prediction.run.request_rate), *_waits(serving))
            rows.append((prediction.run.model, name, *cells, prediction.gpu))
    return Sheet(
        title="",
        columns=("model", "what", "starts", *_POOL, *_WAITS, "device"),
        right=(*_POOL, *_WAITS),
        rows=rows,
    )


def print_stage_served(
    console: Console, candidates: Sequence[Candidate], *, title: str, caption: str
) -> None:
    """Stage 1 of a plan whose engine answers it."""
    numbers = (*_POOL[:-1], *_WAITS, "peak")
    rows = []
    for candidate in candidates:
        run, serving = candidate.run, candidate.prediction.serving
        if serving is not None:
            peak = format_bytes(candidate.memory_bytes.value)
            cells = (
                *_cells(serving, run.request_rate)[:-1],
                *_waits(serving),
                peak,
                candidate.verdict,
            )
            rows.append((run.model, variants([run], [""])[0], *cells))
    print_table(
        console,
        ("model", "what", "starts", *numbers, "verdict"),
        rows,
        right=numbers,
        lift=("what", "context", "asked"),
        spare=("peak", "tokens", "what", "longest", "pool", "starts", "tokens/s"),
        title=title,
        caption=caption,
    )


def _cells(serving: ServingPrediction, rate: float | None) -> tuple[str, ...]:
    return (
        serving.starts_in_words,
        str(serving.context),
        str(serving.concurrency) if rate is None else f"{rate:g}/s",
        str(serving.max_running),
        _or_lacks(serving.kv_pool_bytes),
        f"{serving.kv_pool_tokens:,}",
        f"{serving.max_context:,}",
        _or_lacks(serving.left_bytes),
    )


def _or_lacks(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes >= 0 else f"none, {format_bytes(-num_bytes)} lack"


def _waits(serving: ServingPrediction) -> tuple[str, ...]:
    time = serving.time
    if time is None:
        return ("-", "-", "-")
    return (
        format_seconds(time.ttft_s),
        format_seconds(time.tpot_s),
        format_count(time.output_tokens_per_s),
    )


def waits_sheet(time: ServingTime) -> Sheet:
    """What users wait, by percentile."""
    confidence = f"{100 * time.confidence:.0f} % interval of the median"
    shares = tuple(f"{share} %" for share in time.ttft_percentiles_s)
    rows = []
    for what, percentiles, (low, high) in (
        ("first token", time.ttft_percentiles_s, time.interval_ttft_s),
        ("each further token", time.tpot_percentiles_s, time.interval_tpot_s),
    ):
        between = f"{format_seconds(low)} to {format_seconds(high)}"
        rows.append((what, *map(format_seconds, percentiles.values()), between))
    columns = ("of requests wait no longer", *shares, confidence)
    return Sheet(title="", columns=columns, right=shares, rows=rows)


def lengths_in_words(run: RunConfig) -> str:
    """What the waits of a run are of."""
    return f"prompts of {run.prompt_len:,} and answers of {run.max_new_tokens:,} tokens"


def waits_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Which lengths the waits are of, however long the context is."""
    timed = (each.run for each in predictions if each.serving and each.serving.time)
    if lengths := dict.fromkeys(map(lengths_in_words, timed)):
        yield (
            f"waits are of {'; '.join(lengths)}, not of the context: --prompt-len and "
            "--max-new-tokens state others"
        )


def rate_line(time: ServingTime) -> str:
    """What the engine writes and answers in a second, and what one user sees of an answer."""
    low, high = map(format_count, time.interval_output_tokens_per_s)
    grows = ""
    if time.tpot_s > 0:  # answers of one token have none
        grows = f"an answer that has begun grows by {1 / time.tpot_s:.3g} tokens/s; "
    return (
        f"{format_count(time.output_tokens_per_s)} tokens/s in all, between {low} and {high}; "
        f"{time.requests_per_s:.3g} requests/s; {grows}"
        f"{_lengths(time.length_spread)}"
    )


def _lengths(spread: float) -> str:
    return f"lengths vary by {spread:.0%}" if spread else "all lengths alike"


def command_lines(prediction: Prediction) -> Iterator[str]:
    """What starts the engine, and which weights it needs beside those of the hub."""
    run, serving = prediction.run, prediction.serving
    if serving is None or not serving.command:
        return
    yield serving.command
    if run.model in serving.command and serving.lacking_storage:
        yield f"  in place of {run.model} put the folder of its {serving.lacking_storage} weights"


def _print_waits(console: Console, time: ServingTime) -> None:
    """What users wait, and what one step is made of."""
    show(console, waits_sheet(time))
    say(console, rate_line(time))
    step = new_table(f"one step of {time.step_sequences}", "", right=("",))
    for part, seconds in time.step_parts_s.items():
        if seconds:
            step.add_row(_PARTS[part], format_seconds(seconds))
    step.add_row("in all", format_seconds(sum(time.step_parts_s.values())))
    print_whole(console, step)


def _print_pool(console: Console, serving: ServingPrediction) -> None:
    table = new_table(serving.release, "", right=("",))
    for what, value in (
        ("pool for keys and values", _or_lacks(serving.kv_pool_bytes)),
        (
            f"blocks of {format_bytes(serving.block_bytes)}",
            f"{serving.num_blocks:,}",
        ),
        (f"tokens, of sequences of {serving.context:,}", f"{serving.kv_pool_tokens:,}"),
        (f"sequences of {serving.context:,} tokens", f"{serving.max_concurrency:.2f}"),
        ("longest sequence", f"{serving.max_context:,}"),
        ("left of the GPU", _or_lacks(serving.left_bytes)),
    ):
        table.add_row(what, value)
    print_whole(console, table)
    if serving.time is not None:
        _print_waits(console, serving.time)
