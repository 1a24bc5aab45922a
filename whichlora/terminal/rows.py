"""Candidates and comparisons as flat rows, for CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from whichlora.methods import get_method
from whichlora.search.feasibility import Candidate
from whichlora.terminal.words import deciding, times, variant

if TYPE_CHECKING:
    from whichlora.workflow.answer import Compared


def candidate_row(candidate: Candidate) -> dict[str, Any]:
    """One candidate as a flat row of the table: settings, values, and whether they are measured."""
    run, memory, time = candidate.run, candidate.memory_bytes, candidate.time_per_token_s
    total, is_timed = candidate.total_s, not isnan(time.value)
    training = run.phase == "finetune"
    has_method = training or run.serve == "as-trained"
    return {
        "model": run.model,
        "num_params": candidate.prediction.num_params,
        "phase": run.phase,
        "method": run.method if has_method else "",
        "r": run.r if has_method and "r" not in get_method(run.method).ignores else "",
        "serve": "" if training else run.serve,
        "quant": run.quant,
        "attn": run.attn,
        "optimizer": run.optimizer if training else "",
        "gradient_checkpointing": run.gradient_checkpointing if training else "",
        "batch_size": run.batch_size,
        "seq_len": run.seq_len if training else "",
        "gpus": run.parallel.gpus,
        "nodes": run.parallel.nodes,
        "parallel": run.parallel.strategy,
        "gradient_accumulation_steps": run.gradient_accumulation_steps if training else "",
        "prompt_len": "" if training else run.prompt_len,
        "max_new_tokens": "" if training else run.max_new_tokens,
        "verdict": candidate.verdict,
        "reason": deciding(candidate),
        "source": candidate.source,
        "outcome": candidate.measurement.outcome if candidate.measurement else "",
        "peak_bytes": round(memory.value),
        "peak_low_bytes": round(memory.low),
        "peak_high_bytes": round(memory.high),
        "time_per_token_s": time.value if is_timed else "",
        "time_per_token_low_s": time.low if is_timed else "",
        "time_per_token_high_s": time.high if is_timed else "",
        "total_time_s": "" if total is None else total.value,
        "total_time_low_s": "" if total is None else total.low,
        "total_time_high_s": "" if total is None else total.high,
        "gpu_time_s": "" if total is None else run.parallel.gpus * total.value,
        **_serving_cells(candidate),
    }


def _serving_cells(candidate: Candidate) -> dict[str, Any]:
    """What a serving engine answers; empty for a fine-tuning, and of transformers' generate."""
    run, serving = candidate.run, candidate.prediction.serving
    answers = ("context", "concurrency", "kv_pool_bytes", "kv_pool_tokens")
    names = (*answers, "max_running", "max_context")
    waits = None if serving is None else serving.time
    of_waits = ("ttft_s", "tpot_s", "output_tokens_per_s", "requests_per_s")
    return {
        "serving": run.serving if run.phase == "inference" else "",
        **{name: "" if serving is None else getattr(serving, name) for name in names},
        **{name: "" if waits is None else getattr(waits, name) for name in of_waits},
    }


def comparison_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Predicted against measured, before and after the refit: one row per measured quantity."""
    rows = []
    for comparison in compared:
        measurement, run = comparison.measurement, comparison.after.run
        base = {
            "model": run.model,
            "phase": run.phase,
            "variant": variant(run),
            "batch_size": run.batch_size,
            "tokens": run.seq_len if run.phase == "finetune" else run.prompt_len,
            "outcome": measurement.outcome,
        }
        quantities: list[tuple[str, str, float, list[float]]] = []
        if measurement.peak_allocated_bytes:
            quantities.append(
                (
                    "peak_allocated",
                    "bytes",
                    float(measurement.peak_allocated_bytes),
                    [
                        float(p.memory.peak_allocated_bytes)
                        for p in (comparison.cold, comparison.before, comparison.after)
                    ],
                )
            )
        by_stage = [
            times(p, measurement) for p in (comparison.cold, comparison.before, comparison.after)
        ]
        for stages in zip(*by_stage, strict=True):
            name, _, measured = stages[0]
            quantities.append((name, "s", measured, [predicted for _, predicted, _ in stages]))
        for name, unit, measured, (cold, before, after) in quantities:
            rows.append(
                base
                | {
                    "quantity": name,
                    "unit": unit,
                    "measured": measured,
                    "cold": cold,
                    "before": before,
                    "after": after,
                    "cold_error": cold / measured - 1,
                    "before_error": before / measured - 1,
                    "after_error": after / measured - 1,
                }
            )
    return rows


def comparison_summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and worst absolute error of each quantity, cold, before and after the refit."""
    from statistics import median

    summary = []
    for quantity in dict.fromkeys(row["quantity"] for row in rows):
        chosen = [row for row in rows if row["quantity"] == quantity]
        entry: dict[str, Any] = {"quantity": quantity, "runs": len(chosen)}
        for stage in ("cold", "before", "after"):
            errors = [abs(row[f"{stage}_error"]) for row in chosen]
            entry[f"{stage}_median"] = median(errors)
            entry[f"{stage}_worst"] = max(errors)
        summary.append(entry)
    return summary
