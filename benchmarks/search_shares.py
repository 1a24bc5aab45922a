"""How alike the unexplained errors of two runs are: `search_shares.py [--replay N]`.

The shares of `whichlora.likeness` by maximum likelihood. Residuals of the logs of all training
times around a fit of the whole table are normal with the shared parts as their correlation; shares
are fitted to every second model by size and tested on the others, by the log-likelihood of a
residual.
Residuals are cut at three times their robust spread: a run that another process slowed down says
nothing about the formulas. `--replay` searches each half of the models under N sets of limits, with
the shares that the other half gave and with those in use.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import search_table
from markdown_tables import markdown_table
from scipy.optimize import minimize
from search_devices import Table, halves, measured_tables, only
from search_replay import Limited, Result, find, forget_outlooks, ours, replay
from search_savings import HEAD, summary

from whichlora import likeness
from whichlora.fitting import fit
from whichlora.outlook import Outlook
from whichlora.plan import Budget

REPLAY_SEED = 2  # of limits that no table of docs/accuracy/search.md shows
NAMES = ("MODEL_SHARE", "METHOD_SHARE", "VARIANT_SHARE", "ALIKE_PER_DOUBLING")
NOW = (
    likeness.MODEL_SHARE,
    likeness.METHOD_SHARE,
    likeness.VARIANT_SHARE + likeness.SETTINGS_SHARE,  # the table has one setting of each variant
    likeness.ALIKE_PER_DOUBLING,
)


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
        correlation = (
            model * same_model
            + method * same_method
            + variant * same_model * same_method * closeness
        )
        np.fill_diagonal(correlation, 1.0)
        factor = np.linalg.cholesky(correlation * deviation**2)
        scaled = np.linalg.solve(factor, self.values)
        halved = scaled @ scaled / 2 + np.log(np.diagonal(factor)).sum()
        return float(-halved - len(scaled) * np.log(2 * np.pi) / 2)


def residuals(table: Table, models: Sequence[str]) -> Residuals:
    """Of the fine-tunings of `models`, around a fit of the whole table."""
    calibration = fit(list(table.records), table.gpu, find, held_out=False)
    judged = Outlook(table.outlines)
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
    before = {each: getattr(likeness, each) for each in (*NAMES, "SETTINGS_SHARE")}
    try:
        for each, value in zip(NAMES, shares, strict=True):
            setattr(likeness, each, value)
        likeness.SETTINGS_SHARE = 0.0  # the table has one setting of each variant
        forget_outlooks()
        found = [
            one
            for table in tables
            for one in replay(table, num_sets // len(tables), _search, REPLAY_SEED)
        ]
    finally:
        for each, value in before.items():
            setattr(likeness, each, value)
        forget_outlooks()
    return summary(name, found)


def _search(problem: Limited) -> Result:
    return ours(problem, Budget())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", type=int, default=0)
    options = parser.parse_args()
    tables = list(measured_tables(search_table.FOLDER))
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
        if options.replay:
            searched = [only(table, there) for table in tables]
            title = " and ".join(model.split("/")[1] for model in there)
            rows += [
                replayed(f"{title}, shares of the others", searched, learned, options.replay),
                replayed(f"{title}, shares in use", searched, NOW, options.replay),
            ]
    everything = fitted([residuals(table, both[0] + both[1]) for table in tables])
    print("fitted to all: " + " ".join(f"{share:.2f}" for share in everything))
    if options.replay:
        print(markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()
