"""How little a search could cost: `search_floor.py [--sets N]`.

An oracle knows every answer of the table beforehand. It measures the winner and the cheapest run
that shows that its model serves; then, until the product's own beliefs are as certain as they must
be, the run that adds most to their confidence per second. That is greedy, so not quite the least
that there is; but what it spends, no policy with these beliefs can spare by choosing better.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import search_table
from markdown_tables import markdown_table, median_and_p90
from search_devices import Table, measured_tables
from search_replay import Device, Limited, find, limited, ours, outlook_of, replay

from whichlora.calibration import prior_calibration
from whichlora.fitting import fit
from whichlora.plan import Budget
from whichlora.policy import Decision
from whichlora.pursuit import Pursuit
from whichlora.results import Measurement


@dataclass
class Oracle:
    """A search whose next run is chosen by what it will answer."""

    problem: Limited
    device: Device
    records: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.search = self._with([])

    def _with(self, asked: Sequence[int], decision: Decision | None = None) -> Pursuit:
        """The search once `asked` was measured."""
        table = self.problem.table
        known = list(self.records)
        device = Device(self.problem)
        search = Pursuit(self.problem.contest, outlook_of(table.name), prior_calibration(table.gpu))
        if known:
            search.measured.update(self.search.measured)
        for position in asked:
            decisive_s = None if decision is None else search.decisive_s(position, decision)
            search.measured[position] = device.measure(position, decisive_s)
            known.append(search.measured[position])
        if known:
            search.calibration = fit(known, table.gpu, find, held_out=False)
        search.spent.device_s = device.device_s
        return search

    def take(self, position: int, decision: Decision | None = None) -> None:
        found = self._with([position], decision)
        self.records.append(found.measured[position])
        self.device.device_s += found.spent.device_s
        self.device.asked.append(position)
        self.search = found

    def best_next(self, decision: Decision) -> int | None:
        """The run that adds most to the confidence per second."""
        worth: dict[int, float] = {}
        contest = self.problem.contest
        models = set(contest.form[decision.chance_to_win > 0].tolist())
        for position in range(len(contest.form)):
            likely = decision.chance_to_win[position] > 0 or not contest.training[position]
            if position in self.search.measured or not likely:
                continue
            if int(contest.form[position]) not in models:
                continue
            after = self._with([position], decision)
            gain = after.decide().confidence - decision.confidence
            worth[position] = gain / after.spent.device_s
        return max(worth, key=lambda one: worth[one], default=None)


def floor(problem: Limited, confidence: float) -> tuple[float, float, int]:
    """Device time of the answer alone and until it is certain, as shares, and the runs of that."""
    oracle = Oracle(problem, Device(problem))
    everything = Device(problem)
    for position in range(len(problem.table.records)):
        everything.measure(position)
    contest, winner = problem.contest, problem.winner
    if winner is not None:
        oracle.take(winner)
        serving = [
            i
            for i in np.flatnonzero(~contest.training & problem.meets).tolist()
            if contest.form[i] == contest.form[winner]
        ]
        if serving:
            oracle.take(min(serving, key=lambda i: problem.table.records[i].device_s))
    answer_s = oracle.device.device_s
    while True:
        decision = oracle.search.decide()
        if decision.confidence >= confidence:
            break
        position = oracle.best_next(decision)
        if position is None:
            break
        oracle.take(position, decision)
    total_s = everything.device_s
    return answer_s / total_s, oracle.device.device_s / total_s, len(oracle.device.asked)


def floors(tables: Sequence[Table], num_sets: int, seed: int) -> str:
    """A Markdown table: of the same limits, the floors and the search."""
    answers, certain, runs, searched = [], [], [], []
    for table in tables:
        searched += replay(
            table, num_sets // len(tables), lambda problem: ours(problem, Budget()), seed
        )
        dice = random.Random(seed)
        for _ in range(num_sets // len(tables)):
            alone, sure, number = floor(limited(table, dice), Budget().confidence)
            answers.append(alone)
            certain.append(sure)
            runs.append(number)

    num_searched = median_and_p90([one.runs for one in searched])
    rows = (
        ("the winner and one run that serves, which an oracle chooses", "2", answers),
        ("and what an oracle chooses to be 95 % sure of it", median_and_p90(runs), certain),
        ("WhichLoRA", num_searched, [one.share for one in searched]),
    )
    return markdown_table(
        ("what is measured", "runs, median / p90", "share, median / p90"),
        ((name, number, median_and_p90(shares, ".1%")) for name, number, shares in rows),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tables = list(measured_tables(search_table.FOLDER))
    print(floors(tables, options.sets, options.seed))
