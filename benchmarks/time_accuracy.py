"""Predicted against measured time, live on one CPU core.

    taskset -c 0 env OMP_NUM_THREADS=1 python benchmarks/time_accuracy.py --write

Part a calibrates on at most `CALIBRATION_RUNS` runs chosen by
`whichlora.calibration.design`, predicts all
others, which are measured then, some of them twice; and trains `TRAININGS` for real, each twice,
against the total predicted from a profile of five batches; and shows what no prediction can beat,
how far the same work done again and again on this core is from itself. What was measured is kept in
`--folder`, so that an interrupted run goes on; `--limit N` tries N runs of each kind. Part b is the
GPU records of this repository that are not published ones; `published_accuracy.py` has those.
`--write` stores the tables in `docs/accuracy/time.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table, summary

from whichlora import families
from whichlora.calibration.design import Option, PredictedTime, choose
from whichlora.calibration.fit import fit
from whichlora.calibration.samples import time_samples
from whichlora.calibration.share.union import gpus_with_records
from whichlora.dataset import TokenLengths, workload
from whichlora.exports.launch import train_command
from whichlora.exports.recipe import Recipe
from whichlora.exports.train_script import train_script
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.profile import Profiler
from whichlora.search.feasibility import Quantity
from whichlora.search.total import profiled_total
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.plan import Keeping
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import read_measurements, read_records
from whichlora.store.record import encode_record
from whichlora.timing import model as timing

DOCUMENT = ROOT / "docs" / "accuracy" / "time.md"
CALIBRATION_RUNS = 8
TWICE = 10  # runs that are measured a second time, for the noise
NUM_BATCHES = 5
START_S = 3.0  # building a small model
NOISE_S = 180.0  # of the same work, done again and again
TIMEOUT_S = 300.0

_SIZES = {"vocab_size": 8192, "num_attention_heads": 8, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "llama-10m": _SIZES
    | {"model_type": "llama", "hidden_size": 320, "intermediate_size": 864}
    | {"num_hidden_layers": 6, "num_key_value_heads": 4},
    "llama-25m": _SIZES
    | {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376}
    | {"num_hidden_layers": 6, "num_key_value_heads": 8},
    "qwen3-14m": _SIZES
    | {"model_type": "qwen3", "hidden_size": 384, "intermediate_size": 1024, "head_dim": 64}
    | {"num_hidden_layers": 5, "num_key_value_heads": 2},
    "gpt-neox-17m": _SIZES
    | {"model_type": "gpt_neox", "hidden_size": 448, "intermediate_size": 1792}
    | {"num_hidden_layers": 5},
    "gemma2-12m": _SIZES
    | {"model_type": "gemma2", "hidden_size": 384, "intermediate_size": 1152, "head_dim": 48}
    | {"num_hidden_layers": 4, "num_key_value_heads": 4, "sliding_window": 128},
}
_SHAPES = ((1, 64), (1, 256), (4, 64), (2, 192), (8, 48))
_METHODS = ("lora", "full", "dora", "qlora")
_COMMON: dict[str, Any] = {"precision": "fp32", "r": 8, "optimizer": "adamw_torch"}

RUNS = [
    RunConfig(
        model=model,
        method=method,
        batch_size=batch_size,
        seq_len=seq_len,
        gradient_checkpointing=(number + i) % 2 == 0,
        **_COMMON,
    )
    for number, model in enumerate(MODELS)
    for i, (batch_size, seq_len) in enumerate(_SHAPES * 2)
    for method in (_METHODS[(number + i) % len(_METHODS)],)
] + [
    RunConfig(
        model=model,
        phase="inference",
        batch_size=batch_size,
        prompt_len=prompt,
        max_new_tokens=24,
        **_COMMON,
    )
    for model in MODELS
    for batch_size, prompt in ((1, 64), (4, 128))
]
TRAININGS = [
    RunConfig(
        model=model,
        method=method,
        batch_size=batch_size,
        seq_len=256,
        gradient_checkpointing=False,
        padding="padded" if batch_size > 1 else "none",
        **_COMMON,
    )
    for model, method, batch_size in (
        ("llama-10m", "lora", 1),
        ("llama-10m", "full", 2),
        ("qwen3-14m", "lora", 4),
        ("gpt-neox-17m", "lora", 2),
        ("gemma2-12m", "dora", 2),
        ("llama-25m", "qlora", 1),
    )
]
NUM_STEPS = 200

GPU = find_gpu("cpu")


def job_of(run: RunConfig) -> ResolvedRun:
    return resolve(families.build(dict(MODELS[run.model]), name=run.model), run, GPU)


# --- part a: measuring --------------------------------------------------------------------------


class Bench:
    """Runs that are measured once and kept, by run, lengths and repetition."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "records.jsonl"
        self._kept: dict[str, Measurement] = {}
        self._profiler = Profiler(
            gpu=GPU.key,
            device="cpu",
            provenance={"source": "benchmarks/time_accuracy.py"},
            log_path=folder / "profile.log",
        )
        if self._path.exists():
            for record, _ in read_records(self._path):
                self._kept[str(record.provenance["key"])] = record

    def close(self) -> None:
        self._profiler.close()

    def measure(
        self, run: RunConfig, *, seq_lens: Sequence[int] = (), repetition: int = 0
    ) -> Measurement:
        job = job_of(run)
        lengths = tuple(seq_lens) or (job.run.seq_len,)
        key = json.dumps([job.run.to_dict(), lengths, repetition])
        if key not in self._kept:
            found = self._profiler.measure(
                job.run,
                model_config=MODELS[run.model],
                target_modules=job.peft_targets,
                seq_lens=lengths,
                num_batches=NUM_BATCHES,
                timeout_s=TIMEOUT_S,
            )
            found = replace(found, provenance={**found.provenance, "key": key})
            found = replace(found, model_config=MODELS[run.model])
            with self._path.open("ab") as file:
                file.write(encode_record(found, str(self._path)))
            self._kept[key] = found
            print(f"{run.model} {run.phase} {run.method}: {found.outcome} {found.detail}")
        return self._kept[key]


def model_of(measurement: Measurement) -> Any:
    return families.build(dict(MODELS[measurement.run.model]), name=measurement.run.model)


def predicted_times_of(run: RunConfig) -> tuple[PredictedTime, ...]:
    """The times that a profile of `run` shows."""
    times: dict[str, Any] = {"step_s": (1.0,)}
    if run.phase == "inference":
        times = {"prefill_s": (1.0,), "decode_s_per_token": (1.0,)}
    blank = Measurement(id="", gpu=GPU.key, date="", config=run.to_dict(), outcome="ok", **times)
    found = time_samples(job_of(run), blank)
    return tuple(
        PredictedTime(phase, one.features) for phase, some in found.items() for one in some
    )


def calibrated(
    bench: Bench, runs: Sequence[RunConfig], most: int
) -> tuple[Calibration, set[RunConfig]]:
    """A calibration to the runs that `calibration.design` chooses among `runs`, and these."""
    predicted_times = {run: predicted_times_of(run) for run in runs}
    targets = [predicted_time for some in predicted_times.values() for predicted_time in some]
    calibration, chosen = prior_calibration(GPU), dict[RunConfig, Measurement]()
    while len(chosen) < most:
        left = [run for run in runs if run not in chosen]
        options = [
            Option(predicted_times[run], _cost_s(calibration, run, predicted_times[run]))
            for run in left
        ]
        position = choose(options, targets, calibration.time, budget_s=math.inf)
        if position is None:
            break
        chosen[left[position]] = bench.measure(left[position])
        calibration = fit(list(chosen.values()), GPU, model_of, held_out=False)
    return calibration, set(chosen)


def _cost_s(
    calibration: Calibration, run: RunConfig, predicted_times: Sequence[PredictedTime]
) -> float:
    each = {one.phase: one.features for one in predicted_times}
    seconds = {
        phase: float(timing.seconds(calibration.time[phase], features)[0])
        for phase, features in each.items()
    }
    once = seconds.get("finetune", 0.0) + seconds.get("prefill", 0.0)
    once += run.max_new_tokens * seconds.get("decode", 0.0)
    return START_S + (NUM_BATCHES + 1) * once


def judged(
    bench: Bench, calibration: Calibration, runs: Sequence[RunConfig]
) -> Iterator[tuple[RunConfig, str, float, bool]]:
    """Run, phase, error and whether the interval held, of every measured time."""
    for run in runs:
        found = bench.measure(run)
        for phase, samples in time_samples(job_of(run), found).items():
            for sample in samples:
                model = calibration.time[phase]
                total = float(timing.seconds(model, sample.features)[0])
                width = TWO_SIDED_Z[TIME_CONFIDENCE] * timing.log_deviation(
                    model, sample.features, total
                )
                error = math.log(total / sample.value)
                yield run, phase, math.expm1(error), abs(error) <= width


def noise(bench: Bench, runs: Sequence[RunConfig]) -> list[float]:
    """Relative differences of runs measured twice."""
    found = []
    for run in runs:
        first, second = (bench.measure(run, repetition=i) for i in (0, 1))
        found += [
            median(getattr(second, name)) / median(getattr(first, name)) - 1
            for name in ("step_s", "prefill_s", "decode_s_per_token")
            if getattr(first, name)
        ]
    return found


def trained(
    bench: Bench, calibration: Calibration, run: RunConfig, *, repetition: int
) -> tuple[Quantity, float, int]:
    """A real training's seconds predicted from a profile of its batches; measured; its steps."""
    rng = random.Random(run.model + run.method)
    texts = [
        "".join(rng.choices("abcdefgh ", k=rng.choice((24, 48, 96, 160, 240))))
        for _ in range(NUM_STEPS * run.batch_size)
    ]
    lengths = TokenLengths(
        lengths={"train": tuple(map(len, texts))}, max_length=run.seq_len, method="bytes"
    )
    load = workload(lengths, batch_size=run.batch_size)
    run = replace(run, seq_len=load.longest)
    job = job_of(run)
    model = calibration.time["finetune"]

    def seconds(width: int) -> float:
        return float(timing.seconds(model, step_features(job, seq_len=width))[0])

    profile = bench.measure(run, seq_lens=load.profile_lengths(NUM_BATCHES), repetition=repetition)
    total = profiled_total(
        load.widths,
        {width: seconds(width) for width in load.widths},
        list(zip(profile.batch_seq_len, profile.step_s, strict=True)),
        warm_up_s=profile.warm_up_s or 0.0,
    )
    folder = bench.folder / f"train-{run.model}-{run.method}-{run.batch_size}-{repetition}"
    result = folder / "output" / "result.json"
    if not result.exists():
        bench.close()  # the training needs the core to itself
        folder.mkdir(exist_ok=True)
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "train.jsonl").write_text(rows)
        recipe = Recipe(
            run=run,
            gpu=GPU.key,
            target_modules=job.peft_targets,
            weights="random",
            model_config=MODELS[run.model],
            batching="longest",
            keeping=Keeping(save_steps=0, eval_steps=0),
        )
        (folder / "train.py").write_text(train_script(recipe))
        with (folder / "train.log").open("wb") as log:
            subprocess.run(train_command(folder / "train.py"), stdout=log, stderr=log, check=True)
        print(f"trained {run.model} {run.method}")
    measured = json.loads(result.read_text())
    return total, float(measured["train_s"]), int(measured["num_steps"])


def same_work(folder: Path, *, seconds: float) -> list[float]:
    """Seconds of the same work, a step of some 7 ms: products in the cache, sums in memory."""
    path = folder / "same_work.json"
    if not path.exists():
        import numpy as np

        square, vector = np.ones((512, 512), np.float32), np.ones(8_000_000, np.float32)
        took, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(4):
                square @ square
            vector += square[0, 0]
            took.append(time.perf_counter() - start)
        path.write_text(json.dumps(took))
    return [float(one) for one in json.loads(path.read_text())]


def best_possible(took: Sequence[float], *, profile_s: float, training_s: float) -> list[float]:
    """Relative errors of a profile of `took` as the speed of what follows it."""
    found = []
    each = sum(took) / len(took)
    few, many = round(profile_s / each), round(training_s / each)
    for start in range(0, len(took) - few - many, few):
        profiled, trained = took[start : start + few], took[start + few : start + few + many]
        found.append(fmean(profiled) / fmean(trained) - 1)
    return found


# --- tables -------------------------------------------------------------------------------------


def _grouped(
    found: Sequence[tuple[RunConfig, str, float, bool]],
    by: Callable[[RunConfig, str], str],
) -> list[tuple[str, ...]]:
    groups: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for run, phase, error, inside in found:
        groups[by(run, phase)].append((error, inside))
    return [
        (
            name,
            *summary([error for error, _ in some]).cells(),
            f"{100 * sum(inside for _, inside in some) / len(some):.0f} %",
        )
        for name, some in sorted(groups.items())
    ]


def live_section(bench: Bench, limit: int | None) -> str:
    runs = RUNS if limit is None else RUNS[:: max(1, len(RUNS) // (3 * limit))][: 3 * limit]
    most = min(CALIBRATION_RUNS, limit or CALIBRATION_RUNS)
    calibration, chosen = calibrated(bench, runs, most)
    others = [run for run in runs if run not in chosen]
    others = others if limit is None else others[:limit]
    found = list(judged(bench, calibration, others))
    cold = [error for _, _, error, _ in judged(bench, prior_calibration(GPU), others)]
    twice = noise(bench, others[: TWICE if limit is None else 1])
    head = ("what", "n", "median", "p90", "worst", "inside the 90 % interval")
    rows = _grouped(found, lambda *_: "**all**")
    rows += _grouped(found, lambda _, phase: phase)
    rows += _grouped(found, lambda run, _: run.model)
    rows += _grouped(found, lambda run, _: run.method if run.phase == "finetune" else "inference")
    parts = [
        f"Calibrated on {len(chosen)} runs chosen by `calibration/design.py`, {len(others)} others "
        "predicted and then measured. Relative errors; positive is too slow.",
        markdown_table(head, rows),
        f"Datasheet alone, same runs: {', '.join(summary(cold).cells()[1:])}.",
    ]
    if twice:
        cells = summary(twice).cells()
        parts.append(f"The same run measured twice differs by (n, median, p90, worst): {cells}.")
    lines = []
    for run in TRAININGS[: limit and max(1, limit // 2)]:
        for repetition in range(2):
            predicted, measured, steps = trained(bench, calibration, run, repetition=repetition)
            what = f"{run.model}, {run.method}, batch {run.batch_size}"
            error = f"{100 * (predicted.value / measured - 1):+.1f} %"
            interval = f"{predicted.low:.1f} to {predicted.high:.1f} s"
            seconds = (f"{predicted.value:.1f} s", interval, f"{measured:.1f} s")
            lines.append((what, str(steps), *seconds, error))
    titles = ("training, each twice", "steps", "after 5 batches", "90 %", "measured", "error")
    parts.append(markdown_table(titles, lines))
    bench.close()  # the same work needs the core to itself
    took = same_work(bench.folder, seconds=NOISE_S if limit is None else 3.0)
    rows = []
    for profile_s, training_s in ((2.0, 12.0), (2.0, 40.0), (10.0, 40.0), (10.0, 80.0)):
        errors = best_possible(took, profile_s=profile_s, training_s=training_s)
        if errors:
            inside = sum(abs(error) <= 0.03 for error in errors) / len(errors)
            what = f"{profile_s:.0f} s for the {training_s:.0f} s that follow"
            rows.append((what, *summary(errors).cells(), f"{100 * inside:.0f} %"))
    if rows:
        head = ("the core's own speed over", "n", "median", "p90", "worst", "within 3 %")
        parts.append(
            f"The same work, a step of {1e3 * fmean(took):.0f} ms, done again and again for "
            f"{sum(took):.0f} s. A profile that knew everything but the core's state would miss "
            "the training that follows it by:"
        )
        parts.append(markdown_table(head, rows))
    return "\n\n".join(parts)


def records_section() -> str:
    """What the repository's own GPU records say of a fit that left their models out."""
    root = ROOT / "calibration"
    rows = []
    for key in gpus_with_records([root]):
        records = [
            one for one in read_measurements([root], key) if "publisher" not in one.provenance
        ]
        if not records:
            continue
        found = fit(records, find_gpu(key), model_of)
        for phase, one in found.held_out.items():
            cells = (str(one.num_runs), f"{100 * one.median:.1f} %", f"{100 * one.worst:.1f} %")
            rows.append((key, phase, *cells))
    if not rows:
        return "The repository holds no GPU records but published ones."
    return markdown_table(("accelerator", "phase", "n", "median", "worst"), rows)


def document(live: str) -> str:
    names = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    today = datetime.datetime.now(datetime.UTC).date()
    parts: Mapping[str, str] = {
        "Live on one CPU core": live,
        "GPU records of this repository": records_section(),
    }
    head = (
        "# Accuracy of time on one CPU core\n\n"
        f"Made by `benchmarks/time_accuracy.py --write` on {today}, {GPU.name}, one thread, Python "
        f"{platform.python_version()}, {versions}."
    )
    return "\n\n".join([head, *(f"## {title}\n\n{text}" for title, text in parts.items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=Path("runs/time_accuracy"))
    parser.add_argument("--limit", type=int, help="runs of each kind, to try it")
    parser.add_argument("--live-only", action="store_true", help="part a alone")
    parser.add_argument("--write", action="store_true", help=f"store the tables in {DOCUMENT.name}")
    asked = parser.parse_args()
    bench = Bench(asked.folder.resolve())
    try:
        live = live_section(bench, asked.limit)
    finally:
        bench.close()
    text = live if asked.live_only else document(live)
    print(text)
    if asked.write:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
