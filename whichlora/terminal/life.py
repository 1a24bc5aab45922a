"""The stages of a run as text: a table of peaks, and the tensors of each."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.predict.life import TRAINING, Life, StageUse, way_to_lower
from whichlora.predict.words import FITS, VERDICTS, describe
from whichlora.terminal.sheet import Document, Sheet, show
from whichlora.terminal.tables import open_console, say
from whichlora.units import format_bytes

SMALL_SHARE = 0.01  # of a stage's bytes in one place; smaller lines are left to the JSON


def print_life(life: Life) -> None:
    """Peaks of every stage, then what they are made of."""
    console = open_console()
    document = life_document(life)
    say(console, document.title)
    console.print()
    for sheet in document.sheets:
        show(console, sheet)
    for line in document.lines:
        say(console, line)


def life_document(life: Life) -> Document:
    """The same for Markdown and for a notebook."""
    return Document(
        title=life_headline(life),
        sheets=(stages_sheet(life), tensors_sheet(life)),
        lines=tuple(_closing(life)),
    )


def life_headline(life: Life) -> str:
    stage = life.largest
    low, high = (format_bytes(bound) for bound in stage.interval_bytes)
    return (
        f"the life of {describe(life.run)} on {life.gpu}: "
        f"{format_bytes(stage.device_used_bytes)} ({low} to {high}) of "
        f"{format_bytes(life.usable_bytes)}, in {stage.name}: {FITS[life.verdict]}"
    )


def stages_sheet(life: Life) -> Sheet:
    numbers = ("GPU", "host", "disk, added")
    rows = [
        (
            stage.name + " *" * (stage is life.largest),
            _or_dash(stage.device_used_bytes),
            _or_dash(stage.host_bytes),
            _or_dash(stage.disk_bytes),
            VERDICTS[stage.verdict] if stage.device_used_bytes else "",
        )
        for stage in life.stages
    ]
    return Sheet(
        title="peak of each stage (* decides whether the run fits the GPU)",
        columns=("stage", *numbers, "fits"),
        right=numbers,
        rows=rows,
    )


def _or_dash(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def tensors_sheet(life: Life) -> Sheet:
    rows = [row for stage in life.stages for row in _rows(stage)]
    return Sheet(
        title="what each stage holds",
        columns=("stage", "where", "bytes", "tensor", "lowered by"),
        right=("bytes",),
        rows=rows,
    )


def _rows(stage: StageUse) -> Iterator[tuple[str, ...]]:
    sizes = {"gpu": stage.gpu_bytes, "host": stage.host_bytes, "disk": stage.disk_bytes}
    for held in stage.lines:
        if held.line.num_bytes >= SMALL_SHARE * sizes[held.place]:
            size = format_bytes(held.line.num_bytes)
            yield stage.name, held.place, size, held.line.what, held.setting


def _closing(life: Life) -> Iterator[str]:
    stage = life.largest
    if stage.name != TRAINING:
        settings = next((held.setting for held in stage.lines if held.setting), "")
        training = next(each for each in life.stages if each.name == TRAINING)
        size = format_bytes(training.device_used_bytes)
        yield (
            f"{stage.name} is the largest stage on the GPU, not training, which takes {size}"
            + way_to_lower(settings)
        )
    on_host = life.largest_on_host
    if on_host.host_bytes:
        has = ""
        if life.host_memory_bytes is not None:
            kind = "more than" if life.exceeds_host else "of"
            has = f", {kind} the {format_bytes(life.host_memory_bytes)} stated"
        yield f"host memory: {format_bytes(on_host.host_bytes)} in {on_host.name}{has}"
    yield f"disk: {format_bytes(life.disk_bytes)} of all stages together"
    for note in life.notes:
        yield f"note: {note}"
