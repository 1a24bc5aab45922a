"""Predictions against what others measured: `published_accuracy.py [--records] [--write]`.

Prints `docs/accuracy/published.md`; `--write` stores it. Memory is predicted from arithmetic alone.
Time is predicted cold (datasheet and priors) and with a fit to the other models
or the other GPUs; the fit never sees the group it predicts.
`--records` makes records of the published rows, `calibration/<gpu>/measurements/published.jsonl`.
"""

from __future__ import annotations

import datetime
import math
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import published
from markdown_tables import markdown_table, percent, summary
from published import LeftOut, Quantity, gpu_of
from published.memory import Compared, compared_memory, explanation
from published.records import write_records
from published.times import (
    HELD_OUT,
    SHIPPED,
    Cold,
    HeldOut,
    Regime,
    cold_runs,
    held_out,
    is_inside,
    kernel_seconds,
    regime_of,
    shipped,
    sources_left_out,
)

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.judgement import MEMORY_CONFIDENCE
from whichlora.predict.predict import memory_prediction
from whichlora.predict.resolve import resolve
from whichlora.units import GiB

DOCUMENT = Path(__file__).parent.parent / "docs" / "accuracy" / "published.md"
FAR_OFF = 0.10
ABOVE = 0.03  # no measured value should exceed the upper end of its interval by more

COUNTERS: dict[Quantity, str] = {
    "peak_allocated": "Peak allocated (`torch.cuda.max_memory_allocated`)",
    "peak_reserved": "Peak reserved (`torch.cuda.max_memory_reserved`)",
    "device_used": "Used on the device (nvidia-smi, NVML)",
    "allocated_between_steps": "Allocated between steps: weights, adapters, optimizer states",
    "allocated_after_step": "Allocated after a step of a loop: also gradients and held outputs",
    "allocated_after_forward": "Allocated after the forward: what autograd keeps",
    "allocated_after_load": "Allocated after loading: weights and adapters",
    "reserved_before_training": "Reserved before training: weights, adapters, what loading left",
    "peak_in_forward": "Peak allocated in the forward, loss included",
    "peak_in_backward": "Peak allocated in the backward",
    "peak_in_optimizer": "Peak allocated in the optimizer's step",
    "perhaps_allocated": "Counter not stated, compared with peak allocated",
    "perhaps_device_used": "Counter not stated, compared with used on the device",
}


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
    """How often the stated interval was right, by phase, and how it was wrong."""
    clauses = []
    for phase, name in (("finetune", "training"), ("inference", "inference")):
        excess: list[float] = []
        inside = 0
        for one in found:
            run, measured = one.observation.run, one.observation.value
            if run.phase != phase:
                continue
            job = resolve(one.observation.model, run, gpu_of(one.observation.gpu))
            memory, _ = memory_prediction(judged_run(job, prior_calibration(job.gpu)))
            is_reserved = one.observation.quantity == "peak_reserved"
            low, high = memory.reserved_interval_bytes if is_reserved else memory.interval_bytes
            inside += low <= measured <= high
            excess.append(measured / high - 1)
        if excess:
            clauses.append(
                f"of {len(excess)} runs of {name} {inside / len(excess):.0%} lie inside".replace(
                    "%", " %"
                )
                + f", {sum(share > 0 for share in excess)} above"
                + f" and {sum(share > ABOVE for share in excess)} of these by more than 3 %"
            )
    return f"The stated {100 * MEMORY_CONFIDENCE:.0f} % interval: {'; '.join(clauses)}."


def memory_section() -> Iterator[str]:
    found = compared_memory()
    for quantity, title in COUNTERS.items():
        chosen = [one for one in found if one.observation.quantity == quantity]
        has_interval = quantity in ("peak_reserved", "device_used")
        interval = f"{_interval_line(chosen)} " if has_interval else ""
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


def host_section() -> str:
    rows = []
    for (source, gpu), found in sorted(kernel_seconds().items()):
        micros = sorted(1e6 * one for one in found)
        rows.append((source, gpu, len(found), *(f"{one:.1f} µs" for one in _spread(micros))))
    return markdown_table(("source", "beside", "n", "median", "least", "greatest"), rows)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def _never_measured() -> str:
    """How much the interval holds of each GPU."""
    rows = []
    for phase in ("finetune", "prefill"):
        chosen = [one for one in cold_runs() if one.phase == phase]
        for gpu in ("", *sorted({one.observation.gpu for one in chosen})):
            here = [one for one in chosen if one.observation.gpu == gpu or not gpu]
            share = sum(map(is_inside, here)) / len(here)
            errors = summary(math.expm1(one.error) for one in here).cells()
            rows.append((phase, gpu or "**all**", *errors, f"{100 * share:.0f} %"))
    head = ("phase", "GPU", "n", "median", "p90", "worst", "inside the 90 % interval")
    return (
        f"By GPU:\n\n{markdown_table(head, rows)}\n\n"
        "Decoding was published for one GPU. The constant of vLLM's host was set by the rows under "
        "vLLM in this table."
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


def shipped_section() -> str:
    rows = []
    for left_out, group in SHIPPED.items():
        judged = list(shipped(group))
        for gpu, phase in dict.fromkeys((one.gpu, one.phase) for one in judged):
            chosen = [one for one in judged if (one.gpu, one.phase) == (gpu, phase)]
            cold = summary(math.expm1(one.cold) for one in chosen).cells()
            now = summary(math.expm1(one.calibrated) for one in chosen).cells()
            inside = sum(abs(one.calibrated) <= one.half_width for one in chosen) / len(chosen)
            rows.append((gpu, phase, left_out, *cold, *now[1:], f"{100 * inside:.0f} %"))
    head = ("GPU", "phase", "left out", "n", "median cold", "p90", "worst")
    return markdown_table(
        (*head, "median calibrated", "p90", "worst", "inside the 90 % interval"), rows
    )


def regime_section() -> str:
    """Errors and intervals by regime: of sources that no fit saw, and of GPUs never measured."""
    rows = []
    by_regime: dict[tuple[str, str], list[Regime]] = defaultdict(list)
    for row in sources_left_out():
        by_regime[row.phase, "**all**"].append(row)
        by_regime[row.phase, row.name].append(row)
    for (phase, name), found in sorted(by_regime.items()):
        num_sources = len({row.observation.source for row in found})
        inside = sum(row.is_inside for row in found)
        reach = math.exp(median(row.half_width for row in found))
        rows.append(
            (
                phase,
                name,
                str(num_sources),
                *summary(math.expm1(row.cold) for row in found).cells()[:2],
                *summary(math.expm1(row.error) for row in found).cells()[1:],
                f"{reach:.2f} times",
                f"{inside} ({100 * inside / len(found):.0f} %)",
            )
        )
    head = ("phase", "regime", "sources", "n", "median cold", "median", "p90", "worst")
    of_sources = markdown_table((*head, "median reach", "inside the 90 % interval"), rows)
    cold: dict[tuple[str, str], list[Cold]] = defaultdict(list)
    for one in cold_runs():
        if not one.observation.gpu.startswith("a100-sxm"):
            cold[one.phase, regime_of(one.observation)].append(one)
    rows = []
    for (phase, name), runs in sorted(cold.items()):
        num_gpus = len({one.observation.gpu for one in runs})
        inside = sum(map(is_inside, runs))
        cells = summary(math.expm1(one.error) for one in runs).cells()
        held = f"{inside} ({100 * inside / len(runs):.0f} %)"
        rows.append((phase, name, str(num_gpus), *cells, held))
    head = ("phase", "regime", "GPUs", "n", "median", "p90", "worst")
    of_gpus = markdown_table((*head, "inside the 90 % interval"), rows)
    return (
        "The A100-SXM's runs under transformers, each source by a fit to all others, phases "
        "together. A regime is the first that holds: the host's launches decide, weights are "
        "quantised, a batch has fewer tokens than a large product needs, or it has as many.\n\n"
        f"{of_sources}\n\nOther GPUs, none of which a fit or a scale has seen:\n\n{of_gpus}"
    )


def left_out_section() -> str:
    reasons = Counter(
        (one.source, one.what, one.reason)
        for one in published.read_all()
        if isinstance(one, LeftOut)
    )
    rows = [(source, what, str(n), reason) for (source, what, reason), n in sorted(reasons.items())]
    return markdown_table(("source", "cell", "n", "why"), rows)


def document() -> str:
    """All tables, dated, as Markdown."""
    import numpy
    import scipy
    import sklearn

    python = platform.python_version()
    today = datetime.datetime.now(datetime.UTC).date()
    parts = [
        "# Accuracy against published measurements",
        f"Made by `benchmarks/published_accuracy.py --write` on {today}, Python {python}, NumPy "
        f"{numpy.__version__}, SciPy {scipy.__version__}, scikit-learn {sklearn.__version__}; "
        "no GPU was used.",
        "The measurements are others', in `benchmarks/published/` with their sources. The library "
        "versions that each row states are an input of its prediction. Errors are predicted over "
        "measured, less one: positive is too high. A table never mixes counters. "
        "[ledger.md](ledger.md) compares the ledger with the trace of the real code.",
        "## Memory",
        "Nothing was fitted. `n` is rows; p90 and median are of sizes, worst has its sign.",
        *memory_section(),
        "## Time",
        "Repeated runs of one configuration differ by 3 % in the median and 10 % at most "
        "(`fms_acceleration_bench`), by 35 % between machines.",
        f"### Cold: datasheet and priors, no run on any device\n\n{cold_section()}",
        "### What a kernel costs the host\n\nUnquantised decoding steps in which the device waits "
        f"for the host: seconds over launches.\n\n{host_section()}",
        *(held_out_section(title) for title in HELD_OUT),
        never_measured_line(),
        f"### The shipped calibrations, to runs they have not seen\n\n{shipped_section()}",
        f"### Intervals by regime, sources and GPUs left out\n\n{regime_section()}",
        "## Left out",
        left_out_section(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    write = "--write" in sys.argv[1:]
    if "--records" in sys.argv[1:]:
        write_records(write=write)
        return
    text = document()
    print(text)
    if write:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
