"""Predictions and answers as text: terminal tables, CSV, Markdown and what a notebook shows."""

from whichlora.terminal import notebook
from whichlora.terminal.accuracy import (
    accuracy_document,
    contribution_document,
    print_contribution,
)
from whichlora.terminal.answer import explanation, print_answer
from whichlora.terminal.calibrations import print_calibration, print_merged, print_refit
from whichlora.terminal.catalogs import print_gpus, print_methods, print_models
from whichlora.terminal.estimate import predictions_document, print_predictions
from whichlora.terminal.explained import explanation_document, print_explanation
from whichlora.terminal.exports import print_export
from whichlora.terminal.facts import answer_facts, detailed_row
from whichlora.terminal.files import write_candidates, write_comparison, write_summary
from whichlora.terminal.guides import flat_rows, print_guide, write_guide
from whichlora.terminal.life import life_document, print_life
from whichlora.terminal.live import SweepProgress
from whichlora.terminal.own_links import print_own_links
from whichlora.terminal.placements import placements_document, print_placements
from whichlora.terminal.progress import Progress
from whichlora.terminal.recommended import print_recommended, recommended_document
from whichlora.terminal.rows import candidate_row, comparison_rows, comparison_summary
from whichlora.terminal.sheet import as_html, as_markdown
from whichlora.terminal.short import answer_document, print_short
from whichlora.terminal.sweep import print_recommendation, print_status, print_sweep
from whichlora.terminal.tables import MAX_REASONS
from whichlora.terminal.words import deciding, reason, times, variant

__all__ = [
    "MAX_REASONS",
    "Progress",
    "SweepProgress",
    "accuracy_document",
    "answer_document",
    "answer_facts",
    "as_html",
    "as_markdown",
    "candidate_row",
    "comparison_rows",
    "comparison_summary",
    "contribution_document",
    "deciding",
    "detailed_row",
    "explanation",
    "explanation_document",
    "flat_rows",
    "life_document",
    "notebook",
    "placements_document",
    "predictions_document",
    "print_answer",
    "print_calibration",
    "print_contribution",
    "print_explanation",
    "print_export",
    "print_gpus",
    "print_guide",
    "print_life",
    "print_merged",
    "print_methods",
    "print_models",
    "print_own_links",
    "print_placements",
    "print_predictions",
    "print_recommendation",
    "print_recommended",
    "print_refit",
    "print_short",
    "print_status",
    "print_sweep",
    "reason",
    "recommended_document",
    "times",
    "variant",
    "write_candidates",
    "write_comparison",
    "write_guide",
    "write_summary",
]
