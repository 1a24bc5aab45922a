"""What the search saves against measuring everything: `search_savings.py [--sets N] [--write]`.

Replays searches over tables of real runs, each from an empty calibration: a random set of limits,
the product's own decisions, and the table as the device. Compared are policies that know nothing
of the formulas. They are stopped by an oracle the moment they have measured the true winner, which
no policy can know; ours stops by itself.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
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
from whichlora.fitting import fit
from whichlora.outlook import Outline, Outlook, outline_inference, outline_training
from whichlora.plan import Budget
from whichlora.policy import WORTHWHILE_GAIN, Contest, tiers
from whichlora.prediction import resolve
from whichlora.pursuit import Pursuit
from whichlora.results import Measurement
from whichlora.specs import GpuSpec, RunConfig
from whichlora.store.measurements import read_measurements

NUM_SEQUENCES = 10_000  # of the imagined data: total time is proportional to it
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
        return np.array([float(one.peak_allocated_bytes or 0) for one in self.records])

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
        if dice.random() < 0.75:
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
    serves = np.array([bool((meets & ~training & (model == m)).any()) for m in model])
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
            )
            self.device_s += cost
            return failed
        self.device_s += record.device_s
        return record


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One search: what it answered and what it cost."""

    runs: int
    device_s: float
    share: float
    num_oom: int
    right: bool
    near: bool
    confidence: float = 1.0
    certain: bool = True


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
    everything = sum(one.device_s for one in problem.table.records)
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
        share=device.device_s / everything,
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


def summary(name: str, results: Sequence[Result]) -> str:
    shares = sorted(one.share for one in results)
    runs = sorted(one.runs for one in results)
    sure = [one.right for one in results if one.certain]
    close = [one.near for one in results if one.certain]
    cells = (
        name,
        len(results),
        f"{np.mean([one.right for one in results]):.1%}",
        f"{np.mean([one.near for one in results]):.1%}",
        f"{median(runs):g} / {np.quantile(runs, 0.9):g}",
        f"{median(shares):.1%} / {np.quantile(shares, 0.9):.1%}",
        f"{np.mean([one.num_oom for one in results]):.2f}",
        f"{np.mean(sure):.1%} / {np.mean(close):.1%}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument(
        "--invented", type=int, default=0, help="try it on so many invented devices"
    )
    parser.add_argument("--folder", type=Path, default=search_table.FOLDER)
    options = parser.parse_args()
    tables = (
        [invented_table(seed) for seed in range(options.invented)]
        if options.invented
        else list(measured_tables(options.folder))
    )
    found = []
    for table in tables:
        found += replay(
            table, options.sets // len(tables), lambda problem: ours(problem, Budget()), seed=1
        )
    print(summary("WhichLoRA", found))


if __name__ == "__main__":
    main()
