"""One run on every accelerator, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from whichlora.predict.cost_words import cheapest_hour, cheapest_of, cost_of, per_million
from whichlora.predict.host_memory import most_on_host
from whichlora.predict.largest import Placement
from whichlora.predict.notes import UNVERIFIED
from whichlora.predict.parallel_choice import ON_CHOICE
from whichlora.predict.words import VERDICTS, describe, gpus_in_words, not_started
from whichlora.serving import get_engine
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction, Verdict
from whichlora.terminal.assumed import assumed_lines
from whichlora.terminal.sheet import WIDE, Document, Sheet
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import without_key
from whichlora.units import format_bytes, format_seconds

# Cards of each verdict that are shown where there are many: the smallest that fit, then those that
# come nearest.
MOST_SHOWN = {"fits": 24, "undecided": 8, "fails": 3}
MAX_CARDS = 40  # that are all shown
_HIDDEN: tuple[tuple[Verdict, str], ...] = (
    ("fits", "larger ones fit"),
    ("undecided", "may fit"),
    ("fails", "do not fit"),
)
_LEFT = ("accelerator", "fits", "strategy")  # columns of words
MAX_KEYS = 4  # cards that a note names
MAX_ANY = 10**6
MAX_NOTES = 8  # of which those on most cards are shown


def print_placements(placements: Sequence[Placement], *, whole: bool = True) -> None:
    """Accelerators in the given order; the refused ones follow with their reasons.

    Args:
        whole: with every card and note.
    """
    console = open_console()
    judged = _shown(placements, whole=whole)
    if judged:
        say(console, _what_runs(judged))
        console.print()
        sheet = placements_sheet(judged, wide=console.width >= WIDE)
        print_table(
            console,
            sheet.columns,
            sheet.rows,
            right=sheet.right,
            spare=("memory", "1M tokens"),  # the name of a card says its memory
            title=sheet.title,
        )
    for line in _closing(placements, judged, MAX_ANY if whole else MAX_NOTES):
        say(console, line)


def placements_document(placements: Sequence[Placement]) -> Document:
    """The same for Markdown and for a notebook."""
    judged = _shown(placements, whole=False)
    sheets = [placements_sheet(judged, wide=True)] if judged else []
    title = _what_runs(judged) if judged else "no card can run it"
    return Document(
        title=title, sheets=sheets, lines=tuple(_closing(placements, judged, MAX_NOTES))
    )


def _shown(placements: Sequence[Placement], *, whole: bool) -> list[Placement]:
    """Those that are judged; of many, the first of each verdict."""
    judged = [each for each in placements if each.prediction is not None]
    if whole or len(judged) <= MAX_CARDS:
        return judged
    shown: dict[str, list[Placement]] = {verdict: [] for verdict in MOST_SHOWN}
    for each in judged:
        if each.prediction is not None:
            shown[each.prediction.verdict].append(each)
    keys = {each.gpu.key for verdict, most in MOST_SHOWN.items() for each in shown[verdict][:most]}
    return [each for each in judged if each.gpu.key in keys]


def _hidden(placements: Sequence[Placement], judged: Sequence[Placement]) -> str:
    """How many cards of each verdict are not among those `judged` and shown; empty where none."""
    shown = {each.gpu.key for each in judged}
    verdicts = [
        each.prediction.verdict
        for each in placements
        if each.prediction is not None and each.gpu.key not in shown
    ]
    numbers = [
        f"{count} {words}" for verdict, words in _HIDDEN if (count := verdicts.count(verdict))
    ]
    return f"more cards: {', '.join(numbers)}; --all shows them" if numbers else ""


def _named(keys: Sequence[str]) -> str:
    more = len(keys) - MAX_KEYS
    return ", ".join(keys[:MAX_KEYS]) + (f" and {more} more" if more > 0 else "")


def _what_runs(judged: Sequence[Placement]) -> str:
    runs = [each.prediction.run for each in judged if each.prediction is not None]
    if len({run.parallel.in_words for run in runs}) == 1:
        return describe(runs[0])
    alone = describe(replace(runs[0], parallel=ParallelConfig()))
    return f"{alone}, on {gpus_in_words(runs[0].parallel.gpus)}"


def _closing(
    placements: Sequence[Placement], judged: Sequence[Placement], most: int
) -> Iterator[str]:
    """What is said below the table of those that are `judged` and shown, with `most` notes."""
    if hidden := _hidden(placements, judged):
        yield hidden
    yield from assumed_lines([each.prediction for each in judged if each.prediction is not None])
    for each in judged:
        if each.prediction is not None:  # its memory may be less than the card's
            yield from not_started(each.prediction)
    refusals: dict[str, list[str]] = {}
    for placement in placements:
        if placement.refusal:
            reason = without_key(placement.refusal, placement.gpu.key)
            refusals.setdefault(reason, []).append(placement.gpu.key)
    for reason, keys in refusals.items():
        yield f"left out: {_named(keys)}: {reason}"
    notes = _notes(judged)
    for text, keys in notes[:most]:
        of_all = len(keys) == len(judged)
        yield f"note: {text}" if of_all else f"note: {text} ({_named(keys)})"
    if len(notes) > most:
        yield f"{len(notes) - most} more notes on single cards: --all"
    if any(each.prediction and _host(each.prediction) for each in judged):
        yield (
            "host memory: what a node needs, pinned or while it loads; --host-memory states what "
            "it has"
        )
    if judged and all(map(_is_too_large_for_one, judged)):
        yield "several cards: `whichlora estimate` with --gpus 2,4,8,16 says how many hold it"
    if any(placement.gpu.unverified for placement in judged):
        yield "* a fact of its datasheet is not confirmed; `whichlora gpus` says which"
    if not any(each.prediction and each.prediction.serving for each in judged):
        yield "a nearly full card needs less: PyTorch gives idle memory back before it fails"
    yield from _cheapest(placements)
    bases = {placement.prediction.basis for placement in judged if placement.prediction is not None}
    for text in sorted(bases):
        yield f"basis: {text}"


def _is_too_large_for_one(placement: Placement) -> bool:
    """Whether one card was asked, and does not hold the run."""
    prediction = placement.prediction
    if prediction is None or prediction.verdict in ("fits", "undecided"):
        return False
    run = prediction.run
    return run.parallel.gpus == 1 and get_engine(run.serving).num_gpus(run) == 1


def _notes(judged: Sequence[Placement]) -> list[tuple[str, list[str]]]:
    """Each note with its cards, those on most cards first; the strategy has a column."""
    notes: dict[str, list[str]] = {}
    for placement in judged:
        for text in () if placement.prediction is None else placement.prediction.notes:
            if not text.startswith((UNVERIFIED, *ON_CHOICE)):  # the stars say so
                names_it = text in placement.gpu.notes  # what its name was taken as
                note = text if names_it else without_key(text, placement.gpu.key)
                notes.setdefault(note, []).append(placement.gpu.key)
    return sorted(notes.items(), key=lambda note: -len(note[1]))


def _order_in_words(placements: Sequence[Placement]) -> str:
    verdicts = {each.prediction.verdict for each in placements if each.prediction is not None}
    if "fits" in verdicts:
        return "cards that fit, the smallest first; then the others"
    if "undecided" in verdicts:
        return "no card surely fits; those that may come first"
    return "no card fits; the nearest come first"


def _host(prediction: Prediction) -> int:
    return 0 if prediction.several_gpus is None else most_on_host(prediction.several_gpus)


def _cheapest(placements: Sequence[Placement]) -> list[str]:
    """The accelerator on which a million tokens cost least, of those that fit, with its price."""
    best = cheapest_of(placements)
    if best is None or best.prediction is None or best.prediction.cost is None:
        return []
    cost = best.prediction.cost
    by_tokens = cost_of(cost, cost.s_per_million, f"cheapest, 1M tokens on {best.gpu.key}")
    return [*by_tokens, cheapest_hour(placements)]


def placements_sheet(placements: Sequence[Placement], *, wide: bool) -> Sheet:
    """One row per accelerator; a narrow sheet leaves out the upper bound of the memory."""
    rows: list[tuple[str, ...]] = []
    time_columns: tuple[str, ...] = ("time",)
    for placement in placements:
        prediction = placement.prediction
        if prediction is None:
            continue
        time = prediction.time
        waits: tuple[float, ...] = (time.step_s or time.time_per_token_s,)
        time_columns = ("per step",) if time.step_s else ("per token",)
        if (serving := prediction.serving) is not None:
            time_columns = ("first token", "each further")
            engine = serving.time
            waits = (math.nan, math.nan) if engine is None else (engine.ttft_s, engine.tpot_s)
        bound = format_bytes(prediction.memory.interval_bytes[1])
        rows.append(
            (
                f"{placement.gpu.key} *" if placement.gpu.unverified else placement.gpu.key,
                format_bytes(placement.gpu.memory_bytes),
                format_bytes(prediction.memory.device_used_bytes),
                *([bound] if wide else []),
                VERDICTS[prediction.verdict],
                str(placement.batch_size) if placement.batch_size else "-",
                *map(format_seconds, waits),
                format_bytes(_host(prediction)) if _host(prediction) else "-",
                prediction.run.parallel.in_words,
                per_million(prediction),
            )
        )
    needs = ("memory", "need", "at most") if wide else ("memory", "need")
    most = "most at once" if len(time_columns) > 1 else "largest batch"
    heads = ("accelerator", *needs, "fits", most, *time_columns, "host", "strategy", "1M tokens")
    told = [any(row[place] != "-" for row in rows) for place in range(len(heads))]
    told[-2] = len({row[-2] for row in rows}) > 1
    kept = [place for place, is_told in enumerate(told) if is_told or place < len(heads) - 3]
    return Sheet(
        title=_order_in_words(placements),
        columns=tuple(heads[place] for place in kept),
        right=tuple(heads[place] for place in kept if heads[place] not in _LEFT),
        rows=[tuple(row[place] for place in kept) for row in rows],
    )
