"""Searches replayed over tables of real runs: the table is the device, the limits are random."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import search_table

from whichlora import api
from whichlora.calibration import Calibration, prior_calibration
from whichlora.errors import ConfigError
from whichlora.fitting import fit
from whichlora.outlook import (
    Outline,
    Outlook,
    closest_counter,
    outline_inference,
    outline_training,
)
from whichlora.plan import Budget
from whichlora.policy import WORTHWHILE_GAIN, Contest, tiers
from whichlora.prediction import resolve
from whichlora.pursuit import Pursuit
from whichlora.results import Measurement
from whichlora.specs import GpuSpec, RunConfig
from whichlora.store.measurements import read_measurements

NUM_SEQUENCES = 10_000  # of the imagined data: total time is proportional to it
NUM_STEPS = 5  # of a profile whose steps were not published one by one
OOM_STEPS = 1.0  # a run that does not fit dies in its first step


@dataclass(frozen=True)
class Table:
    """Measured runs of one length: what the device would answer."""

    name: str
    gpu: GpuSpec
    records: Sequence[Measurement]
    outlines: Sequence[Outline]
    num_params: Mapping[str, int]

    @property
    def runs(self) -> list[RunConfig]:
        return [one.job.run for one in self.outlines]

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of the whole fine-tuning, or of one generated token."""
        return np.array([_seconds(one) for one in self.records])

    @property
    def num_bytes(self) -> np.ndarray:
        return np.array([float(closest_counter(one) or 0) for one in self.records])

    @property
    def training(self) -> np.ndarray:
        return np.array([run.phase == "finetune" for run in self.runs])


def _seconds(record: Measurement) -> float:
    run = record.run
    if record.generate_s:
        return median(record.generate_s) / (run.batch_size * run.max_new_tokens)
    return NUM_SEQUENCES / run.batch_size * sum(record.step_s) / len(record.step_s)


def table_of(name: str, gpu: GpuSpec, records: Sequence[Measurement]) -> Table:
    """A table of the good records among `records`."""
    outlines, good = [], []
    models = {}
    for record in records:
        if record.outcome != "ok":
            continue
        run = record.run
        model = models.setdefault(run.model, api.load_model(run.model))
        job = resolve(model, run, gpu)
        if run.phase == "finetune":
            steps = {run.seq_len: NUM_SEQUENCES / run.batch_size}
            outlines.append(outline_training(job, steps, num_batches=len(record.step_s)))
        else:
            outlines.append(outline_inference(job, num_runs=len(record.generate_s)))
        good.append(record)
    return Table(name, gpu, good, outlines, {k: v.num_params for k, v in models.items()})


def measured_tables(folder: Path) -> Iterator[Table]:
    """One table per length of what `search_table.py` measured."""
    gpu = search_table.load_gpu(folder)
    records = read_measurements([folder], gpu.key)
    for length in search_table.LENGTHS:
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
    gpu = api.find_gpu("cpu")
    prior = prior_calibration(gpu)
    time = {}
    for phase, model in prior.time.items():
        factor = {name: float(np.exp(rng.normal(0, 0.4))) for name in model.mean}
        time[phase] = replace(model, mean={k: v * factor[k] for k, v in model.mean.items()})
    truth = replace(prior, time=time)
    jobs = [job for job in search_table.jobs(gpu) if 64 in (job.run.seq_len, job.run.prompt_len)]
    jobs = [job for job in jobs if job.run.seq_len == 64 or job.run.phase == "inference"]
    outlines = [
        outline_training(job, {64: NUM_SEQUENCES / job.run.batch_size}, num_batches=4)
        if job.run.phase == "finetune"
        else outline_inference(job, num_runs=4)
        for job in jobs
    ]
    outlook = Outlook(outlines)
    deviation = 0.15 / prior.time["finetune"].noise
    belief = outlook.time(truth)
    errors = rng.multivariate_normal(np.zeros(len(jobs)), belief.own * deviation**2)
    seconds = np.exp(belief.log_value + errors)
    used = np.exp(outlook.memory(truth).log_value + rng.normal(0, 0.005, len(jobs)))
    run_s = outlook.run_s(truth)
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
    return Table(f"invented {seed}", gpu, records, outlines, table_sizes(jobs))


def published_table() -> Table:
    """Fine-tunings on A100 that IBM published, at one length; loading and warm-up are assumed.

    Of runs that differ in library versions or dropout alone, the first stays: no plan asks for
    both.
    """
    import published_rows

    gpu = api.find_gpu("a100-sxm-80gb")
    by_run: dict[RunConfig, dict[str, float]] = {}
    for one in published_rows.read_all():
        if isinstance(one, published_rows.Observation) and one.source == "fms_acceleration_bench":
            by_run.setdefault(one.run, {})[one.quantity] = one.value
    records = []
    seen: set[RunConfig] = set()
    for number, (run, values) in enumerate(by_run.items()):
        if run.seq_len != 4096 or not {"step_s", "peak_allocated"} <= set(values):
            continue
        try:
            job = resolve(api.load_model(run.model), run, gpu)
        except ConfigError:
            continue
        asked = replace(job.run, libraries=(), lora_dropout=0.0, optimizer="adamw_torch")
        if asked in seen:
            continue
        seen.add(asked)
        load_s = api.load_model(run.model).num_params * 2 / 1e9
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


def table_sizes(jobs: Sequence[object]) -> dict[str, int]:
    return {job.run.model: job.model.num_params for job in jobs}  # type: ignore[attr-defined]


# --- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited:
    """A table under one set of limits: the problem, and the answer that measuring all would give.

    Args:
        cost: of each run in the order of preference, infinite where it is no answer.
    """

    table: Table
    contest: Contest
    meets: np.ndarray
    cost: np.ndarray

    @property
    def winner(self) -> int | None:
        return int(np.argmin(self.cost)) if np.isfinite(self.cost).any() else None


def limited(table: Table, dice: random.Random) -> Limited:
    """`table` under random limits: a device size, and times by quantiles; each may be absent."""
    seconds, num_bytes, training = table.seconds, table.num_bytes, table.training
    runs = table.runs
    most_s = np.full(len(runs), np.inf)
    for stage in (training, ~training):
        if stage.any() and dice.random() < 0.75:
            most_s[stage] = np.quantile(seconds[stage], dice.uniform(0.05, 0.9))
    most_bytes = np.full(len(runs), float(np.quantile(num_bytes, dice.uniform(0.1, 1.0))))
    names = [run.model for run in runs]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    model = np.array([numbers[name] for name in names])
    tier = np.array(tiers([-float(table.num_params[name]) for name in names]))
    contest = Contest(
        training=training,
        model=model,
        tier=tier,
        price=np.ones(len(runs)),
        most_bytes=most_bytes,
        most_s=most_s,
        prefer="size",
    )
    meets = (seconds <= most_s) & (num_bytes <= most_bytes)
    asked = [model[~training] == m for m in model]  # a model without inference runs is not asked
    serves = np.array([not of.any() or bool(meets[~training][of].any()) for of in asked])
    stands = meets & training & serves
    cost = np.where(stands, np.log(seconds) + 1e3 * tier, np.inf)
    return Limited(table, contest, meets, cost)


@dataclass
class Device:
    """The table as a device that runs out of memory at the limit, and what was asked of it."""

    problem: Limited
    asked: list[int] = field(default_factory=list)
    device_s: float = 0.0
    num_oom: int = 0

    def measure(self, position: int, _: object = None) -> Measurement:
        record = self.problem.table.records[position]
        self.asked.append(position)
        if self.problem.table.num_bytes[position] > self.problem.contest.most_bytes[position]:
            steps = record.step_s or record.generate_s
            cost = max(0.0, record.device_s - (len(steps) + 2 - OOM_STEPS) * median(steps))
            self.num_oom += 1
            failed = replace(
                record,
                outcome="oom",
                device_s=cost,
                step_s=(),
                batch_seq_len=(),
                generate_s=(),
                prefill_s=(),
                decode_s_per_token=(),
                peak_allocated_bytes=None,
                device_used_bytes=None,
            )
            self.device_s += cost
            return failed
        self.device_s += record.device_s
        return record


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One search: what it answered and what it cost.

    Args:
        near: right, within 2 % of the winner's cost, or the neighbouring batch of its variant.
        certain: it stopped because it was as sure as asked; None where a policy knows no doubt.
    """

    runs: int
    device_s: float
    share: float
    num_oom: int
    right: bool
    near: bool
    confidence: float = 1.0
    certain: bool | None = None


def ours(problem: Limited, budget: Budget, records: Sequence[Measurement] = ()) -> Result:
    """The product's search, from a calibration of `records`."""
    table = problem.table
    device = Device(problem)
    known = list(records)
    start = fit(known, table.gpu, find, held_out=False) if known else prior_calibration(table.gpu)
    search = Pursuit(problem.contest, outlook_of(table.name), start)

    def learn(found: Measurement) -> Calibration:
        known.append(found)
        return fit(known, table.gpu, find, held_out=False)

    decision, reason = search.pursue(device.measure, learn, budget)
    return judged(
        problem,
        device,
        decision.best,
        confidence=decision.confidence,
        certain=reason == "certain",
    )


def judged(problem: Limited, device: Device, answer: int | None, **more: object) -> Result:
    everything = Device(problem)
    for position in range(len(problem.table.records)):
        everything.measure(position)
    right = answer == problem.winner
    near = right
    if answer is not None and problem.winner is not None and not right:
        # as good but for the last 2 %, or the neighbouring batch size of the same variant
        best = problem.cost[problem.winner]
        near = bool(problem.cost[answer] <= best - math.log(WORTHWHILE_GAIN))
        runs = problem.table.runs
        one, other = runs[answer], runs[problem.winner]
        same = replace(one, batch_size=other.batch_size) == other
        near |= same and max(one.batch_size, other.batch_size) <= 2 * min(
            one.batch_size, other.batch_size
        )
    return Result(
        runs=len(device.asked),
        device_s=device.device_s,
        share=device.device_s / everything.device_s,
        num_oom=device.num_oom,
        right=right,
        near=near,
        **more,  # type: ignore[arg-type]
    )


@cache
def _model(name: str) -> object:
    return api.load_model(name)


def find(record: Measurement) -> object:
    return _model(str(record.config["model"]))


_OUTLOOKS: dict[str, Outlook] = {}


def outlook_of(name: str) -> Outlook:
    return _OUTLOOKS[name]


def replay(
    table: Table, num_sets: int, policy: Callable[[Limited], Result], seed: int
) -> list[Result]:
    dice = random.Random(seed)
    _OUTLOOKS.setdefault(table.name, Outlook(table.outlines))
    return [policy(limited(table, dice)) for _ in range(num_sets)]
