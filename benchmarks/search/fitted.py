"""Constants of the search that are fitted to the CPU table.

`shares` are those of `whichlora.search.correlation` by maximum likelihood. Residuals of the logs of
all training times around a fit of the whole table are normal with the shared parts as their
correlation; shares are fitted to every second model by size and tested on the others, by the
log-likelihood of a residual. Residuals are cut at three times their robust spread: a run that
another process slowed down says nothing about the formulas.

`early_ends` is of `profiler.early_stop`: of every run, under decisive times within 30 % of its own,
how many of its batches are made, and how often those made are on the other side of the decisive
time than all together. Also how far single batches scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
from markdown_tables import markdown_table
from scipy.optimize import minimize

from search.replay import (
    Limited,
    Result,
    ended_early,
    find,
    forget_candidate_posteriors,
    ours,
    replay,
)
from search.savings import HEAD, summary
from search.tables import Table, halves, measured_tables, only
from whichlora.calibration.fit import fit
from whichlora.search import correlation
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.spec.plan import Budget
from whichlora.spec.results import Measurement

REPLAY_SEED = 2  # of limits that no table of docs/accuracy/search.md shows
NAMES = ("MODEL_SHARE", "METHOD_SHARE", "VARIANT_SHARE", "CORRELATION_PER_DOUBLING")
NOW = (
    correlation.MODEL_SHARE,
    correlation.METHOD_SHARE,
    correlation.VARIANT_SHARE
    + correlation.SETTINGS_SHARE,  # the table has one setting of each variant
    correlation.CORRELATION_PER_DOUBLING,
)

NUM_TIMES = 200  # decisive ones of each run
REACH = 0.3
NAMES = {"finetune": "training steps", "inference": "generations"}


@dataclass(frozen=True)
class Residuals:
    """Residuals of some models of one table, and what their runs have in common."""

    values: np.ndarray
    model: np.ndarray
    method: np.ndarray
    doublings: np.ndarray

    def log_likelihood(self, shares: Sequence[float], deviation: float) -> float:
        """Of all residuals together."""
        model, method, variant, alike = shares
        same_model = self.model[:, None] == self.model
        same_method = self.method[:, None] == self.method
        closeness = alike ** np.abs(self.doublings[:, None] - self.doublings)
        matrix = (
            model * same_model
            + method * same_method
            + variant * same_model * same_method * closeness
        )
        np.fill_diagonal(matrix, 1.0)
        factor = np.linalg.cholesky(matrix * deviation**2)
        scaled = np.linalg.solve(factor, self.values)
        halved = scaled @ scaled / 2 + np.log(np.diagonal(factor)).sum()
        return float(-halved - len(scaled) * np.log(2 * np.pi) / 2)


def residuals(table: Table, models: Sequence[str]) -> Residuals:
    """Of the fine-tunings of `models`, around a fit of the whole table."""
    calibration = fit(list(table.records), table.gpu, find, held_out=False)
    judged = CandidatePosterior(table.counted_candidates)
    chosen = [i for i, run in enumerate(table.runs) if table.training[i] and run.model in models]
    values = np.array([judged.time_error(i, table.records[i], calibration) for i in chosen])
    values -= np.median(values)
    spread = 1.4826 * np.median(np.abs(values))
    runs = [table.runs[i] for i in chosen]
    return Residuals(
        values=np.clip(values, -3 * spread, 3 * spread),
        model=np.array([run.model for run in runs]),
        method=np.array([run.method for run in runs]),
        doublings=np.log2([run.batch_size for run in runs]),
    )


def likelihood(found: Sequence[Residuals], shares: Sequence[float]) -> float:
    """Mean log-likelihood of a residual, at the deviation that suits each table best."""
    deviations = np.geomspace(0.02, 1.0, 60)
    number = sum(len(one.values) for one in found)
    best = sum(max(one.log_likelihood(shares, d) for d in deviations) for one in found)
    return best / number


def fitted(found: Sequence[Residuals]) -> tuple[float, ...]:
    """Shares of the largest likelihood; they and the rest add up to one."""

    def shares(free: np.ndarray) -> tuple[float, ...]:
        weights = np.exp(np.append(free[:3], 0.0))
        parts = weights / weights.sum()
        return (*parts[:3].tolist(), float(1 / (1 + np.exp(-free[3]))))

    done = minimize(
        lambda free: -likelihood(found, shares(free)),
        np.array([0.5, 0.0, 0.5, 2.0]),
        method="Nelder-Mead",
        options={"maxiter": 150},
    )
    return shares(done.x)


def replayed(
    name: str, tables: Sequence[Table], shares: Sequence[float], num_sets: int
) -> tuple[object, ...]:
    """A row: searches over `tables` in the light of other shares."""
    before = {each: getattr(correlation, each) for each in (*NAMES, "SETTINGS_SHARE")}
    try:
        for each, value in zip(NAMES, shares, strict=True):
            setattr(correlation, each, value)
        correlation.SETTINGS_SHARE = 0.0  # the table has one setting of each variant
        forget_candidate_posteriors()
        found = [
            one
            for table in tables
            for one in replay(table, num_sets // len(tables), _search, REPLAY_SEED)
        ]
    finally:
        for each, value in before.items():
            setattr(correlation, each, value)
        forget_candidate_posteriors()
    return summary(name, found)


def _search(problem: Limited) -> Result:
    return ours(problem, Budget())


def print_shares(num_sets: int) -> None:
    """Print the fitted shares, and what searches find with them under `num_sets` sets of limits."""
    tables = list(measured_tables())
    both = halves(tables[0])
    rows: list[tuple[object, ...]] = []
    independent = (0.0, 0.0, 0.0, 1.0)
    print("shares: " + ", ".join(NAMES) + " (with SETTINGS_SHARE in the third)")
    for here, there in (both, both[::-1]):
        learned = fitted([residuals(table, here) for table in tables])
        held_out = [residuals(table, there) for table in tables]
        print("fitted to " + ", ".join(name.split("/")[1] for name in here))
        for name, each in (("fitted", learned), ("in use", NOW), ("none", independent)):
            parts = " ".join(f"{share:.2f}" for share in each)
            print(
                f"  {name}: {parts}; of the other half {likelihood(held_out, each):+.3f} a residual"
            )
        if num_sets:
            searched = [only(table, there) for table in tables]
            title = " and ".join(model.split("/")[1] for model in there)
            rows += [
                replayed(f"{title}, shares of the others", searched, learned, num_sets),
                replayed(f"{title}, shares in use", searched, NOW, num_sets),
            ]
    everything = fitted([residuals(table, both[0] + both[1]) for table in tables])
    print("fitted to all: " + " ".join(f"{share:.2f}" for share in everything))
    if num_sets:
        print(markdown_table(HEAD, rows))


def times_of(record: Measurement) -> tuple[float, ...]:
    return record.step_s or record.generate_s


def early_ends(tables: Sequence[Table]) -> str:
    """A Markdown table, a row for each stage."""
    head = (
        "batches",
        "robust spread of one",
        "made, of those of a profile",
        "device time spared",
        "profiles ended early",
        "of them on the other side",
    )
    rows = []
    rng = np.random.default_rng(0)
    for phase, name in NAMES.items():
        records = [one for table in tables for one in table.records if one.run.phase == phase]
        made, spared, wrong, scatter = [], [], [], []
        for record in records:
            whole_s = mean(times_of(record))
            scatter += [abs(np.log(one / whole_s)) for one in times_of(record)]
            for decisive_s in (whole_s * np.exp(rng.uniform(-REACH, REACH, NUM_TIMES))).tolist():
                ended = ended_early(record, decisive_s)
                times_s = times_of(ended)
                made.append(len(times_s))
                spared.append(1 - ended.device_s / record.device_s)
                if len(times_s) < len(times_of(record)):
                    wrong.append((mean(times_s) > decisive_s) != (whole_s > decisive_s))
        number = len(times_of(records[0]))
        spread = 1.4826 * median(scatter) * (number / (number - 1)) ** 0.5
        made_of = f"{mean(made):.2f} of {number}"
        shares = (f"{mean(spared):.0%}", f"{len(wrong) / len(made):.0%}", f"{mean(wrong):.2%}")
        rows.append((name, f"{spread:.3f}", made_of, *shares))
    return markdown_table(head, rows)
