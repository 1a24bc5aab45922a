"""Predictions against the records of one GPU: writes `docs/accuracy/<gpu>.md`.

    python benchmarks/gpu/accuracy.py h100-sxm-80gb --records calibration

Memory is predicted from formulas alone. Time is predicted cold (datasheet and priors), after a
few runs of training and of inference, and with a fit to all models but the one predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table, percent

from whichlora.calibration.fit import fit
from whichlora.calibration.load import model_of
from whichlora.calibration.samples import time_samples
from whichlora.predict.coefficients import TIME_PHASES, Calibration, prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.predict import memory_prediction
from whichlora.predict.quantities import ledger, passes, step_features
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.results import Measurement, MemoryPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.jsonfiles import read_object
from whichlora.store.measurements import read_measurements
from whichlora.store.models import find_model
from whichlora.timing import model as timing
from whichlora.timing.model import TimeModel
from whichlora.units import GiB

FAR_OFF = 0.08
NUM_FIRST = 5  # trainings that a cold GPU has run, and as many generations
NUM_DRAWS = 16  # of these few runs

Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """One record that ran, beside its memory prediction."""

    record: Measurement
    job: ResolvedRun
    memory: MemoryPrediction
    group: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpu", help="key of the accelerator")
    parser.add_argument("--records", type=Path, default=ROOT / "calibration")
    parser.add_argument("--output", type=Path, help="default: docs/accuracy/<gpu>.md")
    options = parser.parse_args()
    gpu = find_gpu(options.gpu)
    records = [
        one for one in read_measurements([options.records], gpu.key) if "design" in one.provenance
    ]
    if not records:
        sys.exit(f"{options.records}/{gpu.key}: holds no records of benchmarks/gpu/sweep.py")
    output = options.output or ROOT / "docs" / "accuracy" / f"{gpu.key}.md"
    text = document(gpu, records, facts_of(options.records / gpu.key / "facts.json"))
    output.write_text(text, encoding="utf-8")
    print(text)


def document(gpu: GpuSpec, records: Sequence[Measurement], facts: str) -> str:
    """All tables as Markdown."""
    judged = list(all_judged(gpu, records))
    first, last = min(one.date for one in records)[:10], max(one.date for one in records)[:10]
    libraries = sorted({libraries_of(one) for one in records})
    parts = [
        f"# Accuracy on {gpu.name}",
        f"Made by `benchmarks/gpu/accuracy.py {gpu.key}` from {len(records)} records of "
        f"`benchmarks/gpu/sweep.py`, {first} to {last}. {'; '.join(libraries)}. Errors are "
        "predicted over measured, less one: positive is too high. Medians and p90 are of sizes.",
        facts,
        "## Memory, predicted from formulas alone",
        *memory_section(judged),
        "## Time",
        *time_section(gpu, judged),
        kernel_section(gpu, Path(__file__).parent / "kernel_times" / f"{gpu.key}.jsonl"),
        "## Whole runs, predicted from five batches",
        real_section(gpu, judged),
        "## At the limit of the card",
        boundary_section(records),
        "## Noise of the measurements",
        noise_section(judged),
        "## What did not run",
        failed_section(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def all_judged(gpu: GpuSpec, records: Iterable[Measurement]) -> Iterator[Judged]:
    cold = prior_calibration(gpu)
    for one in records:
        if one.outcome == "ok":
            job = resolve(model_of(one), one.run, gpu)
            memory, _ = memory_prediction(judged_run(job, cold))
            yield Judged(one, job, memory, str(one.provenance["group"]))


def libraries_of(record: Measurement) -> str:
    found = record.environment
    names = ("driver", "torch", "transformers", "peft", "bitsandbytes")
    versions = found.get("libraries", {}) | {"driver": found.get("driver")}
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


def facts_of(path: Path) -> str:
    if not path.is_file():
        return ""
    facts = {key: value for key, value in read_object(path).items() if key != "schema_version"}
    rows = [
        (name, f"{value:,}" if isinstance(value, int) else value) for name, value in facts.items()
    ]
    return markdown_table(("device", "measured"), rows)


# --- memory -------------------------------------------------------------------------------------


def memory_section(judged: Sequence[Judged]) -> Iterator[str]:
    counters: dict[str, Callable[[Judged], tuple[float | None, float]]] = {
        "Peak allocated": lambda one: (
            one.record.peak_allocated_bytes,
            one.memory.peak_allocated_bytes,
        ),
        "Peak reserved": lambda one: (
            one.record.peak_reserved_bytes,
            one.memory.peak_reserved_bytes,
        ),
        "Used on the device": lambda one: (
            one.record.device_used_bytes,
            one.memory.device_used_bytes,
        ),
    }
    for title, values_of in counters.items():
        pairs = [(one, *values_of(one)) for one in judged]
        errors = {one.record.id: predicted / value - 1 for one, value, predicted in pairs if value}
        chosen = [one for one in judged if one.record.id in errors]
        if not chosen:
            continue
        rows: list[Row] = [("**all**", *summary(errors.values()))]
        rows += [
            (group, *summary(errors[one.record.id] for one in chosen if one.group == group))
            for group in dict.fromkeys(one.group for one in chosen)
        ]
        head = ("group", "n", "median", "p90", "lowest", "highest")
        yield f"### {title}\n\n{markdown_table(head, rows)}"
        far = [one for one in chosen if abs(errors[one.record.id]) > FAR_OFF]
        lines = [
            f"- {percent(errors[one.record.id])}, {name_of(one)}, peak at {one.memory.moment}"
            for one in sorted(far, key=lambda one: -abs(errors[one.record.id]))
        ]
        if far:
            share = f"{len(far)} of {len(chosen)} are off by more than {100 * FAR_OFF:.0f} %"
            yield "\n".join([f"{share}:", "", *lines])
    used = [one for one in judged if one.record.device_used_bytes]
    if used:
        bounds = [(one.record.device_used_bytes or 0, *one.memory.interval_bytes) for one in used]
        inside = sum(low <= value <= high for value, low, high in bounds)
        worst = max(value / high - 1 for value, _, high in bounds)
        confidence = used[0].memory.confidence
        yield (
            f"The stated {100 * confidence:.0f} % interval of the device's use holds "
            f"{100 * inside / len(used):.0f} % of {len(used)} runs; the run that comes closest to "
            f"its upper bound, or passes it, is {percent(worst)} from it."
        )
    yield moments_section(judged)


def moments_section(judged: Sequence[Judged]) -> str:
    """Each moment of the ledger against the allocator's peak within it."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        found = ledger(one.job)
        for moment, measured in one.record.moment_peak_bytes.items():
            if moment in found.moments:
                errors[moment].append(float(found.moment_bytes(moment)) / measured - 1)
    if not errors:
        return ""
    rows = [(moment, *summary(values)) for moment, values in errors.items()]
    head = ("moment", "n", "median", "p90", "lowest", "highest")
    return f"### Each moment of the ledger\n\n{markdown_table(head, rows)}"


# --- time ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """One phase of a record beside its prediction: what decides its time, and the log error."""

    model: str
    regime: str
    error: float
    is_inside: bool


def time_section(gpu: GpuSpec, judged: Sequence[Judged]) -> Iterator[str]:
    timed = [one for one in judged if one.group not in ("repeats", "real")]
    after = f"after {2 * NUM_FIRST} runs, {NUM_DRAWS} draws"
    cold, few = prior_calibration(gpu), list(after_few_runs(gpu, timed))
    models = list(dict.fromkeys(model_name(one) for one in timed))
    others = [
        (fit([one.record for one in timed if model_name(one) != model], gpu, model_of), model)
        for model in models
        if len(models) > 1
    ]
    head = ("fit", "n", "median", "p90", "lowest", "highest", "inside the 90 % interval")
    for phase in TIME_PHASES:
        found = {"cold": [row for one in timed for row in timed_as(cold, one, phase)]}
        found[after] = [
            row for fitted, rest in few for one in rest for row in timed_as(fitted, one, phase)
        ]
        for regime in sorted({row.regime for row in found[after]}):
            found[f"· bound by {regime}"] = [row for row in found[after] if row.regime == regime]
        found["leave one model out"] = every = [
            row
            for fitted, model in others
            for one in timed
            if model_name(one) == model
            for row in timed_as(fitted, one, phase)
        ]
        for model in dict.fromkeys(row.model for row in every):
            found[f"· {model}"] = [row for row in every if row.model == model]
        rows = [(name, *time_cells(some)) for name, some in found.items() if some]
        if rows:
            yield f"### {phase}\n\n{markdown_table(head, rows)}"


def model_name(one: Judged) -> str:
    return one.job.run.model


def after_few_runs(
    gpu: GpuSpec, timed: Sequence[Judged]
) -> Iterator[tuple[Calibration, list[Judged]]]:
    """What a few trainings and as many generations teach, drawn at random, and the other runs."""
    dice = random.Random(1)
    for _ in range(NUM_DRAWS):
        drawn: list[Judged] = []
        for phase in ("finetune", "inference"):
            of_phase = [one for one in timed if one.job.run.phase == phase]
            drawn += dice.sample(of_phase, min(NUM_FIRST, len(of_phase)))
        fitted = fit([one.record for one in drawn], gpu, model_of)
        yield fitted, [one for one in timed if one not in drawn]


def timed_as(calibration: Calibration, judged: Judged, phase: str) -> Iterator[Timed]:
    """What `judged` measured of `phase`, predicted by `calibration`."""
    model = calibration.time[phase]
    for one in time_samples(judged.job, judged.record).get(phase, []):
        seconds, _, deviation = timing.pass_time(model, one.features)
        error = math.log(seconds / one.value)
        is_inside = abs(error) <= TWO_SIDED_Z[TIME_CONFIDENCE] * deviation
        regime = timing.regime_of(model, one.features)
        yield Timed(model_name(judged), regime, error, is_inside)


def time_cells(found: Sequence[Timed]) -> tuple[str, ...]:
    share = 100 * sum(one.is_inside for one in found) / len(found)
    return (*summary(math.expm1(one.error) for one in found), f"{share:.0f} %")


def real_section(gpu: GpuSpec, judged: Sequence[Judged]) -> str:
    """Total of each whole run from its own five batches, other records unknown."""
    profiles = {one.job.run: one for one in judged if one.group == "real-profile"}
    rows: list[Row] = []
    for one in judged:
        profile = profiles.get(one.job.run)
        if one.group != "real" or profile is None:
            continue
        model = prior_calibration(gpu).time["finetune"]

        def seconds(length: int, job: ResolvedRun = one.job, model: TimeModel = model) -> float:
            return float(timing.seconds(model, step_features(job, seq_len=length))[0])

        pairs = list(zip(profile.record.batch_seq_len, profile.record.step_s, strict=True))
        ratio = sum(step_s for _, step_s in pairs) / sum(seconds(length) for length, _ in pairs)
        total = ratio * sum(seconds(length) for length in one.record.batch_seq_len)
        measured = sum(one.record.step_s)
        memory = (profile.record.peak_allocated_bytes or 0) / (
            one.record.peak_allocated_bytes or 1
        ) - 1
        rows.append(
            (
                name_of(one),
                len(one.record.step_s),
                f"{measured:.1f} s",
                f"{total:.1f} s",
                percent(total / measured - 1),
                percent(memory),
            )
        )
    head = ("run", "steps", "measured", "predicted", "error", "peak of 5 batches / of the run")
    return markdown_table(head, rows) if rows else "Not measured yet."


# --- the rest -----------------------------------------------------------------------------------


# What the name of a kernel says of it, in the order in which the first that holds counts.
KERNEL_KINDS = {
    "moved": ("memcpy", "memset"),
    "attention": ("fmha", "flash", "sdpa", "softmax_warp"),
    "products": ("nvjet", "gemm", "cutlass", "splitk", "s16816", "imma"),
    "dequant": ("quantizeblockwise", "dequant"),
    "optimizer": ("optimizer", "multi_tensor"),
}
KERNEL_COLUMNS = {
    "products": ("products", "weights"),
    "attention": ("attention", "cache"),
    "dequant": ("dequant",),
    "optimizer": ("optimizer",),
    "elementwise": ("elementwise", "kernels"),
}


def kind_of(kernel: str) -> str:
    kinds = (k for k, words in KERNEL_KINDS.items() if any(w in kernel.lower() for w in words))
    return next(kinds, "elementwise")


def kernel_section(gpu: GpuSpec, path: Path) -> str:
    """Seconds of all kernels of a kind in one step or generation, measured and by the priors."""
    if not path.is_file():
        return ""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        run = RunConfig.from_dict(record["run"])
        model = find_model(run.model)
        assert model is not None
        measured: dict[str, float] = defaultdict(float)
        for name, _, seconds in record["kernels"]:
            measured[kind_of(name)] += seconds
        predicted = device_seconds(resolve(model, run, gpu))
        cells = [
            f"{1e3 * measured[kind]:.1f} / {1e3 * sum(predicted[name] for name in names):.1f}"
            for kind, names in KERNEL_COLUMNS.items()
        ]
        number = round(sum(count for _, count, _ in record["kernels"]))
        rows.append((kernel_run(run), number, *cells))
    return (
        "## Kernels of one step or generation, measured and predicted\n\nMilliseconds by kind: "
        "the sum of all kernels under torch's profiler, and datasheet and priors, nothing fitted. "
        "Elementwise kernels are beside what every kernel takes whatever its work (5 µs).\n\n"
        + markdown_table(("run", "kernels", *KERNEL_COLUMNS), rows)
    )


def device_seconds(job: ResolvedRun) -> dict[str, float]:
    """Seconds of the device by feature in one step or generation, whatever the host takes."""
    found: dict[str, float] = defaultdict(float)
    for phase, times, features in passes(job):
        model = replace(timing.prior_model(job.gpu, phase), overlaps=False)
        for name, decided in timing.deciding(model, features).items():
            found[name] += times * model.mean[name] * float(decided)
    return found


def kernel_run(run: RunConfig) -> str:
    words: list[str] = [run.model.partition("/")[2]]
    if run.phase == "inference":
        words.append(f"prompt {run.batch_size} x {run.prompt_len}")
        words += [f"and {run.max_new_tokens - 1} decoding steps"] * (run.max_new_tokens > 1)
    else:
        words += [run.method, f"{run.batch_size} x {run.seq_len}"]
        words += ["dropout"] * bool(run.lora_dropout) + [run.optimizer] * (run.method == "full")
        words += [] if run.gradient_checkpointing else ["no checkpointing"]
    words += [run.attn] * (run.attn != "sdpa")
    words += [run.quant] if run.quant not in (None, "none") else []
    return " ".join(words)


def boundary_section(records: Sequence[Measurement]) -> str:
    rows: list[Row] = []
    kept = 0
    for one in records:
        expected = one.provenance.get("expected")
        if not expected:
            continue
        right = (one.outcome == "ok") == (expected == "fits")
        kept += right
        run = one.run
        what = f"{run.model}, {run.method}, {run.batch_size} x {run.seq_len}"
        rows.append((what, expected, one.outcome, "yes" if right else "**no**"))
    if not rows:
        return "Not measured yet."
    head = ("run", "predicted at 95 %", "outcome", "as predicted")
    return f"{markdown_table(head, rows)}\n\n{kept} of {len(rows)} as predicted."


def noise_section(judged: Sequence[Judged]) -> str:
    values: dict[object, list[float]] = defaultdict(list)
    for one in judged:
        if one.group == "repeats" and one.record.step_s:
            values[one.job.run].append(median(one.record.step_s))
    spreads = [max(found) / min(found) - 1 for found in values.values() if len(found) > 1]
    if not spreads:
        return "Not measured yet."
    return (
        f"{len(spreads)} runs, each repeated in new processes: slowest over fastest is "
        f"{percent(median(spreads))} in the median and {percent(max(spreads))} at most."
    )


def failed_section(records: Sequence[Measurement]) -> str:
    lines = [
        f"- {one.outcome}: {one.run.model}, {one.run.method}, {one.provenance['group']}: "
        + one.detail[:160]
        for one in records
        if one.outcome != "ok" and one.provenance.get("expected") != "fails"
    ]
    return "\n".join(lines) or "Everything ran."


def name_of(one: Judged) -> str:
    run = one.job.run
    shape = f"{run.batch_size} x {run.seq_len}"
    if run.phase == "inference":
        shape = f"{run.batch_size} x {run.prompt_len} + {run.max_new_tokens}, {run.kv_cache}"
    words = [one.group, run.model, run.method, run.precision, run.attn, shape]
    words += [run.quant] if run.quant not in (None, "none") else []
    words += ["checkpointing"] if run.gradient_checkpointing else []
    gigabytes = (one.record.peak_allocated_bytes or 0) / GiB
    return f"{', '.join(str(word) for word in words)} ({gigabytes:.1f} GiB)"


def summary(errors: Iterable[float]) -> tuple[str, ...]:
    """Cells n, median and p90 of the sizes, lowest and highest error."""
    found = list(errors)
    sizes = sorted(abs(one) for one in found)
    p90 = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return (
        str(len(found)),
        percent(median(sizes)).lstrip("+"),
        percent(p90).lstrip("+"),
        percent(min(found)),
        percent(max(found)),
    )


if __name__ == "__main__":
    main()
