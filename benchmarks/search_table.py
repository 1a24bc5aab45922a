"""A table of real runs to replay searches over: `search_table.py [--only N] [--folder DIR]`.

Every combination of 6 small models, 4 methods, 4 batch sizes and 2 lengths, fine-tuning and
inference, measured on this machine's CPU through the product's own profiler: one thread, pinned to
one core. The records are ordinary measurements; what is there already is not measured again, so an
interrupted measurement goes on where it stopped.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the worker inherits it

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from whichlora import api
from whichlora.device.profile import Profiler
from whichlora.resolution import Job, resolve
from whichlora.results import SCHEMA_VERSION
from whichlora.specs import GpuSpec, RunConfig
from whichlora.store.jsonfiles import write_object
from whichlora.store.measurements import MeasurementLog, read_measurements

FOLDER = Path(__file__).parent / "search_table"
MODELS = (
    "EleutherAI/pythia-14m",
    "EleutherAI/pythia-31m",
    "EleutherAI/pythia-70m",
    "distilbert/distilgpt2",
    "openai-community/gpt2",
    "HuggingFaceTB/SmolLM2-135M",
)
METHODS = ("lora", "qlora", "dora", "qdora")
BATCH_SIZES = (1, 2, 4, 8)
LENGTHS = (32, 64)
NEW_TOKENS = 8
NUM_BATCHES = 4
TIMEOUT_S = 300.0


def runs() -> Iterator[RunConfig]:
    """Both stages of every combination."""
    for model, length, batch_size in itertools.product(MODELS, LENGTHS, BATCH_SIZES):
        for method in METHODS:
            yield RunConfig(
                model=model,
                method=method,
                batch_size=batch_size,
                seq_len=length,
                r=8,
                lora_alpha=16,
                precision="fp32",
            )
        yield RunConfig(
            model=model,
            phase="inference",
            batch_size=batch_size,
            prompt_len=length,
            max_new_tokens=NEW_TOKENS,
            precision="fp32",
        )


def jobs(gpu: GpuSpec) -> list[Job]:
    """The runs with every default filled in, as records name them."""
    models = {name: api.load_model(name) for name in MODELS}
    return [resolve(models[run.model], run, gpu) for run in runs()]


def measure(folder: Path, *, only: int | None) -> None:
    """Measure what is not in `folder` yet, in an order that no drift of the machine follows."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    gpu = api.find_gpu("cpu")
    write_object(folder / "gpu.json", {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(gpu))
    known = {record.run for record in read_measurements([folder], gpu.key)}
    left = [job for job in jobs(gpu) if job.run not in known]
    random.Random(0).shuffle(left)
    left = left[:only]
    print(f"{len(known)} runs are there, {len(left)} to measure on {gpu.key}, core {core}")
    log = MeasurementLog(folder, gpu.key, "search-table")
    start_s = time.perf_counter()
    with Profiler(
        gpu=gpu.key, provenance={"command": "benchmarks/search_table.py", "core": core}
    ) as profiler:
        for number, job in enumerate(left, start=1):
            training = job.run.phase == "finetune"
            length = job.run.seq_len if training else job.run.prompt_len
            found = profiler.measure(
                job.run,
                model_config=job.model.config,
                target_modules=job.peft_targets,
                seq_lens=[length],
                num_batches=NUM_BATCHES,
                timeout_s=TIMEOUT_S,
            )
            log.append(found)
            passed_s = time.perf_counter() - start_s
            what = job.run.method if training else "inference"
            print(
                f"{number}/{len(left)} {job.run.model} {what} batch {job.run.batch_size} "
                f"{length} tokens: {found.outcome} in {found.device_s:.1f} s, "
                f"{passed_s / number * (len(left) - number) / 60:.0f} min left",
                flush=True,
            )


def load_gpu(folder: Path = FOLDER) -> GpuSpec:
    """The device that the table was measured on, which need not be this machine's."""
    fields = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    fields.pop("schema_version")
    for name in ("aliases", "names", "unverified"):
        fields[name] = tuple(fields[name])
    return GpuSpec(**fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="measure at most so many runs now")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    measure(options.folder, only=options.only)


if __name__ == "__main__":
    main()
