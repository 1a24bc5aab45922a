"""Tables of runs that stand in for devices: measured on a CPU, invented, and published.

The measured one has every combination of 6 small models, 4 methods, 4 batch sizes and 2 lengths,
fine-tuning and inference, through the product's own profiler: one thread, pinned to one core. The
records are ordinary measurements; what is there already is not measured again, so an interrupted
measurement goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import published

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import count_run
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.profile import Profiler
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.counted_candidate import CountedCandidate, count_inference, count_training
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import SCHEMA_VERSION, Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.jsonfiles import write_object
from whichlora.store.measurements import MeasurementLog, read_measurements

FOLDER = Path(__file__).parent / "table"
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

NUM_SEQUENCES = 10_000  # of the imagined data: total time is proportional to it
NUM_STEPS = 5  # of a profile whose steps were not published one by one


def table_runs() -> Iterator[RunConfig]:
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


def table_jobs(gpu: GpuSpec) -> list[ResolvedRun]:
    """The runs with every default filled in, as records name them."""
    models = {name: load_model(name) for name in MODELS}
    return [resolve(models[run.model], run, gpu) for run in table_runs()]


def measure(folder: Path, *, only: int | None) -> None:
    """Measure what is not in `folder` yet, in an order that no drift of the machine follows."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    gpu = find_gpu("cpu")
    write_object(folder / "gpu.json", {"schema_version": SCHEMA_VERSION} | asdict(gpu))
    known = {record.run for record in read_measurements([folder], gpu.key)}
    left = [job for job in table_jobs(gpu) if job.run not in known]
    random.Random(0).shuffle(left)
    left = left[:only]
    print(f"{len(known)} runs are there, {len(left)} to measure on {gpu.key}, core {core}")
    log = MeasurementLog(folder, gpu.key, "search-table")
    start_s = time.perf_counter()
    with Profiler(
        gpu=gpu.key, provenance={"command": "benchmarks/search measure", "core": core}
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
    for name in ("aliases", "names", "notes", "unverified"):
        fields[name] = tuple(fields[name])
    return GpuSpec(**fields)


@dataclass(frozen=True)
class Table:
    """Measured runs of one length: what the device would answer."""

    name: str
    gpu: GpuSpec
    records: Sequence[Measurement]
    counted_candidates: Sequence[CountedCandidate]
    num_params: Mapping[str, int]

    @property
    def runs(self) -> list[RunConfig]:
        return [one.job.run for one in self.counted_candidates]

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of the whole fine-tuning, or of one generated token."""
        return np.array([_seconds(one) for one in self.records])

    @property
    def num_bytes(self) -> np.ndarray:
        return np.array([float(one.closest_peak_bytes or 0) for one in self.records])

    @property
    def training(self) -> np.ndarray:
        return np.array([run.phase == "finetune" for run in self.runs])


def _seconds(record: Measurement) -> float:
    run = record.run
    if record.generate_s:
        return median(record.generate_s) / (run.batch_size * run.max_new_tokens)
    return NUM_SEQUENCES / run.batch_size * sum(record.step_s) / len(record.step_s)


def batch_s(run: RunConfig, seconds: float) -> float:
    """Seconds of one step or generation of a run that takes `seconds` (`Table.seconds`)."""
    if run.phase == "inference":
        return seconds * run.batch_size * run.max_new_tokens
    return seconds * run.batch_size / NUM_SEQUENCES


def table_of(name: str, gpu: GpuSpec, records: Sequence[Measurement]) -> Table:
    """A table of the good records among `records`."""
    counted_candidates, good = [], []
    models = {}
    for record in records:
        if record.outcome != "ok":
            continue
        run = record.run
        model = models.setdefault(run.model, load_model(run.model))
        job = resolve(model, run, gpu)
        if run.phase == "finetune":
            steps = {run.seq_len: NUM_SEQUENCES / run.batch_size}
            counted_candidates.append(
                count_training(count_run(job), steps, profiled=[run.seq_len] * len(record.step_s))
            )
        else:
            counted_candidates.append(
                count_inference(count_run(job), num_runs=len(record.generate_s))
            )
        good.append(record)
    return Table(name, gpu, good, counted_candidates, {k: v.num_params for k, v in models.items()})


def only(table: Table, models: Sequence[str]) -> Table:
    """The runs of `models`, as a table of its own."""
    chosen = [i for i, run in enumerate(table.runs) if run.model in models]
    return Table(
        name=f"{table.name}, {', '.join(models)}",
        gpu=table.gpu,
        records=[table.records[i] for i in chosen],
        counted_candidates=[table.counted_candidates[i] for i in chosen],
        num_params={name: table.num_params[name] for name in models},
    )


def halves(table: Table) -> tuple[list[str], list[str]]:
    """Every second model by size, and the others."""
    by_size = sorted(table.num_params, key=lambda name: table.num_params[name])
    return by_size[::2], by_size[1::2]


def measured_tables(folder: Path = FOLDER) -> Iterator[Table]:
    """One table per length of what `measure` measured."""
    gpu = load_gpu(folder)
    records = read_measurements([folder], gpu.key)
    for length in LENGTHS:
        chosen = [
            one
            for one in records
            if (one.run.seq_len if one.run.phase == "finetune" else one.run.prompt_len) == length
        ]
        if chosen:
            yield table_of(f"CPU, {length} tokens", gpu, chosen)


def invented_table(seed: int) -> Table:
    """A device drawn from the prior, with errors that the formulas do not explain: for trying."""
    rng = np.random.default_rng(seed)
    gpu = find_gpu("cpu")
    prior = prior_calibration(gpu)
    models = {}
    for phase, model in prior.time.items():
        factor = {name: float(np.exp(rng.normal(0, 0.4))) for name in model.mean}
        models[phase] = replace(model, mean={k: v * factor[k] for k, v in model.mean.items()})
    truth = replace(prior, time=models)
    jobs = [job for job in table_jobs(gpu) if 64 in (job.run.seq_len, job.run.prompt_len)]
    jobs = [job for job in jobs if job.run.seq_len == 64 or job.run.phase == "inference"]
    counted_candidates = [
        count_training(count_run(job), {64: NUM_SEQUENCES / job.run.batch_size}, profiled=[64] * 4)
        if job.run.phase == "finetune"
        else count_inference(count_run(job), num_runs=4)
        for job in jobs
    ]
    candidate_posterior = CandidatePosterior(counted_candidates)
    deviation = 0.15 / prior.time["finetune"].noise
    posterior = candidate_posterior.time(truth)
    errors = rng.multivariate_normal(
        np.zeros(len(jobs)), posterior.residual_covariance * deviation**2
    )
    seconds = np.exp(posterior.log_value + errors)
    used = np.exp(candidate_posterior.memory(truth).log_value + rng.normal(0, 0.005, len(jobs)))
    run_s = candidate_posterior.run_s(truth)
    records = []
    for i, job in enumerate(jobs):
        run = job.run
        training = run.phase == "finetune"
        step_s = float(seconds[i]) * run.batch_size / NUM_SEQUENCES
        whole_s = float(seconds[i]) * run.batch_size * run.max_new_tokens
        records.append(
            Measurement(
                id=f"{seed}-{i}",
                gpu=gpu.key,
                date="2026-11-21T00:00:00+00:00",
                config=run.to_dict(),
                outcome="ok",
                step_s=(step_s,) * 4 if training else (),
                batch_seq_len=(64,) * 4 if training else (),
                generate_s=() if training else (whole_s,) * 4,
                prefill_s=() if training else (whole_s / 2,) * 4,
                decode_s_per_token=()
                if training
                else (whole_s / 2 / (run.max_new_tokens - 1),) * 4,
                peak_allocated_bytes=round(float(used[i])),
                device_s=float(run_s[i]),
            )
        )
    return Table(f"invented {seed}", gpu, records, counted_candidates, table_sizes(jobs))


def published_table() -> Table:
    """Fine-tunings on A100 that IBM published, at one length; loading and warm-up are assumed.

    Of runs that differ in library versions or dropout alone, the first stays: no plan asks for
    both.
    """
    gpu = find_gpu("a100-sxm-80gb")
    by_run: dict[RunConfig, dict[str, float]] = {}
    for one in published.read_all():
        if isinstance(one, published.Observation) and one.source == "fms_acceleration_bench":
            by_run.setdefault(one.run, {})[one.quantity] = one.value
    records = []
    seen: set[RunConfig] = set()
    for number, (run, values) in enumerate(by_run.items()):
        if run.seq_len != 4096 or not {"step_s", "peak_allocated"} <= set(values):
            continue
        try:
            job = resolve(load_model(run.model), run, gpu)
        except ConfigError:
            continue
        asked = replace(job.run, libraries=(), lora_dropout=0.0, optimizer="adamw_torch")
        if asked in seen:
            continue
        seen.add(asked)
        load_s = load_model(run.model).num_params * 2 / 1e9
        records.append(
            Measurement(
                id=f"published-{number}",
                gpu=gpu.key,
                date="2024-01-01T00:00:00+00:00",
                config=job.run.to_dict(),
                outcome="ok",
                step_s=(values["step_s"],) * NUM_STEPS,
                batch_seq_len=(run.seq_len,) * NUM_STEPS,
                peak_allocated_bytes=round(values["peak_allocated"]),
                device_used_bytes=round(values["device_used"]),
                device_s=load_s + values["step_s"] * (NUM_STEPS + 1),
            )
        )
    return table_of("A100, 4096 tokens", gpu, records)


def table_sizes(jobs: Sequence[ResolvedRun]) -> dict[str, int]:
    return {job.run.model: job.model.num_params for job in jobs}
