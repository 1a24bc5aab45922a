"""The callback's prediction before step 1 against the run that followed: a dated Markdown table.

Real trainings under the Trainer on this CPU, as a user would write them. Memory is the peak of live
tensors in the step with the longest batch, and is tried on many kinds of small runs. Time is the
sum of the timed steps; a model of milliseconds would only time the interpreter, so `--time` takes
models of 10 to 25 million parameters and mixed lengths. The callback records 8 of those runs, drawn
with a seed (`record=True`), the predictors are fitted to them, and the others are predicted before
their first step. `--records FILE` fits to profiles instead, such as those of `time_accuracy.py`,
and predicts every run. Times say something on a quiet machine only.

    python benchmarks/callback_accuracy.py
    taskset -c 0 env OMP_NUM_THREADS=1 python benchmarks/callback_accuracy.py --time
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import oracle_trainer as oracle
from markdown_tables import markdown_table, row, write_page
from memory_on_cpu import environment
from time_accuracy import CALIBRATION_RUNS, MODELS

from whichlora.calibration.load import refit
from whichlora.store.gpus import find_gpu

SEED = 0
_ADAPTERS: dict[str, Any] = {
    "lora": {"r": 8},
    "full": None,
    "dora": {"r": 8, "use_dora": True},
    "qlora": {"r": 8},
}
_SHAPES = ((1, 256), (2, 192), (4, 96))  # rows of a batch, tokens of its longest


def time_cases() -> Iterator[oracle.Case]:
    """Every model with every method, batches and checkpointing in turn."""
    pairs = [(model, method) for model in MODELS for method in _ADAPTERS]
    for number, (model, method) in enumerate(pairs):
        rows, seq_len = _SHAPES[number % len(_SHAPES)]
        checkpointing = number % 3 == 1
        args: dict[str, Any] = {"per_device_train_batch_size": rows, "max_steps": 24 // rows}
        yield oracle.Case(
            name=f"{method}, batch {rows}" + (", checkpointing" if checkpointing else ""),
            family=model,
            config=MODELS[model],
            load=oracle.NF4 if method == "qlora" else {},
            adapter=_ADAPTERS[method],
            fixed=False,
            seq_len=seq_len,
            args=args | {"activation_checkpointing": checkpointing, "optim": "adamw_torch"},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", action="store_true", help="the time of larger models instead")
    parser.add_argument("--records", type=Path, help="measurements to fit to, as JSON lines")
    parser.add_argument("--write", action="store_true", help="store the table in docs/accuracy")
    options = parser.parse_args()

    counter, unit = ("time", "s") if options.time else ("memory", "MiB")
    errors, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        cases = list(oracle.CASES)
        if options.time:
            cases = list(time_cases())
            random.Random(SEED).shuffle(cases)
            gpu = find_gpu("cpu")
            if options.records:
                kept = Path(folder) / gpu.key / "measurements"
                kept.mkdir(parents=True)
                shutil.copy(options.records, kept)
            else:
                for case in cases[:CALIBRATION_RUNS]:
                    oracle.train(case, record=True, calibration_dir=folder)
                cases = cases[CALIBRATION_RUNS:]
            refit(gpu, Path(folder))
        for case in cases:
            trained = oracle.train(case, calibration_dir=folder)
            predicted, measured = trained.time if options.time else trained.memory
            scale = 1 if options.time else 2**20
            errors.append(100 * (predicted / measured - 1))
            sizes = (f"{predicted / scale:.2f} {unit}", f"{measured / scale:.2f} {unit}")
            rows.append((case.name, case.family, *sizes, f"{errors[-1]:+.2f} %"))
            print(row(rows[-1]), file=sys.stderr, flush=True)
    found = sorted(map(abs, errors))
    p90 = found[min(len(found) - 1, round(0.9 * len(found)))]
    head = ("run", "model", f"{counter} predicted", "measured", "error")
    whole = (
        f"{counter}: {len(found)} runs, median {statistics.median(found):.2f} %, "
        f"90th percentile {p90:.2f} %, worst {found[-1]:.2f} %"
    )
    command = " ".join(["python", "benchmarks/callback_accuracy.py", *sys.argv[1:]])
    table = markdown_table(head, rows, first_figure=2)
    text = f"{environment()}, `{command}`.\n\n{table}\n\n{whole}."
    print(text)
    if options.write:
        page = "callback_time" if options.time else "callback_memory"
        write_page(page, f"{counter.capitalize()} that the callback predicts", text)


if __name__ == "__main__":
    main()
