"""Reserved bytes: the replay of the run's own requests against that of real code.

The other side is kept: `traces/draw-N.jsonl` and `traces/later-types.jsonl` have what the
allocator's rules make of the storages that the libraries' real code made and freed on fake tensors.
The two lists of requests share nothing but these rules.

    python benchmarks/reserved_accuracy.py            the tables, in minutes
    python benchmarks/reserved_accuracy.py --every 5  of every fifth run
    python benchmarks/reserved_accuracy.py --write    docs/accuracy/reserved.md
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import image_traces
import kernel_traces
import memory_samples as samples
import published
import trainer_traces
from markdown_tables import markdown_table

from whichlora.predict import quantities
from whichlora.predict import resolve as resolution
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.judgement import MEMORY_CONFIDENCE, REPLAYED_SPREAD, MemoryJudgement
from whichlora.spec.run import RunConfig

DOCUMENT = ROOT / "docs" / "accuracy" / "reserved.md"
FILES = (
    *(f"draw-{number}.jsonl" for number in range(1, 6)),
    "later-types.jsonl",
    "newest-types.jsonl",
)
NUM_WORST = 15
ENDLESS_GPU = replace(samples.GPU, memory_bytes=samples.ENDLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One kept trace and what is predicted of it, relative to it.

    Args:
        estimate: error of the estimate that arrays of runs have.
        answer: error of what a prediction of the run says.
        is_replayed: the answer is a replay; else the estimate stands.
        excess: of the trace over the upper end of the stated interval.
        needed_spread: the `REPLAYED_SPREAD` whose interval ends at the trace.
    """

    run: RunConfig
    estimate: float
    answer: float
    is_replayed: bool
    excess: float
    needed_spread: float


def needed_spread(judged: MemoryJudgement, reserved_bytes: float) -> float:
    """The `REPLAYED_SPREAD` with which the interval of `judged` ends at `reserved_bytes`."""
    predicted = judged.peak_reserved_bytes
    replayed, estimated = (
        (replace(judged, is_replayed=kind).reserved_interval()[1] - predicted) ** 2
        for kind in (True, False)
    )
    # the square of half the width is that of the other parts, and one that the spread scales
    of_allocator = (estimated - replayed) / (1 - REPLAYED_SPREAD**2)
    missing = (reserved_bytes - predicted) ** 2 - (estimated - of_allocator)
    if missing <= 0:
        return 0.0
    return math.sqrt(missing / of_allocator) if of_allocator > 0 else math.inf


def spread_of(needed: Sequence[float]) -> float:
    """The spread whose interval holds the stated share of the next run (split conformal)."""
    rank = math.ceil(MEMORY_CONFIDENCE * (len(needed) + 1))
    return sorted(needed)[rank - 1] if rank <= len(needed) else math.inf


def published_spreads() -> Iterator[float]:
    """`needed_spread` of every published peak of training whose run is replayed."""
    for row in published.read_all():
        if not isinstance(row, published.Observation) or row.quantity != "peak_reserved":
            continue
        if row.run.phase == "finetune":
            gpu = published.gpu_of(row.gpu)
            job = resolution.resolve(row.model, row.run, gpu)
            judged = judged_run(job, prior_calibration(gpu))
            if judged.is_replayed:
                yield needed_spread(judged, row.value)


def compared(run: RunConfig, traced: int) -> Compared:
    """`run` against `traced` bytes, without a limit of memory."""
    job = samples.as_traced(resolution.resolve(samples.model_of(run.model), run, ENDLESS_GPU))
    return replace(compared_job(job, traced), run=run)


def compared_images(phase: str = "finetune") -> Iterator[Compared]:
    """Kept traces of runs with images."""
    for line in [*image_traces.records(), *image_traces.records("sft")]:
        run = RunConfig.from_dict(line["run"])
        if run.phase == phase and run.images and "reserved" in line:
            yield _without_warm_up(image_traces.job_of(line), line["reserved"])


def compared_sft() -> Iterator[Compared]:
    """Kept traces of TRL's `SFTTrainer`."""
    for line in trainer_traces.records():
        if "reserved" in line and line["run"]["trainer"] == "sft":
            yield _without_warm_up(trainer_traces.job_of(line), line["reserved"])


def compared_liger() -> Iterator[Compared]:
    """Kept traces of the Trainer with Liger's kernels."""
    for line in kernel_traces.records("liger"):
        yield _without_warm_up(trainer_traces.job_of(line), line["reserved"])


def _without_warm_up(job: resolution.ResolvedRun, traced: int) -> Compared:
    """`job` against a trace that does not begin with the warm-up block of loading."""
    gpu = replace(job.gpu, memory_bytes=samples.ENDLESS)
    job = samples.as_traced(replace(job, gpu=gpu))
    return compared_job(replace(job, dtypes=replace(job.dtypes, loads_at_once=False)), traced)


def compared_job(job: resolution.ResolvedRun, traced: int) -> Compared:
    """`job` against `traced` bytes, without workspaces."""
    run, gpu = job.run, job.gpu
    counted = quantities.ledger(job)
    workspace = counted.workspace_bytes
    judged = judged_run(job, prior_calibration(gpu))
    _, high = judged.reserved_interval()
    is_replayed = judged.is_replayed
    if run.phase == "inference":  # whose interval a replay does not narrow
        is_replayed = quantities.ledger_and_idle(job)[1] is not None
    estimate = counted.peak_allocated_bytes + counted.idle_bytes - workspace
    return Compared(
        run=run,
        estimate=estimate / traced - 1,
        answer=(judged.peak_reserved_bytes - workspace) / traced - 1,
        is_replayed=is_replayed,
        excess=traced / (high - workspace) - 1,
        needed_spread=needed_spread(judged, traced + workspace),
    )


def traced_runs(every: int) -> Iterator[tuple[RunConfig, int]]:
    """Kept traces with the bytes that the real requests reserve."""
    lines = [
        line
        for name in FILES
        for line in samples.read_lines(samples.TRACES / name)
        if "refused" not in line
    ]
    for line in lines[::every]:
        yield RunConfig.from_dict(line["run"]), line["peak_reserved_bytes"]


def _p95(values: Sequence[float]) -> float:
    sizes = sorted(map(abs, values))
    return sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]


def errors(values: Sequence[float]) -> tuple[str, ...]:
    """n, median and 95th percentile of the sizes, worst high and worst low."""
    sizes = sorted(map(abs, values))
    low, high = min(values), max(values)
    figures = (sizes[len(sizes) // 2], _p95(values))
    return (
        str(len(sizes)),
        *(f"{figure:.2%}".replace("%", " %") for figure in figures),
        *(f"{figure:+.1%}".replace("%", " %") for figure in (high, low)),
    )


def _training_groups(found: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    replayed = [one for one in found if one.is_replayed]
    for method in ("full", "lora", "qlora", "dora", "qdora"):
        for on in (True, False):
            name = f"{method}, {'checkpointing' if on else 'no checkpointing'}"
            yield (
                name,
                [
                    one
                    for one in replayed
                    if one.run.method == method
                    and (one.run.gradient_checkpointing is not False) == on
                ],
            )


def _image_groups(found: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    for name in sorted({one.run.model for one in found}):
        yield name, [one for one in found if one.run.model == name and one.is_replayed]


def _inference_groups(found: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    by_name: dict[str, list[Compared]] = {}
    for one in found:
        task = samples.model_of(one.run.model).task
        name = task if task == "encoder" else f"{task}, {one.run.kv_cache} cache"
        if one.is_replayed:
            by_name.setdefault(name, []).append(one)
    yield from sorted(by_name.items())


def table(found: Sequence[Compared], groups: Iterable[tuple[str, Sequence[Compared]]]) -> str:
    rows = []
    replayed = [one for one in found if one.is_replayed]
    for name, chosen in (("**all**", found), ("**replayed**", replayed), *groups):
        if chosen:
            rows.append((name, "estimate", *errors([one.estimate for one in chosen])))
            rows.append(("", "answer", *errors([one.answer for one in chosen])))
    head = ("runs", "by", "n", "median", "p95", "worst high", "worst low")
    return markdown_table(head, rows, first_figure=2)


def worst(found: Sequence[Compared]) -> str:
    rows = [
        (
            f"{one.answer:+.1%}".replace("%", " %"),
            f"{one.estimate:+.1%}".replace("%", " %"),
            "replay" if one.is_replayed else "estimate",
            ", ".join(f"{name} {value}" for name, value in samples.settings(one.run).items()),
        )
        for one in sorted(found, key=lambda one: -abs(one.answer))[:NUM_WORST]
    ]
    return markdown_table(("answer", "estimate", "by", "settings"), rows, first_figure=9)


def _summary(found: Sequence[Compared]) -> str:
    above = sum(one.excess > 0 for one in found)
    far_above = sum(one.excess > 0.03 for one in found)
    replayed = [one for one in found if one.is_replayed]
    share = _p95([one.answer for one in replayed]) / _p95([one.estimate for one in replayed])
    return (
        f"{len(replayed)} of {len(found)} runs are replayed; the 95th percentile of their errors "
        f"is {share:.2f} of the estimate's. Of all runs {above} lie "
        f"above the upper end of the stated 95 % interval, {far_above} by more than 3 %.\n\n"
    )


def document(found: Sequence[Compared]) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    trained = [one for one in found if one.run.phase == "finetune"]
    inferred = [one for one in found if one.run.phase == "inference"]
    traced = [one.needed_spread for one in trained if one.is_replayed]
    measured = list(published_spreads())
    seen, served = list(compared_images()), list(compared_images("inference"))
    tuned, fused = list(compared_sft()), list(compared_liger())
    return (
        "# Accuracy of reserved memory\n\n"
        f"Made by `benchmarks/reserved_accuracy.py --write` on {today}; no GPU was used. A "
        "prediction of one run replays the run's requests, as the symbolic layers make them, "
        "through the caching allocator's rules. The other side are the requests that the real "
        "code of transformers, PEFT and bitsandbytes makes on fake tensors, through the same "
        "rules. So this page tests the requests and their order, not the rules; those are held "
        "against published GPU figures ([published.md](published.md)). Nothing was fitted to "
        "either.\n\n"
        "*Estimate* is what millions of runs at once are judged by. *Answer* is what a prediction "
        "of one run says: the replay, or the estimate where a tensor that matters is missing "
        "among the events. Those are shared layers, Gemma 4's, and attention to images; in "
        "inference also encoder-decoders, recurrent layers, latent attention, quantised caches; "
        "else where live bytes differ by more than 1 % from the ledger's.\n\n"
        f"## Training\n\n{table(trained, _training_groups(trained))}\n\n{_summary(trained)}"
        "The share of the allocator's spread that a replay must leave for the interval to hold "
        f"95 % (`REPLAYED_SPREAD`, {REPLAYED_SPREAD}): {spread_of(traced):.2f} by {len(traced)} "
        f"traces, {spread_of(measured):.2f} by {len(measured)} peaks published "
        "([published.md](published.md)).\n\n"
        f"### The worst\n\n{worst(trained)}\n\n"
        f"## Training with TRL's SFTTrainer\n\nTraces of `trainer_traces.py`.\n\n"
        f"{table(tuned, _training_groups(tuned))}\n\n{_summary(tuned)}"
        f"## Training with Liger's kernels\n\nTraces of `kernel_traces.py`.\n\n"
        f"{table(fused, _training_groups(fused))}\n\n{_summary(fused)}"
        f"### The worst\n\n{worst(fused)}\n\n"
        f"## Training with images\n\nTraces of `image_traces.py`, by class.\n\n"
        f"{table(seen, _image_groups(seen))}\n\n{_summary(seen)}"
        f"### The worst\n\n{worst(seen)}\n\n"
        f"## Inference\n\nOne to eight new tokens.\n\n"
        f"{table(inferred, _inference_groups(inferred))}\n\n{_summary(inferred)}"
        f"### The worst\n\n{worst(inferred)}\n\n"
        "## Inference with images\n\nTraces of `image_traces.py`, by class.\n\n"
        f"{table(served, _image_groups(served))}\n\n{_summary(served)}"
        f"### The worst\n\n{worst(served)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="only every n-th run")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    found = [compared(run, traced) for run, traced in traced_runs(options.every)]
    text = document(found)
    print(text)
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
