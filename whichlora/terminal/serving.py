"""What a serving engine answers: whether it starts, and how much it serves at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.search.feasibility import Candidate
from whichlora.spec.results import Prediction, ServingPrediction
from whichlora.terminal.tables import new_table, print_table, say
from whichlora.terminal.words import variants
from whichlora.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_NUMBERS = ("context", "asked", "at once", "pool", "tokens", "longest", "left")


def print_served(console: Console, predictions: Sequence[Prediction]) -> None:
    """A table of predictions with an engine; the pool in lines as well where there is only one."""
    names = variants([p.run for p in predictions], [p.gpu for p in predictions])
    rows = []
    for prediction, name in zip(predictions, names, strict=True):
        serving = prediction.serving
        if serving is not None:
            rows.append((prediction.run.model, name, *_cells(serving), prediction.gpu))
    print_table(
        console,
        ("model", "what", "starts", *_NUMBERS, "device"),
        rows,
        right=_NUMBERS,
        lift=("device", "model", "what"),
        spare=("left", "tokens"),
    )
    for prediction in predictions:
        serving = prediction.serving
        if serving is not None and not serving.starts:
            say(console, f"{serving.engine} does not start on {prediction.gpu}: {serving.reason}")
    if len(predictions) == 1 and predictions[0].serving is not None:
        _print_pool(console, predictions[0].serving)


def print_stage_served(
    console: Console, candidates: Sequence[Candidate], *, title: str, caption: str
) -> None:
    """Stage 1 of a plan whose engine answers it."""
    numbers = (*_NUMBERS[:-1], "peak")
    rows = []
    for candidate in candidates:
        run, serving = candidate.run, candidate.prediction.serving
        if serving is not None:
            peak = format_bytes(candidate.memory_bytes.value)
            cells = (*_cells(serving)[:-1], peak, candidate.verdict)
            rows.append((run.model, variants([run], [""])[0], *cells))
    print_table(
        console,
        ("model", "what", "starts", *numbers, "verdict"),
        rows,
        right=numbers,
        lift=("what",),
        spare=("peak", "tokens", "what"),
        title=title,
        caption=caption,
    )


def _cells(serving: ServingPrediction) -> tuple[str, ...]:
    return (
        "yes" if serving.starts else "no",
        str(serving.context),
        str(serving.concurrency),
        str(serving.max_running),
        format_bytes(serving.kv_pool_bytes),
        f"{serving.kv_pool_tokens:,}",
        f"{serving.max_context:,}",
        format_bytes(serving.left_bytes),
    )


def _print_pool(console: Console, serving: ServingPrediction) -> None:
    table = new_table(f"{serving.engine} {serving.version}", "", right=("",))
    for what, value in (
        ("pool for keys and values", format_bytes(serving.kv_pool_bytes)),
        (
            f"blocks of {format_bytes(serving.block_bytes)}",
            f"{serving.num_blocks:,}",
        ),
        (f"tokens, of sequences of {serving.context:,}", f"{serving.kv_pool_tokens:,}"),
        (f"sequences of {serving.context:,} tokens", f"{serving.max_concurrency:.2f}"),
        ("longest sequence", f"{serving.max_context:,}"),
        ("left of the GPU", format_bytes(serving.left_bytes)),
    ):
        table.add_row(what, value)
    console.print(table)
    if serving.command:
        say(console, serving.command)
