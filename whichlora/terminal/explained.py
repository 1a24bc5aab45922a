"""An explanation as text and as Markdown: the ledger at the peak, and what else one could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whichlora.memory.training import PARTS
from whichlora.predict.explain import Alternative, Explanation
from whichlora.predict.ledger_lines import Line
from whichlora.spec.results import Prediction
from whichlora.terminal.sheet import WIDE, Sheet, as_markdown, show
from whichlora.terminal.tables import open_console, say
from whichlora.terminal.words import VERDICTS, describe
from whichlora.units import format_bytes, format_count, format_seconds

SMALL_LAYER_SHARE = 0.01  # the same of one layer, by its own total
SMALL_SHARE = 0.002  # tensors of a group below this share of the card's use are summed up


def print_explanation(found: Explanation) -> None:
    """Everything about one prediction, as wide as the terminal allows."""
    console = open_console()
    say(console, headline(found))
    console.print()
    wide = console.width >= WIDE
    for sheet in (ledger_sheet(found, wide=wide), *_other_sheets(found)):
        show(console, sheet)
    for line in _closing(found):
        say(console, line)


def explanation_markdown(found: Explanation) -> str:
    """The same as a Markdown document, with reasons and sources in columns of their own."""
    sheets = (_markdown_ledger(found), *_other_sheets(found))
    parts = [f"# {headline(found)}\n", *(as_markdown(sheet) for sheet in sheets)]
    return "\n".join([*parts, *(f"- {line}" for line in _closing(found))]) + "\n"


def headline(found: Explanation) -> str:
    one = found.prediction
    memory = one.memory
    verdict = {"fits": "fits", "fails": "does not fit", "undecided": "may fit"}[one.verdict]
    low, high = (format_bytes(bound) for bound in memory.interval_bytes)
    return (
        f"{describe(one.run)} on {one.gpu}: {format_bytes(memory.device_used_bytes)} "
        f"({low} to {high}) of {format_bytes(one.usable_bytes)}, {verdict}"
    )


def _closing(found: Explanation) -> Iterator[str]:
    yield f"basis: {found.prediction.basis}"
    for note in found.prediction.notes:
        yield f"note: {note}"


# --- the ledger at the peak


def _formula(line: Line) -> str:
    shape = line.shape if line.dtype == "bytes" else f"{line.shape} {line.dtype}"
    return shape if line.count == "1" else f"{line.count} × {shape}".replace(" x ", " × ")


def _title(found: Explanation) -> str:
    return f"allocated at {found.prediction.memory.moment}, the largest of the moments"


def _split(found: Explanation, line: Line) -> tuple[tuple[Line, ...], int, int]:
    """Members worth a row, and number and bytes of the others."""
    least = SMALL_SHARE * found.prediction.memory.device_used_bytes
    shown = tuple(one for one in line.members if abs(one.num_bytes) >= least)
    if len(line.members) - len(shown) < 2:
        return line.members, 0, 0
    rest = line.num_bytes - sum(one.num_bytes for one in shown)
    return shown, len(line.members) - len(shown), rest


def _totals(found: Explanation) -> tuple[tuple[str, int], ...]:
    memory = found.prediction.memory
    return (
        ("peak allocated", memory.peak_allocated_bytes),
        ("peak reserved", memory.peak_reserved_bytes),
        ("device memory used", memory.device_used_bytes),
    )


def ledger_sheet(found: Explanation, *, wide: bool) -> Sheet:
    """Every entry in lines of one cell (narrow), or with formula and numbers beside it."""
    used = found.prediction.memory.device_used_bytes
    rows: list[tuple[str, ...]] = []
    rules: set[int] = set()

    def add(num_bytes: int, text: str, formula: str = "") -> None:
        share = f"{num_bytes / used:.1%}"
        cells = (text, formula) if wide else ("\n".join(one for one in (text, formula) if one),)
        rows.append((format_bytes(num_bytes), share, *cells))

    def add_line(line: Line) -> None:
        of_members = bool(line.members)
        formula = [_formula(line) if not of_members else "", line.numbers]
        formula.append(f"{line.kind}: {line.source}")
        add(line.num_bytes, f"{line.what}\n{line.why}", "\n".join(one for one in formula if one))
        shown, num_others, rest = _split(found, line)
        for one in shown:
            if wide:
                formula = [f"{one.shape} {one.dtype}", one.numbers]
                add(one.num_bytes, f"  {one.what}", " = ".join(part for part in formula if part))
            else:
                add(one.num_bytes, f"  {one.what}", f"    {one.numbers}" if one.numbers else "")
        if num_others:
            add(rest, f"  {num_others} smaller ones")

    def add_total(name: str, num_bytes: int) -> None:
        rules.update((len(rows) - 1, len(rows)))
        add(num_bytes, name)

    for line in found.lines:
        add_line(line)
    allocated, reserved, device = _totals(found)
    add_total(*allocated)
    for line in found.card:
        if line.part == "context":
            add_total(*reserved)
        add_line(line)
    add_total(*device)
    columns = ("bytes", "share", "tensor", *(["formula, numbers, kind: source"] if wide else []))
    return Sheet(
        title=_title(found),
        columns=columns,
        right=("bytes", "share"),
        rows=rows,
        rules=frozenset(rules),
    )


def _markdown_ledger(found: Explanation) -> Sheet:
    used = found.prediction.memory.device_used_bytes
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
        for one in line.members:
            add(one, "· ")

    for line in (*found.lines, *found.card):
        add(line)
    for name, num_bytes in _totals(found):
        share = f"{num_bytes / used:.1%}"
        rows.append((format_bytes(num_bytes), share, f"**{name}**", *[""] * 5))
    return Sheet(
        title=_title(found),
        columns=("bytes", "share", "tensor", "formula", "numbers", "kind", "source", "alive"),
        right=("bytes", "share"),
        rows=rows,
    )


# --- moments and alternatives


def _other_sheets(found: Explanation) -> Iterator[Sheet]:
    yield moments_sheet(found)
    if found.layer:
        yield layer_sheet(found)
    training = found.prediction.run.phase == "finetune"
    yield methods_sheet(
        found, "the same job by method" if training else "the same job by storage of the weights"
    )
    if found.caches:
        yield caches_sheet(found)
    yield savings_sheet(found)
    if found.ranks:
        yield ranks_sheet(found)


def moments_sheet(found: Explanation) -> Sheet:
    peak = max(found.moments.values())
    rows = [
        (name, format_bytes(size), "peak" if size == peak else format_bytes(size - peak))
        for name, size in found.moments.items()
    ]
    numbers = ("allocated", "against the peak")
    return Sheet(title="moments of the run", columns=("moment", *numbers), right=numbers, rows=rows)


def layer_sheet(found: Explanation) -> Sheet:
    """Tensors of one layer; what is too small for a row is summed up."""
    total = sum(line.num_bytes for line in found.layer)
    shown = [line for line in found.layer if line.num_bytes >= SMALL_LAYER_SHARE * total]
    rest = found.layer[len(shown) :]
    rows = [
        (
            format_bytes(line.num_bytes),
            line.what,
            line.numbers or f"{line.shape} {line.dtype}",
        )
        for line in shown
    ]
    if rest:
        size = sum(line.num_bytes for line in rest)
        rows.append((format_bytes(size), f"{len(rest)} smaller ones", ""))
    rows.append((format_bytes(total), "one layer", ""))
    return Sheet(
        title="what one layer keeps while it is recomputed",
        columns=("bytes", "tensor", "numbers"),
        right=("bytes",),
        rows=rows,
        rules=frozenset({len(rows) - 2}),
    )


def methods_sheet(found: Explanation, title: str) -> Sheet:
    """One column for each alternative, one row for each part."""
    chosen = found.methods
    names = tuple(f"{one.name} *" if _is_asked(found, one) else one.name for one in chosen)
    rows: list[tuple[str, ...]] = []
    predictions = [one.prediction for one in chosen]
    if found.prediction.run.phase == "finetune":
        rows.append(("trained", *(format_count(one.num_trainable_params) for one in predictions)))
        rows.append(("of all", *(_trained_share(one) for one in predictions)))
    for part in PARTS:
        sizes = [one.memory.breakdown.get(part, 0) for one in predictions]
        if any(sizes):
            rows.append((part, *(format_bytes(size) if size else "-" for size in sizes)))
    rows.append(
        (
            "memory used",
            *(format_bytes(one.memory.device_used_bytes) for one in predictions),
        )
    )
    rows.append(("fits", *(VERDICTS[one.verdict] for one in predictions)))
    rows.append((_time_name(found), *(_time(one) for one in predictions)))
    return Sheet(title=f"{title} (* as asked)", columns=("", *names), right=names, rows=rows)


def _is_asked(found: Explanation, one: Alternative) -> bool:
    return one.prediction.run == found.prediction.run


def _trained_share(one: Prediction) -> str:
    return f"{one.num_trainable_params / one.num_params:.2%}"


def _time_name(found: Explanation) -> str:
    return "per step" if found.prediction.run.phase == "finetune" else "per token"


def _time(one: Prediction) -> str:
    return format_seconds(one.time.step_s or one.time.time_per_token_s)


def savings_sheet(found: Explanation) -> Sheet:
    numbers = ("saves", "device memory used", _time_name(found))
    rows = [
        (
            one.name,
            format_bytes(found.saved_bytes(one)),
            format_bytes(one.prediction.memory.device_used_bytes),
            _time(one.prediction),
            VERDICTS[one.prediction.verdict],
        )
        for one in found.savings
    ]
    return Sheet(
        title="one choice made differently",
        columns=("change", *numbers, "fits"),
        right=numbers,
        rows=rows,
    )


def ranks_sheet(found: Explanation) -> Sheet:
    numbers = ("trained", "of all", "device memory used", _time_name(found))
    rows = [
        (
            f"{one.name} *" if _is_asked(found, one) else one.name,
            format_count(one.prediction.num_trainable_params),
            _trained_share(one.prediction),
            format_bytes(one.prediction.memory.device_used_bytes),
            _time(one.prediction),
            VERDICTS[one.prediction.verdict],
        )
        for one in found.ranks
    ]
    return Sheet(
        title="the same job by rank (* as asked)",
        columns=("rank", *numbers, "fits"),
        right=numbers,
        rows=rows,
    )


def caches_sheet(found: Explanation) -> Sheet:
    numbers: Sequence[str] = ("block", "per token", "kept", "cache", "device memory used")
    rows = [
        (
            f"{one.kv_cache} *" if one.prediction.run == found.prediction.run else one.kv_cache,
            str(one.block_tokens),
            format_bytes(one.token_bytes),
            str(one.kept_tokens),
            format_bytes(one.cache_bytes),
            format_bytes(one.prediction.memory.device_used_bytes),
            VERDICTS[one.prediction.verdict],
        )
        for one in found.caches
    ]
    return Sheet(
        title="key-value cache by engine; block and kept in tokens of one sequence (* as asked)",
        columns=("cache", *numbers, "fits"),
        right=tuple(numbers),
        rows=rows,
    )
