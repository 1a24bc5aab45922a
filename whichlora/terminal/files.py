"""The files that an answer leaves: CSV and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whichlora.store.written import OTHER_FOLDER, write_files
from whichlora.terminal.answer import answer_notes, besides_training, explanation
from whichlora.terminal.life import stages_sheet
from whichlora.terminal.rows import candidate_row, comparison_rows
from whichlora.terminal.sheet import as_csv, markdown_table

if TYPE_CHECKING:
    from whichlora.workflow.answer import Answer


def _write_text(path: Path, text: str) -> Path:
    write_files({path: text.encode()}, instead=OTHER_FOLDER)
    return path


def write_candidates(path: Path, answer: Answer) -> Path:
    """The whole table of both stages as CSV; bytes and seconds."""
    candidates = [*answer.inference, *answer.finetune]
    return _write_text(path, as_csv([candidate_row(candidate) for candidate in candidates]))


def write_comparison(path: Path, answer: Answer) -> Path:
    """Predicted against measured for every profiled candidate, as CSV."""
    return _write_text(path, as_csv(comparison_rows(answer.compared)))


def write_summary(path: Path, answer: Answer) -> Path:
    """The answer and its reasons as Markdown."""
    lines = [f"# WhichLoRA on {answer.gpu.key}", "", *explanation(answer), ""]
    if answer.life is not None:
        lines.append(markdown_table(stages_sheet(answer.life)).strip())
    lines += [line.strip() for line in besides_training(answer)]
    lines += [f"Data: {answer.tokens}.", f"Basis: {answer.basis}."]
    lines += [f"Note: {note}." for note in answer_notes(answer)]
    return _write_text(path, "\n\n".join(line for line in lines if line) + "\n")
