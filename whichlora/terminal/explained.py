"""An explanation as text and as Markdown: the ledger at the peak, and alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whichlora.memory.training import PARTS
from whichlora.predict.explain import Alternative, Explanation
from whichlora.predict.ledger_lines import Line
from whichlora.predict.words import VERDICTS, headline, not_started
from whichlora.spec.results import Prediction
from whichlora.terminal.assumed import assumed_lines
from whichlora.terminal.several_gpus import kinds_sheet, messages_sheet, spread_lines
from whichlora.terminal.sheet import WIDE, Document, Sheet, show
from whichlora.terminal.tables import open_console, say
from whichlora.terminal.words import shared_notes
from whichlora.units import format_bytes, format_count, format_seconds

SMALL_SHARE = 0.002  # of the device memory used; smaller tensors of a group are summed up
MOST_NAMED = 4  # entries in a sentence
SMALL_LAYER_SHARE = 0.01  # the same for one layer, of its total


def print_explanation(explanation: Explanation) -> None:
    """Everything about one prediction, as wide as the terminal allows."""
    console = open_console()
    say(console, headline(explanation.prediction))
    for line in not_started(explanation.prediction):
        say(console, line)
    console.print()
    wide = console.width >= WIDE
    for sheet in (ledger_sheet(explanation, wide=wide), *_other_sheets(explanation)):
        show(console, sheet)
    for line in _closing(explanation):
        say(console, line)


def explanation_document(explanation: Explanation) -> Document:
    """For Markdown and a notebook; reasons and sources have columns of their own."""
    return Document(
        title=headline(explanation.prediction),
        sheets=(_spread_out_ledger(explanation), *_other_sheets(explanation)),
        lines=(*not_started(explanation.prediction), *_closing(explanation)),
    )


def _closing(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    yield from assumed_lines([prediction])
    if prediction.several_gpus is not None:
        yield from spread_lines(prediction, prediction.several_gpus)
        yield from _unshared(explanation)
    yield f"basis: {explanation.prediction.basis}"
    for note in shared_notes([explanation.prediction]):
        yield f"note: {note}"


# --- the ledger at the peak


def _formula(line: Line) -> str:
    shape = line.shape if line.dtype == "bytes" else f"{line.shape} {line.dtype}".strip()
    return shape if line.count == "1" else f"{line.count} × {shape}".replace(" x ", " × ")


def _title(explanation: Explanation) -> str:
    return f"allocated at {explanation.prediction.memory.moment}, the largest of the moments"


def _split(explanation: Explanation, line: Line) -> tuple[tuple[Line, ...], int, int]:
    """Members that get a row, and the number and bytes of the smaller ones."""
    least = SMALL_SHARE * explanation.prediction.memory.device_used_bytes
    shown = tuple(member for member in line.members if abs(member.num_bytes) >= least)
    if len(line.members) - len(shown) < 2:
        return line.members, 0, 0
    small_bytes = line.num_bytes - sum(member.num_bytes for member in shown)
    return shown, len(line.members) - len(shown), small_bytes


def _totals(explanation: Explanation) -> tuple[tuple[str, int], ...]:
    memory = explanation.prediction.memory
    return (
        ("peak allocated", memory.peak_allocated_bytes),
        ("peak reserved", memory.peak_reserved_bytes),
        ("device memory used", memory.device_used_bytes),
    )


def ledger_sheet(explanation: Explanation, *, wide: bool) -> Sheet:
    """Every entry in lines of one cell (narrow), or with formula and numbers beside it."""
    used = explanation.prediction.memory.device_used_bytes
    rows: list[tuple[str, ...]] = []
    rules: set[int] = set()

    def add(num_bytes: int, text: str, formula: str = "") -> None:
        share = f"{num_bytes / used:.1%}"
        cells = (text, formula) if wide else ("\n".join(filter(None, (text, formula))),)
        rows.append((format_bytes(num_bytes), share, *cells))

    def add_line(line: Line) -> None:
        of_members = bool(line.members)
        formula = [_formula(line) if not of_members else "", line.numbers]
        formula.append(f"{line.kind}: {line.source}")
        add(line.num_bytes, f"{line.what}\n{line.why}", "\n".join(part for part in formula if part))
        shown, num_others, small_bytes = _split(explanation, line)
        for member in shown:
            if wide:
                formula = [f"{member.shape} {member.dtype}", member.numbers]
                add(
                    member.num_bytes,
                    f"  {member.what}",
                    " = ".join(part for part in formula if part),
                )
            else:
                add(
                    member.num_bytes,
                    f"  {member.what}",
                    f"    {member.numbers}" if member.numbers else "",
                )
        if num_others:
            add(small_bytes, f"  {num_others} smaller ones")

    def add_total(name: str, num_bytes: int) -> None:
        rules.update((len(rows) - 1, len(rows)))
        add(num_bytes, name)

    for line in explanation.lines:
        add_line(line)
    allocated, reserved, device = _totals(explanation)
    add_total(*allocated)
    for line in explanation.card:
        if line.part == "context":
            add_total(*reserved)
        add_line(line)
    add_total(*device)
    columns = ("bytes", "share", "tensor", *(["formula, numbers, kind: source"] if wide else []))
    return Sheet(
        title=_title(explanation),
        columns=columns,
        right=("bytes", "share"),
        rows=rows,
        rules=frozenset(rules),
    )


def _spread_out_ledger(explanation: Explanation) -> Sheet:
    used = explanation.prediction.memory.device_used_bytes
    rows: list[tuple[str, ...]] = []

    def add(line: Line, indent: str = "") -> None:
        rows.append(
            (
                format_bytes(line.num_bytes),
                f"{line.num_bytes / used:.1%}",
                indent + line.what,
                "" if line.members else _formula(line),
                line.numbers,
                line.kind,
                line.source if not indent else "",
                line.why if not indent else "",
            )
        )
        for member in line.members:
            add(member, "· ")

    for line in (*explanation.lines, *explanation.card):
        add(line)
    num_lines = len(rows)
    for name, num_bytes in _totals(explanation):
        share = f"{num_bytes / used:.1%}"
        rows.append((format_bytes(num_bytes), share, name, *[""] * 5))
    return Sheet(
        title=_title(explanation),
        columns=("bytes", "share", "tensor", "formula", "numbers", "kind", "source", "alive"),
        right=("bytes", "share"),
        rows=rows,
        totals=frozenset(range(num_lines, len(rows))),
    )


# --- moments and alternatives


def _other_sheets(explanation: Explanation) -> Iterator[Sheet]:
    yield moments_sheet(explanation)
    if explanation.layer:
        yield layer_sheet(explanation)
    training = explanation.prediction.run.phase == "finetune"
    yield methods_sheet(
        explanation,
        "the same job by method" if training else "the same job by storage of the weights",
    )
    if explanation.caches:
        yield caches_sheet(explanation)
    if len(explanation.strategies) > 1:
        yield savings_sheet(explanation, explanation.strategies, "strategy")
    if explanation.scaling:
        yield scaling_sheet(explanation)
    if explanation.savings:
        yield savings_sheet(explanation, explanation.savings, "change")
    if explanation.ranks:
        yield ranks_sheet(explanation)
    several = explanation.prediction.several_gpus
    if several is not None and len(several.ranks) > 1:
        yield kinds_sheet(several.ranks)
    if several is not None and several.communication.messages:
        yield messages_sheet(several.communication.messages)


def moments_sheet(explanation: Explanation) -> Sheet:
    peak = max(explanation.moments.values())
    rows = [
        (name, format_bytes(size), "peak" if size == peak else format_bytes(size - peak))
        for name, size in explanation.moments.items()
    ]
    numbers = ("allocated", "against the peak")
    return Sheet(title="moments of the run", columns=("moment", *numbers), right=numbers, rows=rows)


def layer_sheet(explanation: Explanation) -> Sheet:
    """Tensors of one layer; the smallest ones are summed up in a row."""
    total = sum(line.num_bytes for line in explanation.layer)
    shown = [line for line in explanation.layer if line.num_bytes >= SMALL_LAYER_SHARE * total]
    small = explanation.layer[len(shown) :]
    rows = [
        (
            format_bytes(line.num_bytes),
            line.what,
            line.numbers or f"{line.shape} {line.dtype}",
        )
        for line in shown
    ]
    if small:
        size = sum(line.num_bytes for line in small)
        rows.append((format_bytes(size), f"{len(small)} smaller ones", ""))
    rows.append((format_bytes(total), "one layer", ""))
    return Sheet(
        title="what one layer keeps while it is recomputed",
        columns=("bytes", "tensor", "numbers"),
        right=("bytes",),
        rows=rows,
        rules=frozenset({len(rows) - 2}),
    )


def methods_sheet(explanation: Explanation, title: str) -> Sheet:
    """One column for each alternative, one row for each part."""
    chosen = explanation.methods
    names = tuple(
        _starred(explanation, alternative.name, alternative.prediction) for alternative in chosen
    )
    rows: list[tuple[str, ...]] = []
    predictions = [alternative.prediction for alternative in chosen]
    if explanation.prediction.run.phase == "finetune":
        rows.append(
            (
                "trained",
                *(format_count(prediction.num_trainable_params) for prediction in predictions),
            )
        )
        rows.append(("of all", *(_trained_share(prediction) for prediction in predictions)))
    for part in PARTS:
        sizes = [prediction.memory.breakdown.get(part, 0) for prediction in predictions]
        if any(sizes):
            rows.append((part, *(format_bytes(size) if size else "-" for size in sizes)))
    rows.append(
        (
            "memory used",
            *(format_bytes(prediction.memory.device_used_bytes) for prediction in predictions),
        )
    )
    rows.append(("fits", *(VERDICTS[prediction.verdict] for prediction in predictions)))
    rows.append((_time_name(explanation), *(_time(prediction) for prediction in predictions)))
    return Sheet(title=f"{title} (* your choice)", columns=("", *names), right=names, rows=rows)


def _starred(explanation: Explanation, name: str, prediction: Prediction) -> str:
    """`name`, with a star if the user asked for the run of `prediction`."""
    return f"{name} *" if prediction.run == explanation.prediction.run else name


def _trained_share(prediction: Prediction) -> str:
    return f"{prediction.num_trainable_params / prediction.num_params:.2%}"


def _time_name(explanation: Explanation) -> str:
    return "per step" if explanation.prediction.run.phase == "finetune" else "per token"


def _time(prediction: Prediction) -> str:
    return format_seconds(prediction.time.step_s or prediction.time.time_per_token_s)


def savings_sheet(
    explanation: Explanation, alternatives: Sequence[Alternative], changed: str
) -> Sheet:
    numbers = ("saves", "device memory used", _time_name(explanation))
    rows = [
        (
            _starred(explanation, alternative.name, alternative.prediction),
            format_bytes(explanation.saved_bytes(alternative)),
            format_bytes(alternative.prediction.memory.device_used_bytes),
            _time(alternative.prediction),
            VERDICTS[alternative.prediction.verdict],
        )
        for alternative in alternatives
    ]
    titles = {"strategy": "the same job by strategy (* your choice)"}
    return Sheet(
        title=titles.get(changed, "one choice made differently"),
        columns=(changed, *numbers, "fits"),
        right=numbers,
        rows=rows,
    )


def scaling_sheet(explanation: Explanation) -> Sheet:
    """What twice as many GPUs change of each entry at the peak; the smallest are left out."""
    prediction = explanation.prediction
    least = SMALL_SHARE * prediction.memory.device_used_bytes
    shown = [scaling for scaling in explanation.scaling if scaling.num_bytes >= least]
    gpus = prediction.run.parallel.gpus
    numbers = (f"{gpus} GPUs", f"{2 * gpus} GPUs")
    rows = [
        (
            scaling.what,
            format_bytes(scaling.num_bytes),
            format_bytes(scaling.doubled_bytes),
            "yes" if scaling.shrinks else "no",
        )
        for scaling in shown
    ]
    return Sheet(
        title=f"at {prediction.memory.moment} with twice as many GPUs and the same batch on each",
        columns=("tensor", *numbers, "shrinks"),
        right=numbers,
        rows=rows,
    )


def _unshared(explanation: Explanation) -> Iterator[str]:
    """What more GPUs do not shrink, and what does."""
    fixed = [scaling for scaling in explanation.scaling if not scaling.shrinks]
    if not fixed:
        return
    largest = ", ".join(
        f"{scaling.what} {format_bytes(scaling.num_bytes)}" for scaling in fixed[:MOST_NAMED]
    )
    total = sum(scaling.num_bytes for scaling in fixed)
    share = total / explanation.prediction.memory.device_used_bytes
    yield (
        f"more GPUs do not shrink {format_bytes(total)} of each card ({share:.0%}): {largest}"
        + (", and smaller ones" if len(fixed) > MOST_NAMED else "")
    )
    by_setting: dict[str, Alternative] = {}  # the best change of each
    for alternative in (*explanation.strategies, *explanation.savings):
        setting = next(iter(alternative.settings), "")
        best = by_setting.get(setting)
        if best is None or explanation.saved_bytes(alternative) > explanation.saved_bytes(best):
            by_setting[setting] = alternative
    saved = {each.name: explanation.saved_bytes(each) for each in by_setting.values()}
    helpful = sorted((name for name in saved if saved[name] > 0), key=lambda name: -saved[name])
    if helpful:
        named = "; ".join(f"{name} -{format_bytes(saved[name])}" for name in helpful[:MOST_NAMED])
        yield f"what would: {named}"


def ranks_sheet(explanation: Explanation) -> Sheet:
    numbers = ("trained", "of all", "device memory used", _time_name(explanation))
    rows = [
        (
            _starred(explanation, alternative.name, alternative.prediction),
            format_count(alternative.prediction.num_trainable_params),
            _trained_share(alternative.prediction),
            format_bytes(alternative.prediction.memory.device_used_bytes),
            _time(alternative.prediction),
            VERDICTS[alternative.prediction.verdict],
        )
        for alternative in explanation.ranks
    ]
    return Sheet(
        title="the same job by rank (* your choice)",
        columns=("rank", *numbers, "fits"),
        right=numbers,
        rows=rows,
    )


def caches_sheet(explanation: Explanation) -> Sheet:
    numbers: Sequence[str] = ("block", "per token", "kept", "cache", "device memory used")
    rows = [
        (
            _starred(explanation, cache.kv_cache, cache.prediction),
            str(cache.block_tokens),
            format_bytes(cache.token_bytes),
            str(cache.kept_tokens),
            format_bytes(cache.cache_bytes),
            format_bytes(cache.prediction.memory.device_used_bytes),
            VERDICTS[cache.prediction.verdict],
        )
        for cache in explanation.caches
    ]
    return Sheet(
        title="key-value cache by engine; block and kept in tokens of one sequence (* your choice)",
        columns=("cache", *numbers, "fits"),
        right=tuple(numbers),
        rows=rows,
    )
