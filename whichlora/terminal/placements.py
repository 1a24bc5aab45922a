"""One run on every accelerator, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from whichlora.predict.largest import Placement
from whichlora.predict.notes import UNVERIFIED
from whichlora.terminal.sheet import WIDE, Sheet, show
from whichlora.terminal.tables import open_console, say
from whichlora.terminal.words import VERDICTS, describe
from whichlora.units import format_bytes, format_seconds


def print_placements(placements: Sequence[Placement]) -> None:
    """Cards in the order they are given, the refused ones below with their reasons."""
    console = open_console()
    judged = [one for one in placements if one.prediction is not None]
    if judged and judged[0].prediction is not None:
        say(console, describe(judged[0].prediction.run))
        console.print()
        show(console, placements_sheet(judged, wide=console.width >= WIDE))
    refusals: dict[str, list[str]] = {}
    for one in placements:
        if one.refusal:
            refusals.setdefault(one.refusal.replace(one.gpu.key, "it"), []).append(one.gpu.key)
    for reason, keys in refusals.items():
        say(console, f"left out: {', '.join(keys)}: {reason}")
    notes: dict[str, list[str]] = {}
    for one in judged:
        for text in () if one.prediction is None else one.prediction.notes:
            if not text.startswith(UNVERIFIED):  # the stars say so
                notes.setdefault(text.replace(one.gpu.key, "it"), []).append(one.gpu.key)
    for text, keys in notes.items():
        of_all = len(keys) == len(judged)
        say(console, f"note: {text}" if of_all else f"note: {', '.join(keys)}: {text}")
    if any(one.gpu.unverified for one in judged):
        say(console, "* a fact of its datasheet is not verified: whichlora gpus")
    bases = {one.prediction.basis for one in judged if one.prediction is not None}
    for text in sorted(bases):
        say(console, f"basis: {text}")


def placements_sheet(placements: Sequence[Placement], *, wide: bool) -> Sheet:
    """One row per accelerator; a narrow one leaves out the upper bound of the need."""
    rows: list[tuple[str, ...]] = []
    what = "time"
    for one in placements:
        prediction = one.prediction
        if prediction is None:
            continue
        time = prediction.time
        what = "per step" if time.step_s else "per token"
        bound = format_bytes(prediction.memory.interval_bytes[1])
        rows.append(
            (
                f"{one.gpu.key} *" if one.gpu.unverified else one.gpu.key,
                format_bytes(one.gpu.memory_bytes),
                format_bytes(prediction.memory.device_used_bytes),
                *([bound] if wide else []),
                VERDICTS[prediction.verdict],
                str(one.batch_size) if one.batch_size else "-",
                format_seconds(time.step_s or time.time_per_token_s),
            )
        )
    needs = ("memory", "need", "at most") if wide else ("memory", "need")
    return Sheet(
        title="where it fits, the smallest card first",
        columns=("accelerator", *needs, "fits", "largest batch", what),
        right=(*needs, "largest batch", what),
        rows=rows,
    )
