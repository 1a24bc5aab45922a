"""Steps of TRL's trainers on this CPU against a calibration to the Trainer's alone.

    python benchmarks/trainers_on_cpu.py                      the tables of the kept records
    python benchmarks/trainers_on_cpu.py --measure 2          as many more repetitions of all runs
    python benchmarks/trainers_on_cpu.py --write              and store them in docs/accuracy

Each run is a real training of a small model with random weights by the trainer's own class, in one
thread. What is kept is the processor time of each step, not the time of the clock, for other work
on the machine takes turns with it. glibc gives freed memory back (`KEEPS_MEMORY`) unless it is told
otherwise, as a GPU's allocator does not; then page faults of large tensors take up to a third of a
step. Runs of the Trainer calibrate (`CALIBRATION`), all others are predicted; no constant is fitted
to them. `--measure` needs TRL (`pip install trl`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table, write_page

from whichlora import families
from whichlora.calibration.fit import fit
from whichlora.predict.coefficients import Calibration
from whichlora.predict.predict import predict
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.cpu_prior import cpu_spec
from whichlora.store.detect import DetectedDevice
from whichlora.units import GiB

RECORDS = Path(__file__).parent / "trainers_on_cpu.jsonl"
# The machine that made the records, not the one that reads them: priors follow the instruction set.
GPU = cpu_spec(
    DetectedDevice(
        name="AMD EPYC",
        kind="cpu",
        memory_bytes=24 * GiB,
        num_cores=2,
        flags=frozenset({"avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni"}),
    )
)
NUM_STEPS = 5
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
_SIZES = {"num_attention_heads": 8, "max_position_embeddings": 2048, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama-25m": _SIZES
    | {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "vocab_size": 8192}
    | {"num_hidden_layers": 6, "num_key_value_heads": 8},
    "qwen3-27m": _SIZES
    | {"model_type": "qwen3", "hidden_size": 384, "intermediate_size": 1024, "head_dim": 64}
    | {"num_hidden_layers": 5, "num_key_value_heads": 2, "vocab_size": 24_576},
}
_COMMON: dict[str, Any] = {"precision": "fp32", "r": 8, "optimizer": "adamw_torch"}
# method, batch size, tokens, checkpointing
CALIBRATION: Sequence[tuple[str, int, int, bool]] = (
    ("lora", 1, 256, False),
    ("full", 4, 64, False),
    ("lora", 2, 192, True),
    ("full", 2, 128, True),
)
PREDICTED = ("transformers", "sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo")
_WRITTEN = (("max_completion_length", 32), ("num_generations", 2))


def calibrating() -> Iterator[RunConfig]:
    """Runs of the Trainer."""
    for model in MODELS:
        for method, batch_size, seq_len, checkpointing in CALIBRATION:
            yield RunConfig(
                model=model,
                method=method,
                batch_size=batch_size,
                seq_len=seq_len,
                gradient_checkpointing=checkpointing,
                **_COMMON,
            )


def predicted() -> Iterator[RunConfig]:
    """Runs of all trainers, of batches that no calibrating run has."""
    for number, trainer in enumerate(PREDICTED):
        for place, model in enumerate(MODELS):
            for turn, method in enumerate(("lora", "full")):
                yield RunConfig(
                    model=model,
                    trainer=trainer,
                    trainer_options=_WRITTEN if trainer == "grpo" else (),
                    method=method,
                    batch_size=2 if (number + turn) % 2 else 4,
                    seq_len=(96, 160)[(number + place) % 2],
                    gradient_checkpointing=(place + turn) % 2 == 0,
                    **_COMMON,
                )


def spec_of(model: str) -> ModelSpec:
    return families.build(dict(MODELS[model]), name=model)


def job_of(run: RunConfig) -> ResolvedRun:
    return resolve(spec_of(run.model), run, GPU)


# --- measuring ------------------------------------------------------------------------------------


def measure(run: RunConfig) -> list[float]:
    """Processor seconds of each timed step."""
    from pkgutil import resolve_name

    import torch

    from whichlora.profiler.build import build_model
    from whichlora.profiler.meter import Meter

    class ProcessorTime(Meter):
        """The clock of this process: it stands while others run."""

        def __init__(self) -> None:
            super().__init__("cpu")
            self.needs_extra_run = False

        def now(self) -> float:
            return time.process_time()

    torch.set_num_threads(1)
    job = job_of(run)
    model = build_model(job.run, MODELS[run.model], device="cpu", target_modules=job.peft_targets)
    steps = resolve_name(job.trainer.steps)
    measured = steps(model, job.run, ProcessorTime(), [run.seq_len] * NUM_STEPS)
    return [float(seconds) for seconds in measured["step_s"]]


def keep(repetitions: int) -> None:
    """Measure every run so often, in rounds, and append what was measured."""
    runs = [*calibrating(), *predicted()]
    first = 1 + max((line.repetition for line in records()), default=-1)
    for repetition in range(first, first + repetitions):
        for run in runs:
            step_s = measure(run)
            line = {"run": run.to_dict(), "repetition": repetition, "step_s": step_s}
            with RECORDS.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
            print(run.model, run.trainer, run.method, f"{median(step_s):.3f} s", file=sys.stderr)


# --- judging --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One kept run."""

    run: RunConfig
    repetition: int
    step_s: tuple[float, ...]


def records() -> list[Line]:
    if not RECORDS.exists():
        return []
    lines = map(json.loads, RECORDS.read_text(encoding="utf-8").splitlines())
    return [
        Line(RunConfig.from_dict(line["run"]), line["repetition"], tuple(line["step_s"]))
        for line in lines
    ]


def by_run(lines: Sequence[Line]) -> Mapping[RunConfig, list[float]]:
    """The median step of every repetition."""
    found: dict[RunConfig, list[float]] = {}
    for line in lines:
        found.setdefault(line.run, []).append(median(line.step_s))
    return found


def calibration(times: Mapping[RunConfig, Sequence[float]]) -> Calibration:
    """Fitted to the Trainer's runs, each at the least of its repetitions."""
    measurements = [
        Measurement(
            id=str(number),
            gpu=GPU.key,
            date="",
            config=job_of(run).run.to_dict(),
            outcome="ok",
            step_s=(min(times[run]),),
            batch_seq_len=(run.seq_len,),
            model_config=MODELS[run.model],
        )
        for number, run in enumerate(calibrating())
    ]
    return fit(measurements, GPU, lambda found: spec_of(found.run.model), held_out=False)


def errors(times: Mapping[RunConfig, Sequence[float]]) -> dict[RunConfig, float]:
    """Predicted over measured, less one, of every predicted run."""
    fitted = calibration(times)
    found = {}
    for run in predicted():
        seconds = predict(spec_of(run.model), run, GPU, fitted).time.step_s
        assert seconds is not None
        found[run] = seconds / min(times[run]) - 1
    return found


def document() -> str:
    times = by_run(records())
    found = errors(times)
    rows = [
        (
            run.trainer,
            f"{run.model}, {run.method}",
            f"{run.batch_size} x {run.seq_len}" + ", checkpointing" * run.gradient_checkpointing,
            f"{1000 * min(times[run]):.0f} ms",
            f"{100 * error:+.0f} %",
        )
        for run, error in found.items()
    ]
    table = markdown_table(("trainer", "model", "batch", "measured", "error"), rows, first_figure=3)
    sizes = {
        name: [abs(e) for run, e in found.items() if run.trainer == name] for name in PREDICTED
    }
    trainers = markdown_table(
        ("trainer", "runs", "median", "worst"),
        [
            (name, len(of), f"{100 * median(of):.0f} %", f"{100 * max(of):.0f} %")
            for name, of in sizes.items()
        ],
        first_figure=1,
    )
    all_sizes = sorted(size for of in sizes.values() for size in of)
    spread = [max(of) / min(of) - 1 for of in times.values() if len(of) > 1]
    repeats = f"{100 * median(spread):.0f} % in the median, {100 * max(spread):.0f} % at most"
    return (
        f"Calibrated to {len(list(calibrating()))} runs of the Trainer, of two models; "
        f"{len(found)} others are predicted. Processor time of one thread; of its repetitions a "
        f"run counts at its least. Repetitions differ by {repeats}.\n\n"
        f"All: median {100 * median(all_sizes):.0f} %, "
        f"90th percentile {100 * all_sizes[round(0.9 * (len(all_sizes) - 1))]:.0f} %, "
        f"worst {100 * all_sizes[-1]:.0f} %.\n\n{trainers}\n\n{table}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="repetitions to add")
    parser.add_argument("--write", action="store_true", help="store the tables in docs/accuracy")
    options = parser.parse_args()
    if options.measure:
        if not KEEPS_MEMORY.items() <= os.environ.items():  # glibc reads them as it starts
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEPS_MEMORY)
        keep(options.measure)
    text = document()
    print(text)
    if options.write:
        write_page("trainer_time", "Step time of TRL's trainers on a CPU", text)


if __name__ == "__main__":
    main()
