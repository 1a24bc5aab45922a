"""How far measured peaks are from the ledger, as a share of one of its parts.

    python benchmarks/part_spread.py

The standard deviations of parts before any run (`predict/coefficients.py`) must not be smaller
than these say. A row's whole error is laid on each part that is 15 % of the peak or more, so that
it is an upper bound. Rows are the published peaks of allocated memory and the records of
`benchmarks/gpu/`. The context is what records used beside the allocator's segments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table
from published import gpu_of
from published.memory import compared_memory

from whichlora.calibration.load import model_of
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.judgement import ALLOCATED_PARTS
from whichlora.predict.predict import memory_prediction
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.results import Measurement
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import read_measurements

GPUS = ("h100-sxm-80gb", "h200-sxm-141gb")
LEAST = 0.15  # of the peak
MANAGED = "paged"  # optimizers whose memory the driver moves: it is no context


def records(key: str) -> list[Measurement]:
    found = read_measurements([ROOT / "calibration"], key)
    return [one for one in found if one.outcome == "ok" and "design" in one.provenance]


def measured_peaks() -> Iterator[tuple[ResolvedRun, float]]:
    for row in compared_memory():
        one = row.observation
        if one.quantity == "peak_allocated":
            yield resolve(one.model, one.run, gpu_of(one.gpu)), one.value
    for key in GPUS:
        for record in records(key):
            if record.peak_allocated_bytes:
                job = resolve(model_of(record), record.run, find_gpu(key))
                yield job, record.peak_allocated_bytes


def shares() -> Mapping[str, list[float]]:
    """Errors as shares of a part, by part."""
    found: dict[str, list[float]] = {part: [] for part in ALLOCATED_PARTS}
    for job, measured in measured_peaks():
        memory, _ = memory_prediction(judged_run(job, prior_calibration(job.gpu)))
        for part, size in memory.breakdown.items():
            if part in found and size >= LEAST * memory.peak_allocated_bytes:
                found[part].append(abs(measured - memory.peak_allocated_bytes) / size)
    return {part: errors for part, errors in found.items() if len(errors) > 1}


def contexts(key: str) -> list[float]:
    """What is used beside reserved memory, over what `gpu.json` states, less one."""
    stated = find_gpu(key).context_bytes
    assert stated is not None
    return [
        abs((one.device_used_bytes - one.peak_reserved_bytes) / stated - 1)
        for one in records(key)
        if one.device_used_bytes and one.peak_reserved_bytes and MANAGED not in one.run.optimizer
    ]


def main() -> None:
    rows = [*shares().items(), *((f"context, {key}", contexts(key)) for key in GPUS)]
    cells = [
        (name, len(errors), *(f"{100 * value:.1f} %" for value in figures(errors)))
        for name, errors in rows
        if errors
    ]
    print(markdown_table(("part", "n", "median", "p95", "worst"), cells))


def figures(errors: list[float]) -> tuple[float, float, float]:
    return median(errors), quantiles(errors, n=20, method="inclusive")[-1], max(errors)


if __name__ == "__main__":
    main()
