"""Searches replayed over tables of real runs: the table is the device, the limits are random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

import numpy as np

from search.tables import Table, batch_s
from whichlora.calibration.fit import fit
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.profiler.early_stop import is_enough
from whichlora.profiler.kept_model import build_key
from whichlora.search.acquisition import WORTHWHILE_GAIN, Decision, SearchProblem, tiers
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.loop import Learn, Measure, SearchLoop
from whichlora.spec.plan import Budget
from whichlora.spec.results import Measurement
from whichlora.store.hub import load_model

OOM_STEPS = 1.0  # a run that does not fit dies in its first step


# --- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited:
    """A table under one set of limits: the problem, and the answer that measuring all would give.

    Args:
        cost: of each run in the order of preference, infinite where it is no answer.
    """

    table: Table
    problem: SearchProblem
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
    problem = SearchProblem(
        training=training,
        form=model,
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
    return Limited(table, problem, meets, cost)


@dataclass
class Device:
    """The table as a device that runs out of memory at the limit, and what was asked of it."""

    problem: Limited
    asked: list[int] = field(default_factory=list)
    device_s: float = 0.0
    num_oom: int = 0
    kept: str = ""  # of the model of the run before, as the profiler keeps it; none after a failure

    def measure(self, position: int, decisive_s: float | None = None) -> Measurement:
        """What a profile of a candidate answers.

        Args:
            decisive_s: on which the run decides, in the unit of `Table.seconds`: what the profile
                would not have made once that was clear is neither answered nor charged.
        """
        record = self.problem.table.records[position]
        self.asked.append(position)
        key = _key_of(record)
        if key == self.kept:
            record = replace(record, device_s=record.device_s - record.build_s, build_s=0.0)
        self.kept = key
        if self.problem.table.num_bytes[position] > self.problem.problem.most_bytes[position]:
            steps = record.step_s or record.generate_s
            cost = max(0.0, record.device_s - (len(steps) + 2 - OOM_STEPS) * median(steps))
            self.num_oom += 1
            self.kept = ""
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
        if decisive_s is not None:
            record = ended_early(record, batch_s(record.run, decisive_s))
        self.device_s += record.device_s
        return record


def all_measured(problem: Limited) -> Device:
    """The device after every run of the table, each model's runs in a row: it is built once."""
    device = Device(problem)
    records = problem.table.records
    for position in sorted(range(len(records)), key=lambda position: _key_of(records[position])):
        device.measure(position)
    return device


def _key_of(record: Measurement) -> str:
    return build_key({"run": record.config, "model_config": None, "target_modules": None})


def ended_early(record: Measurement, decisive_s: float) -> Measurement:
    """`record` as it would be, had its run known that `decisive_s` a batch decides.

    All its batches are of one length. What comes before the timed batches, and on a CPU the one
    that counts bytes, is as it was.
    """
    times = record.step_s or record.generate_s
    phase, number = record.run.phase, 1
    alike = [1.0] * len(times)
    while number < len(times) and not is_enough(
        phase, times[:number], [decisive_s] * number, alike
    ):
        number += 1
    return replace(
        record,
        step_s=record.step_s[:number],
        batch_seq_len=record.batch_seq_len[:number],
        generate_s=record.generate_s[:number],
        prefill_s=record.prefill_s[:number],
        decode_s_per_token=record.decode_s_per_token[:number],
        device_s=record.device_s - sum(times[number:]),
    )


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
    device = Device(problem)
    search, measure, learn = searching(problem, device, records)
    decision, reason = search.measure_until_certain(measure, learn, budget)
    return judged(
        problem,
        device,
        decision.best,
        confidence=decision.confidence,
        certain=reason == "certain",
    )


def searching(
    problem: Limited, device: Device, records: Sequence[Measurement] = ()
) -> tuple[SearchLoop, Measure, Learn]:
    """A search of the product on `device`, from a calibration of `records`."""
    table = problem.table
    known = list(records)
    start = fit(known, table.gpu, find, held_out=False) if known else prior_calibration(table.gpu)
    search = SearchLoop(problem.problem, candidate_posterior_of(table.name), start)

    def measure(position: int, decision: Decision | None) -> Measurement:
        assert decision is not None
        return device.measure(position, search.decisive_s(position, decision))

    def learn(found: Measurement) -> Calibration:
        known.append(found)
        return fit(known, table.gpu, find, held_out=False)

    return search, measure, learn


def judged(problem: Limited, device: Device, answer: int | None, **more: object) -> Result:
    everything = all_measured(problem)
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
    return load_model(name)


def find(record: Measurement) -> object:
    return _model(str(record.config["model"]))


_CANDIDATE_POSTERIORS: dict[str, CandidatePosterior] = {}


def candidate_posterior_of(name: str) -> CandidatePosterior:
    return _CANDIDATE_POSTERIORS[name]


def forget_candidate_posteriors() -> None:
    """Make them anew at the next replay, since something that they are made of has changed."""
    _CANDIDATE_POSTERIORS.clear()


def replay(
    table: Table, num_sets: int, policy: Callable[[Limited], Result], seed: int
) -> list[Result]:
    dice = random.Random(seed)
    _CANDIDATE_POSTERIORS.setdefault(table.name, CandidatePosterior(table.counted_candidates))
    return [policy(limited(table, dice)) for _ in range(num_sets)]
