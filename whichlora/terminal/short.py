"""The answer of a run on one screen; `--all` and the files have the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whichlora.predict.host_memory import HOST_MEMORY
from whichlora.predict.notes import HOST_BOUND
from whichlora.search.feasibility import (
    Candidate,
    accepted,
    best_of_models,
    least_chance,
    likeliest_of_models,
)
from whichlora.terminal.answer import (
    besides_in_short,
    explanation,
    print_counts,
    print_gpus_of,
    print_starts,
    print_training,
    verdict_of,
)
from whichlora.terminal.sheet import Document, Sheet
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import variant
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from whichlora.workflow.answer import Answer

MAX_MODELS = 3
MAX_OTHERS = 1  # reasons beside those of the winner
MAX_OF_HOST = 2  # of what a node has no memory for; the largest models come first
MAX_NOTES = 2
TO_MEET_IT = " chance to meet it)"
_BY_CONFIG = "memory by the config; "  # as it is where no run has corrected it
CERTAIN = f" (100%{TO_MEET_IT}"  # goes without saying on one screen


def print_short(answer: Answer) -> None:
    """The best candidate of each model, the winner with its reasons, and where the details are."""
    console = open_console()
    if answer.choice is None:
        _print_models(console, answer)
    else:
        print_gpus_of(console, answer.choice)
    print_reasons(console, answer)


def print_reasons(console: Console, answer: Answer) -> None:
    """What stands below the table: the winner with its reasons, notes, and where the rest is."""
    print_counts(console, answer)
    for line in reason_lines(answer):
        say(console, line)
    if "report" in answer.files:
        more = len(_reasons(answer)[1]) - MAX_OTHERS
        noun = "reason" if more == 1 else "reasons"
        reasons = f" ({more} more {noun} there, or with --all)" if more > 0 else ""
        say(console, f"report: {answer.files['report']}{reasons}", whole=True)
    if answer.training is not None and "error" not in answer.training:
        print_training(console, answer)
    elif "job" in answer.files and answer.winner is not None:
        print_starts(console, answer)


def reason_lines(answer: Answer) -> Iterator[str]:
    """The winner with its reasons, what must be known of it, and what stands behind the figures."""
    shown, others = _reasons(answer)
    for block in (*shown, *others[:MAX_OTHERS]):
        for line in block:
            yield line.removesuffix(CERTAIN).replace(TO_MEET_IT, " chance)")
    for note in _notes(answer):
        yield f"note: {note}"
    if also := besides_in_short(answer):
        yield also
    yield f"basis: {answer.basis.removeprefix(_BY_CONFIG)}"


def _reasons(answer: Answer) -> tuple[list[list[str]], list[list[str]]]:
    """Blocks of lines that are always shown, and the others."""
    blocks = _blocks(explanation(answer, brief=True))
    on_gpus = ("GPU: ", "GPUs: ")
    of_host = [block for block in blocks if HOST_MEMORY in block[0]][:MAX_OF_HOST]
    shown = [
        block
        for i, block in enumerate(blocks)
        if i == 0 or block[0].startswith(on_gpus) or block in of_host
    ]
    return shown, [block for block in blocks if block not in shown]


def best_of_each_model(answer: Answer) -> list[Candidate]:
    """The best candidate of each model that meets the limits, or may, the winner's first.

    A model that ranks before the winner and likely fits is next, the likeliest first. One that
    surely fits stands before one that is unlikely to.
    """
    winner = [] if answer.winner is None else [answer.winner]
    certain = best_of_models(answer.finetune, least_chance(answer.plan)).values()
    unsure = likeliest_of_models(answer.may_fit)
    likely = [candidate for candidate in unsure if accepted(candidate)]
    best: dict[str, Candidate] = {}
    for candidate in (*winner, *likely, *certain, *unsure):
        best.setdefault(candidate.run.model, candidate)
    return list(best.values())


def answer_document(answer: Answer) -> Document:
    """The same for a notebook, the models on the recommended GPU."""
    title, *lines = map(str.strip, reason_lines(answer))
    sheet = _models_sheet(answer, best_of_each_model(answer))
    return Document(title=title, sheets=[sheet] if sheet.rows else [], lines=lines)


def _models_sheet(answer: Answer, models: Sequence[Candidate]) -> Sheet:
    """The first of `models`, the best candidate of each."""
    numbers = ("batch", "peak", "total")
    return Sheet(
        title=f"the best of each model on {answer.gpu.key}",
        columns=("model", "variant", *numbers, "source", "verdict"),
        right=numbers,
        rows=[
            (
                candidate.run.model,
                variant(candidate.run, answer.plan),
                str(candidate.run.batch_size),
                format_bytes(candidate.memory_bytes.value),
                "-" if candidate.total_s is None else format_seconds(candidate.total_s.value),
                candidate.source,
                verdict_of(answer, candidate),
            )
            for candidate in models[:MAX_MODELS]
        ],
    )


def _print_models(console: Console, answer: Answer) -> None:
    models = best_of_each_model(answer)
    if not models:
        return
    sheet = _models_sheet(answer, models)
    more = not_shown(answer, models, MAX_MODELS)
    print_table(
        console,
        sheet.columns,
        sheet.rows,
        right=sheet.right,
        lift=("source", "variant"),
        spare=("source", "variant"),
        title=sheet.title,
        caption=f"{', '.join(more)}: --all" if more else "",
    )


def not_shown(answer: Answer, models: Sequence[Candidate], rows: int) -> list[str]:
    """How many models a table of so many `rows` leaves out, by what became of them."""
    least = least_chance(answer.plan)
    likely = sum(accepted(candidate, least) for candidate in models[rows:])
    unsure = len(models[rows:]) - likely
    looked_at = {candidate.run.model for candidate in (*answer.inference, *answer.finetune)}
    refused = {refusal.model for refusal in answer.refused}
    counts = (
        (likely, "likely meets every limit", "likely meet every limit"),
        (unsure, "may fit", "may fit"),
        (len(looked_at) - len(models), "misses a limit", "miss a limit"),
        (
            len(set(answer.plan.models) - looked_at - refused),
            "that ranks below was not looked at",
            "that rank below were not looked at",
        ),
    )
    said = [(count, one if count == 1 else many) for count, one, many in counts if count > 0]
    return [f"{count}{' more' * (i == 0)} {fate}" for i, (count, fate) in enumerate(said)]


def _blocks(lines: list[str]) -> list[list[str]]:
    """Each line with the indented ones below it."""
    blocks: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and blocks:
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return blocks


def _notes(answer: Answer) -> list[str]:
    """What must be known before the winner is trained, and what names were taken as.

    Of many names, the winner's. What a time is of stands in the report.
    """
    meanings = list(answer.plan.notes)
    if len(meanings) > MAX_NOTES and answer.winner is not None:
        meanings = [note for note in meanings if answer.winner.run.model in note]
    cautions = (note for note in answer.cautions if not note.startswith(HOST_BOUND))
    return list(dict.fromkeys((*cautions, *answer.gpu.notes, *meanings[:MAX_NOTES])))
