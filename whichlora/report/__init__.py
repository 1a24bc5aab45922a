"""Predictions and answers as text: terminal tables, CSV and Markdown."""

from whichlora.report.answer import explanation, print_answer
from whichlora.report.calibrations import print_calibration, print_merged, print_refit
from whichlora.report.catalogs import print_gpus, print_models
from whichlora.report.estimate import print_predictions
from whichlora.report.explained import explanation_markdown, print_explanation
from whichlora.report.facts import answer_facts, detailed_row
from whichlora.report.files import write_candidates, write_comparison, write_summary
from whichlora.report.guides import print_guide, write_guide
from whichlora.report.handovers import print_handover
from whichlora.report.live import SweepProgress
from whichlora.report.placements import print_placements
from whichlora.report.progress import Progress
from whichlora.report.rows import candidate_row, comparison_rows, comparison_summary
from whichlora.report.short import print_short
from whichlora.report.sweep import print_recommendation, print_status, print_sweep
from whichlora.report.terminal import MAX_REASONS
from whichlora.report.words import deciding, describe, reason, times, variant

__all__ = [
    "MAX_REASONS",
    "Progress",
    "SweepProgress",
    "answer_facts",
    "candidate_row",
    "comparison_rows",
    "comparison_summary",
    "deciding",
    "describe",
    "detailed_row",
    "explanation",
    "explanation_markdown",
    "print_answer",
    "print_calibration",
    "print_explanation",
    "print_gpus",
    "print_guide",
    "print_handover",
    "print_merged",
    "print_models",
    "print_placements",
    "print_predictions",
    "print_recommendation",
    "print_refit",
    "print_short",
    "print_status",
    "print_sweep",
    "reason",
    "times",
    "variant",
    "write_candidates",
    "write_comparison",
    "write_guide",
    "write_summary",
]
