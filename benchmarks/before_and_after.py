"""The same measured values predicted by an older checkout and by this one, source by source.

    git worktree add ../before 8da3d2e
    python benchmarks/before_and_after.py ../before           the table, in minutes
    python benchmarks/before_and_after.py ../before --write   docs/accuracy/before_and_after.md

Each checkout predicts in a process of its own, with its formulas and its `benchmarks/published`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "accuracy" / "before_and_after.md"
TRACES = (
    *(f"draw-{number}.jsonl" for number in range(1, 6)),
    "later-types.jsonl",
    "newest-types.jsonl",
)
T4_LOOPS = "fitcheck_t4"
NEAREST = {"precision": "bf16-no-autocast", "attn": "sdpa"}  # to what an older checkout lacks
COUNTERS = {
    "peak_allocated": "peak allocated",
    "allocated_between_steps": "allocated between steps",
    "allocated_after_forward": "allocated after the forward",
    "peak_reserved": "peak reserved",
    "device_used": "used on the device",
    "perhaps_allocated": "counter not stated, as allocated",
    "perhaps_device_used": "counter not stated, as used on the device",
}
PHASES = {"finetune": "fine-tuning", "inference": "inference"}
TIMES = {
    "step_s": "training step",
    "forward_backward_s": "forward and backward, fp32",
    "forward_s": "forward, fp32",
    "prefill_s": "prompt pass",
    "generate_s": "generation",
}
TEXT = """\
Errors are predicted over measured, less one: positive is too high. Medians and 90th percentiles
are of sizes. The measured values are those of [published.md](published.md); the traces are those of
[ledger.md](ledger.md) and [reserved.md](reserved.md), as they are today.

- **`fitcheck_t4`** came after the first commit. That one had no plain loops, no fp16 without
  autocast and no pinned kernel: it is asked for the Trainer, bf16 without autocast and SDPA.
- **Traces** follow the kernel of SDPA that torch chooses. The first commit took a fused one
  everywhere, and its own traces did too.
- **No run on any device**: datasheet and priors alone. **Left out of the fit**: a fit to all other
  models or GPUs; each source's rows are collected from these fits.
- **Forward and backward**: the first commit added an optimizer's step that these runs do not have.
  Without it, its errors are those of today."""
Key = tuple[str, str, str]  # section, source, the value's name
Row = tuple[Key, float]  # and its error


def memory_rows(loops: Path) -> Iterator[Row]:
    """Errors of published memory; `loops` lists those of a T4, which came later."""
    import published
    from published.memory import compared_memory, predicted_bytes

    from whichlora.spec.run import RunConfig
    from whichlora.store.models import find_model

    compared = [(row.observation, row.error) for row in compared_memory()]
    if any(observation.source == T4_LOOPS for observation, _ in compared):
        named = [row for row in compared if row[0].source == T4_LOOPS]
        rows = [[row.line, row.quantity, row.value, row.run.to_dict()] for row, _ in named]
        loops.write_text(json.dumps(rows), encoding="utf-8")
    else:
        for line, quantity, value, settings in json.loads(loops.read_text(encoding="utf-8")):
            if quantity in COUNTERS:
                loop = published.Observation(
                    source=T4_LOOPS,
                    line=line,
                    label="",
                    stack="",
                    model=find_model(settings["model"]),  # type: ignore[arg-type]
                    run=nearest(RunConfig, settings),
                    gpu="t4-16gb",
                    quantity=quantity,
                    value=value,
                )
                compared.append((loop, predicted_bytes(loop) / value - 1))
    for row, error in compared:
        if row.quantity in COUNTERS:
            section = f"Memory of {PHASES[row.run.phase]}, {COUNTERS[row.quantity]}"
            yield (section, row.source, f"{row.line} {row.quantity}"), error


def nearest(config: Any, settings: dict[str, Any]) -> Any:
    """A run with the settings that this checkout knows."""
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    if settings["attn"] == "eager":
        return config.from_dict(known | NEAREST | {"attn": "eager"})
    return config.from_dict(known | NEAREST)


def trace_rows() -> Iterator[Row]:
    """Errors against the traces of the real code that the newer checkout keeps."""
    import memory_samples as samples

    from whichlora.spec.run import RunConfig

    for file in TRACES:
        for number, line in enumerate(samples.read_lines(HERE / "traces" / file)):
            if "refused" not in line:
                run = RunConfig.from_dict(line["run"])
                try:
                    predicted = samples.predicted(run)
                except AssertionError:  # a model that the older checkout lacks
                    continue
                for counter in ("peak_allocated", "peak_reserved"):
                    section = f"Memory of {PHASES[run.phase]}, {COUNTERS[counter]}"
                    error = predicted[f"{counter}_bytes"] / line[f"{counter}_bytes"] - 1
                    yield (section, "traces of the real code", f"{file} {number}"), error


def timed_rows() -> Iterator[Row]:
    """Errors of published times: without any run, and by a fit to other models or GPUs."""
    from published import gpu_of
    from published.times import HELD_OUT, cold_runs, time_rows

    from whichlora.calibration.fit_time import fit_phases
    from whichlora.timing import model as timing

    for cold in cold_runs():
        row = cold.observation
        source = row.source + (", vLLM" if row.run.kv_cache == "vllm" else "")
        section = f"Time of a {TIMES[row.quantity]}, no run on any device"
        yield (section, source, f"{row.line} {row.label}"), math.expm1(cold.error)
    for title, (_, _, phase, _) in HELD_OUT.items():
        rows = time_rows(title)
        for group in {row.group for row in rows}:
            held = [row for row in rows if row.group == group]
            others = [
                row.sample for row in rows if row.group != group and getattr(row, "teaches", True)
            ]
            fitted = fit_phases({phase: others}, gpu_of(held[0].observation.gpu))[phase]
            for sample in held:
                row = sample.observation
                seconds = float(timing.seconds(fitted, sample.sample.features)[0])
                left_out = "GPU" if title.endswith("a GPU never measured") else "model"
                section = f"Time of a {TIMES[row.quantity]}, {left_out} left out of the fit"
                error = seconds / sample.sample.value - 1
                yield (section, row.source, f"{row.line} {row.label}"), error


def print_rows(checkout: Path, loops: Path) -> None:
    sys.path[:0] = [str(checkout), str(checkout / "benchmarks")]
    for rows in (memory_rows(loops), trace_rows(), timed_rows()):
        for row in rows:
            print(json.dumps(row))


def errors_of(checkout: Path, loops: Path) -> dict[Key, float]:
    """What `checkout` says, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout), "--rows", str(loops)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return {tuple(key): error for key, error in map(json.loads, printed.splitlines())}


def table(before: dict[Key, float], today: dict[Key, float]) -> str:
    """A row for each source of each section; values that both checkouts predict."""
    from markdown_tables import markdown_table, summary

    sections: dict[str, dict[str, list[Key]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(before.keys() & today.keys()):
        sections[key[0]][key[1]].append(key)
    rows = []
    for section, sources in sorted(sections.items()):
        for source, keys in sources.items():
            was = summary(before[key] for key in keys).cells()
            now = summary(today[key] for key in keys).cells()
            rows.append((section, source, *was, *now[1:]))
            section = ""  # named once
    head = ("value", "source", "n", "median before", "p90", "worst", "median today", "p90", "worst")
    return markdown_table(head, rows, first_figure=2)


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h (%cs)"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def document(older: Path) -> str:
    newer = HERE.parent
    with tempfile.TemporaryDirectory() as folder:
        loops = Path(folder) / "loops.json"
        today = errors_of(newer, loops)
        before = errors_of(older.resolve(), loops)
    made = datetime.datetime.now(datetime.UTC).date()
    return (
        "# Before and after\n\n"
        f"Made by `benchmarks/before_and_after.py --write` on {made}; no GPU was used. The same "
        f"measured and traced values, predicted by commit {commit_of(older)} and by "
        f"{commit_of(newer)}, source by source. {TEXT}\n\n"
        f"{table(before, today)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="the older checkout")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    if options.rows:
        print_rows(options.checkout, options.rows)
        return
    text = document(options.checkout)
    print(text)
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
