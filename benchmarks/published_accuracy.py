"""Predictions against what others measured: `published_accuracy.py [--write]`.

Prints the tables of `docs/accuracy.md`; `--write` stores them there. Memory is predicted from
arithmetic alone. Time is predicted cold (datasheet and priors) and with a fit to the other models
or the other GPUs; the fit never sees the group it predicts.
"""

from __future__ import annotations

import datetime
import math
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import published_records
import published_rows
from markdown_tables import markdown_table, percent, summary
from published_rows import MEMORY, LeftOut, Observation, Quantity

from whichlora import timing
from whichlora.api import model_of
from whichlora.calibration import TIME_PHASES, prior_calibration
from whichlora.fitting import fit_time
from whichlora.numeric import TWO_SIDED_Z
from whichlora.prediction import (
    MEMORY_CONFIDENCE,
    TIME_CONFIDENCE,
    forward_features,
    ledger,
    predict_memory,
    step_features,
)
from whichlora.regression import conformal_scale
from whichlora.resolution import resolve
from whichlora.results import Measurement
from whichlora.samples import Sample, time_samples
from whichlora.specs import GpuSpec
from whichlora.store.gpus import find_gpu
from whichlora.timing import TimeModel
from whichlora.units import GiB

DOCUMENT = Path(__file__).parent.parent / "docs" / "accuracy.md"
FAR_OFF = 0.10
STEADY_PARTS = ("weights", "adapters", "optimizer_states")

COUNTERS: dict[Quantity, str] = {
    "peak_allocated": "Peak allocated (`torch.cuda.max_memory_allocated`)",
    "peak_reserved": "Peak reserved (`torch.cuda.max_memory_reserved`)",
    "device_used": "Used on the device (nvidia-smi, NVML)",
    "allocated_between_steps": "Allocated between steps: weights, adapters, optimizer states",
    "allocated_after_forward": "Allocated after the forward: what autograd keeps",
    "perhaps_allocated": "Counter not stated, compared with peak allocated",
    "perhaps_device_used": "Counter not stated, compared with used on the device",
}

gpu_of = cache(find_gpu)


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    observation: Observation
    predicted: float

    @property
    def error(self) -> float:
        """Signed and relative; positive where the prediction is too high."""
        return self.predicted / self.observation.value - 1


def predicted_bytes(one: Observation) -> float:
    """What we say the counter of `one` reads."""
    job = resolve(one.model, one.run, gpu_of(one.gpu))
    if one.quantity == "allocated_between_steps":
        found = ledger(job)
        entries = found.moments["optimizer_step"]
        static = sum(entry.num_bytes for entry in entries if entry.part in STEADY_PARTS)
        return float(static + found.workspace_bytes)
    if one.quantity == "allocated_after_forward":  # the 16-bit logits are gone by then
        narrow = 2 * one.run.batch_size * one.run.seq_len * one.model.vocab_size
        return float(ledger(job).moment_bytes("loss_forward") - narrow)
    memory, _ = predict_memory(job, prior_calibration(job.gpu))
    if one.quantity in ("peak_allocated", "perhaps_allocated"):
        return memory.peak_allocated_bytes
    if one.quantity == "peak_reserved":
        return memory.peak_reserved_bytes
    return memory.device_used_bytes


def compared_memory() -> list[Compared]:
    """Every published memory figure beside ours."""
    return [
        Compared(one, predicted_bytes(one))
        for one in published_rows.read_all()
        if isinstance(one, Observation) and one.quantity in MEMORY
    ]


def _is_forward_alone(one: Observation) -> bool:
    return one.source == "optimum_benchmark" and one.run.max_new_tokens == 1


def _is_near_the_card(one: Observation) -> bool:
    return one.value > 0.85 * gpu_of(one.gpu).memory_bytes


# What is different in a run that is far off: the first that applies.
EXPLANATIONS: tuple[tuple[Callable[[Observation], bool], str], ...] = (
    (
        lambda one: "santacoder" in one.label,
        "GPTBigCode leaves its logits in 16 bit and the Trainer widens its outputs: measured are "
        "6, 11 and 15 bytes per entry, by precision, where our unsloth head has 8",
    ),
    (
        lambda one: "exllamav2" in one.stack,
        "exllamav2 keeps 0.75 GiB of scratch: a matrix in fp16, and fp32 outputs of 16,384 rows",
    ),
    (
        lambda one: one.source == "qwen25_speed" and one.run.quant == "awq-int4",
        "the peak is while loading: the AWQ checkpoint holds the tied head a second time",
    ),
    (
        lambda one: (
            one.source == "optimum_benchmark"
            and dict(one.run.libraries)["transformers"] == "4.34.1"
            and one.quantity != "peak_allocated"
        ),
        "the runs of 2023-10-31 reserve 21.9 GiB in fp16 whatever the batch, and 2 GiB more than "
        "others with GPTQ: what loading left in the cache",
    ),
    (
        _is_forward_alone,
        "the benchmark holds the last output, its cache and fp32 logits, while it repeats the "
        "forward",
    ),
    (
        lambda one: one.quantity == "peak_reserved",
        "segments that a growing cache outgrows: an estimate, and machines differ by 2 times",
    ),
    (
        lambda one: one.quantity.startswith("perhaps"),
        "the counter is not stated, and the model's first remote code was not read",
    ),
    (
        _is_near_the_card,
        "near the card's limit the allocator gives idle segments back and reserves less",
    ),
    (
        lambda one: dict(one.run.libraries).get("transformers", "") < "4.44",
        "commits of May to August 2024: one configuration reads 17.0 and 18.8 GiB, 27.9 and 31.5",
    ),
    (
        lambda one: one.quantity == "device_used" and one.run.method == "full",
        "idle segments are an upper bound: some take the gradients",
    ),
    (
        lambda one: one.quantity == "device_used",
        "idle segments are an upper bound: the loss takes some of the layers'",
    ),
)


def explanation(one: Observation) -> str:
    """Why the prediction of `one` is far off."""
    found = (text for applies, text in EXPLANATIONS if applies(one))
    return next(found, "not explained")


# --- time ---------------------------------------------------------------------------------------

Timed = tuple[str, dict[str, float], int]  # phase, features, how often it runs


def timed_parts(one: Observation, gpu: GpuSpec | None = None) -> list[Timed]:
    """The phases whose seconds add up to what was measured, on `gpu` instead of its own."""
    gpu = gpu or gpu_of(one.gpu)
    if one.quantity in ("step_s", "forward_backward_s"):
        return [("finetune", step_features(resolve(one.model, one.run, gpu)), 1)]
    run = one.run
    if one.quantity == "forward_s":
        run = replace(run, phase="inference", prompt_len=run.seq_len, max_new_tokens=1)
    job = resolve(one.model, run, gpu)
    prefill = ("prefill", forward_features(job, context=run.prompt_len, decoding=False), 1)
    steps = run.max_new_tokens - 1
    if one.quantity != "generate_s" or not steps:
        return [prefill]
    context = run.prompt_len + max(1, steps // 2)
    return [prefill, ("decode", forward_features(job, context=context, decoding=True), steps)]


@dataclass(frozen=True, slots=True)
class Cold:
    """A published run beside datasheet and priors; error and stated deviation as logs.

    Args:
        phase: the last part, which takes nearly all of the time.
        deviation: before any scale.
    """

    observation: Observation
    phase: str
    error: float
    deviation: float


@cache
def cold_runs() -> tuple[Cold, ...]:
    """Every published time beside what is predicted without any run."""
    found = []
    for one in timed_observations():
        total = spread = 0.0
        phase = ""
        for phase, features, times in timed_parts(one):
            model = replace(timing.prior_model(gpu_of(one.gpu), phase), interval_scale=1.0)
            seconds = times * float(timing.seconds(model, features)[0])
            spread += seconds * timing.log_deviation(model, features, seconds / times)
            total += seconds
        found.append(Cold(one, phase, math.log(total / one.value), spread / total))
    return tuple(found)


@cache
def pooled_scale(phase: str, without: str = "") -> float:
    """Scale of cold intervals of `phase`, from all GPUs but one; 1 where fewer than two are left.

    What `timing.POOLED_SCALE` states is that of all GPUs.
    """
    chosen = [one for one in cold_runs() if one.phase == phase and one.observation.gpu != without]
    if len({one.observation.gpu for one in chosen}) < 2:
        return 1.0
    return _scale([one.error for one in chosen], [one.deviation for one in chosen])


def _scale(errors: Sequence[float], deviations: Sequence[float]) -> float:
    import numpy as np

    found = conformal_scale(np.array(errors), np.array(deviations), TIME_CONFIDENCE)
    assert found is not None, "too few errors"
    return found


def is_inside(one: Cold) -> bool:
    """Whether the interval holds `one`, its scale taken from the other GPUs."""
    scale = pooled_scale(one.phase, one.observation.gpu)
    return abs(one.error) <= TWO_SIDED_Z[TIME_CONFIDENCE] * scale * one.deviation


@dataclass(frozen=True, slots=True)
class TimeSample:
    observation: Observation
    group: str
    sample: Sample


def samples_of(
    observations: Iterable[Observation], phase: str, group: Callable[[Observation], str]
) -> list[TimeSample]:
    """One sample per observation; the prompt pass of a generation, a few per cent, is inside."""
    return [
        TimeSample(one, group(one), Sample(one.model.name, features, one.value / times))
        for one in observations
        for found, features, times in timed_parts(one)
        if found == phase
    ]


Fit = Callable[[Sequence[TimeSample], str, GpuSpec], TimeModel]


def _shipped_form(kept: Sequence[TimeSample], phase: str, gpu: GpuSpec) -> TimeModel:
    return fit_time([one.sample for one in kept], gpu, phase)


def _errors(model: TimeModel, held: Sequence[TimeSample]) -> list[tuple[float, float]]:
    """Log errors of `held` and the deviations stated for them, before any scale."""
    model = replace(model, interval_scale=1.0)
    found = []
    for one in held:
        seconds = float(timing.seconds(model, one.sample.features)[0])
        deviation = timing.log_deviation(model, one.sample.features, seconds)
        found.append((math.log(seconds / one.sample.value), deviation))
    return found


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Errors of one group that no fit saw, and the intervals stated for it, both as logs."""

    group: str
    errors: tuple[float, ...]
    half_widths: tuple[float, ...]


def leave_one_out(
    samples: Sequence[TimeSample], phase: str, fit: Fit = _shipped_form
) -> Iterator[HeldOut]:
    """Each group predicted from all others; its interval from how they predict each other."""
    groups = sorted({one.group for one in samples})
    for group in groups:
        held = [one for one in samples if one.group == group]
        kept = [one for one in samples if one.group != group]
        gpu = gpu_of(held[0].observation.gpu)
        inner = [
            pair
            for other in groups
            if other != group
            for pair in _errors(
                fit([one for one in kept if one.group != other], phase, gpu),
                [one for one in kept if one.group == other],
            )
        ]
        reach = TWO_SIDED_Z[TIME_CONFIDENCE] * _scale(*zip(*inner, strict=True))
        errors, deviations = zip(*_errors(fit(kept, phase, gpu), held), strict=True)
        yield HeldOut(group, errors, tuple(reach * one for one in deviations))


def _short(one: Observation) -> str:
    return one.model.name.rpartition("/")[2]


def _gpu(one: Observation) -> str:
    return one.gpu


HELD_OUT: dict[str, tuple[tuple[Quantity, ...], str, str, Callable[[Observation], str]]] = {
    "Training step on A100, a model never measured": (("step_s",), "a100", "finetune", _short),
    "Prompt pass on A100, a model never measured": (("prefill_s",), "a100", "prefill", _short),
    "Decoding with transformers on A100, a model never measured": (
        ("generate_s",),
        "a100",
        "decode",
        _short,
    ),
    "Forward and backward in fp32, a GPU never measured": (
        ("forward_backward_s",),
        "",
        "finetune",
        _gpu,
    ),
    "Forward in fp32, a GPU never measured": (("forward_s",), "", "prefill", _gpu),
}


def timed_observations() -> list[Observation]:
    return [
        one
        for one in published_rows.read_all()
        if isinstance(one, Observation) and one.quantity not in MEMORY
    ]


def time_rows(title: str) -> list[TimeSample]:
    """What one table of `HELD_OUT` is about."""
    quantities, gpu, phase, group = HELD_OUT[title]
    chosen = [
        one
        for one in timed_observations()
        if one.quantity in quantities and one.gpu.startswith(gpu) and one.run.kv_cache != "vllm"
    ]
    return samples_of(chosen, phase, group)


@cache
def held_out(title: str) -> tuple[HeldOut, ...]:
    """The rows of one table of `HELD_OUT`."""
    return tuple(leave_one_out(time_rows(title), HELD_OUT[title][2]))


# --- tables -------------------------------------------------------------------------------------


def _memory_table(found: Sequence[Compared]) -> str:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found:
        what = one.observation.run.method
        if one.observation.run.phase == "inference":
            what = f"generate, {one.observation.run.quant}"
        label = f"{one.observation.label.rpartition('/')[2][:32]}, {what}"
        groups[one.observation.source, label].append(one.error)
    rows = [(source, label, *summary(errors).cells()) for (source, label), errors in groups.items()]
    everything = summary([one.error for one in found])
    return markdown_table(
        ("source", "model, run", "n", "median", "p90", "worst"),
        [("**all**", "", *everything.cells()), *sorted(rows)],
    )


def _far_off(found: Sequence[Compared]) -> str:
    far = [one for one in found if abs(one.error) > FAR_OFF]
    if not far:
        return "No row is off by more than 10 %."
    by_reason: dict[str, list[Compared]] = defaultdict(list)
    for one in far:
        by_reason[explanation(one.observation)].append(one)
    text = [f"{len(far)} of {len(found)} rows are off by more than 10 %:", ""]
    for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        cells = ", ".join(
            f"{one.observation.source}:{one.observation.line} {percent(one.error)}"
            f" ({one.observation.value / GiB:.1f} GiB)"
            for one in sorted(rows, key=lambda one: -abs(one.error))
        )
        text.append(f"- {reason} ({len(rows)}): {cells}")
    return "\n".join(text)


def _interval_line(found: Sequence[Compared]) -> str:
    """How often the stated interval of what the device uses was right, and how it was wrong."""
    inside = above = 0
    for one in found:
        job = resolve(one.observation.model, one.observation.run, gpu_of(one.observation.gpu))
        low, high = predict_memory(job, prior_calibration(job.gpu))[0].interval_bytes
        inside += low <= one.observation.value <= high
        above += one.observation.value > high
    return (
        f"The stated {100 * MEMORY_CONFIDENCE:.0f} % interval holds {100 * inside / len(found):.0f}"
        f" % of them; {above} of {len(found)} lie above it."
    )


def memory_section() -> Iterator[str]:
    found = compared_memory()
    for quantity, title in COUNTERS.items():
        chosen = [one for one in found if one.observation.quantity == quantity]
        interval = f"{_interval_line(chosen)} " if quantity == "device_used" else ""
        yield f"### {title}\n\n{_memory_table(chosen)}\n\n{interval}{_far_off(chosen)}"


def cold_section() -> str:
    groups: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for found in cold_runs():
        one = found.observation
        engine = ", vLLM" if one.run.kv_cache == "vllm" else ""
        groups[one.quantity, one.source + engine].append((found.error, is_inside(found)))
    rows = []
    for (quantity, source), errors in sorted(groups.items()):
        cells = summary(math.expm1(error) for error, _ in errors).cells()
        covered = sum(inside for _, inside in errors) / len(errors)
        rows.append((quantity, source, *cells, f"{100 * covered:.0f} %"))
    head = ("what", "source", "n", "median", "p90", "worst", "inside the 90 % interval")
    return f"{markdown_table(head, rows)}\n\n{_never_measured()}"


def _never_measured() -> str:
    """How much the interval holds of each GPU, whose runs its scale never saw."""
    rows = []
    for phase in ("finetune", "prefill"):
        chosen = [one for one in cold_runs() if one.phase == phase]
        for gpu in ("", *sorted({one.observation.gpu for one in chosen})):
            here = [one for one in chosen if one.observation.gpu == gpu or not gpu]
            share = sum(map(is_inside, here)) / len(here)
            scale = f"{pooled_scale(phase, gpu):.2f}"
            rows.append((phase, gpu or "**all**", str(len(here)), scale, f"{100 * share:.0f} %"))
    scales = markdown_table(
        ("phase", "GPU left out", "n", "scale", "inside the 90 % interval"), rows
    )
    return (
        f"The scale of each interval is the conformal quantile of the other GPUs:\n\n{scales}\n\n"
        "Decoding was published for one GPU; its scale is 1. The constant of vLLM's host was set "
        "by the rows under vLLM in this table."
    )


def _share_inside(found: Sequence[HeldOut]) -> str:
    inside = [
        abs(error) <= half_width
        for one in found
        for error, half_width in zip(one.errors, one.half_widths, strict=True)
    ]
    return f"{100 * sum(inside) / len(inside):.0f} %"


def never_measured_line() -> str:
    """The coverage over the tables of GPUs that were left out."""
    found = [
        one
        for title in HELD_OUT
        if title.endswith("a GPU never measured")
        for one in held_out(title)
    ]
    return (
        f"Over all tables of a GPU never measured the 90 % interval holds {_share_inside(found)}."
    )


def held_out_section(title: str) -> str:
    found = held_out(title)
    errors = [error for one in found for error in one.errors]
    rows = [
        (one.group, *summary(math.expm1(error) for error in one.errors).cells()) for one in found
    ]
    whole = summary(math.expm1(error) for error in errors)
    table = markdown_table(
        ("left out", "n", "median", "p90", "worst"), [("**all**", *whole.cells()), *rows]
    )
    covered = f"The stated 90 % interval holds {_share_inside(found)} of them."
    return f"### {title}\n\n{table}\n\n{covered}"


def _versions(measurement: Measurement) -> str:
    return f"{measurement.provenance['table']} {measurement.config['libraries']}"


SHIPPED: dict[str, Callable[[Measurement], str]] = {
    "model": lambda measurement: str(measurement.config["model"]),
    "library versions": _versions,
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One published run: log errors of datasheet and calibration, and the latter's half width."""

    phase: str
    cold: float
    calibrated: float
    half_width: float


@cache
def _shipped_samples() -> tuple[tuple[Measurement, str, Sample], ...]:
    return tuple(
        (one, phase, sample)
        for key, records in published_records.records()[0].items()
        for one in records
        for phase, samples in time_samples(
            resolve(model_of(one), one.run, gpu_of(key)), one
        ).items()
        for sample in samples
    )


def shipped(group: Callable[[Measurement], str]) -> Iterator[Judged]:
    """Each record of the shipped databases, predicted by a calibration to the other groups."""
    grouped = [(one.gpu, phase, group(one), sample) for one, phase, sample in _shipped_samples()]
    for key, phase, name in sorted({row[:3] for row in grouped}):
        here = [row for row in grouped if row[:2] == (key, phase)]
        cold = timing.prior_model(gpu_of(key), phase)
        kept = [sample for _, _, other, sample in here if other != name]
        model = fit_time(kept, gpu_of(key), phase, held_out=len(kept) >= 3)
        for sample in (sample for _, _, other, sample in here if other == name):
            seconds = float(timing.seconds(model, sample.features)[0])
            alone = float(timing.seconds(cold, sample.features)[0])
            deviation = timing.log_deviation(model, sample.features, seconds)
            yield Judged(
                phase,
                math.log(alone / sample.value),
                math.log(seconds / sample.value),
                TWO_SIDED_Z[TIME_CONFIDENCE] * deviation,
            )


def shipped_section() -> str:
    rows = []
    for left_out, group in SHIPPED.items():
        judged = list(shipped(group))
        for phase in TIME_PHASES:
            chosen = [one for one in judged if one.phase == phase]
            cold = summary(math.expm1(one.cold) for one in chosen).cells()
            now = summary(math.expm1(one.calibrated) for one in chosen).cells()
            inside = sum(abs(one.calibrated) <= one.half_width for one in chosen) / len(chosen)
            rows.append((phase, left_out, *cold, *now[1:], f"{100 * inside:.0f} %"))
    head = ("phase", "left out", "n", "median cold", "p90", "worst")
    return markdown_table(
        (*head, "median calibrated", "p90", "worst", "inside the 90 % interval"), rows
    )


def left_out_section() -> str:
    reasons = Counter(
        (one.source, one.what, one.reason)
        for one in published_rows.read_all()
        if isinstance(one, LeftOut)
    )
    rows = [(source, what, str(n), reason) for (source, what, reason), n in sorted(reasons.items())]
    return markdown_table(("source", "cell", "n", "why"), rows)


def document() -> str:
    """All tables, dated, as Markdown."""
    import numpy
    import scipy

    python = platform.python_version()
    today = datetime.datetime.now(datetime.UTC).date()
    parts = [
        "# Accuracy against published measurements",
        f"Made by `benchmarks/published_accuracy.py --write` on {today}, Python {python}, NumPy "
        f"{numpy.__version__}, SciPy {scipy.__version__}; no GPU was used. The "
        "measurements are others', in `benchmarks/published/` with their sources; the versions of "
        "the libraries that made them are those each row states, and are an input of the "
        "prediction. Errors are predicted over measured, less one: positive is too high. A table "
        "never mixes counters. The ledger against the trace of the real code is in "
        "[accuracy_ledger.md](accuracy_ledger.md).",
        "## Memory",
        "Nothing was fitted. `n` is rows; p90 and median are of sizes, worst has its sign.",
        *memory_section(),
        "## Time",
        "Repeated runs of one configuration differ by 3 % in the median and 10 % at most "
        "(`fms_acceleration_bench`), by 35 % between machines.",
        f"### Cold: datasheet and priors, no run on any device\n\n{cold_section()}",
        *(held_out_section(title) for title in HELD_OUT),
        f"### The shipped calibration of A100, to runs it has not seen\n\n{shipped_section()}",
        "## Left out",
        left_out_section(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    text = document()
    print(text)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
