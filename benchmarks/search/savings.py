"""What the search saves against measuring everything.

Replays searches over tables of real runs, each from an empty calibration and under a random set of
limits. Compared are policies that know nothing of the formulas. An oracle stops a search the moment
it has measured the true winner, which no policy can know; where nothing meets the limits, there is
no such moment.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from markdown_tables import markdown_table, median_and_p90

from search.policies import (
    binary_search,
    exhaustive,
    optuna_tpe,
    ours_stopped_by_oracle,
    random_order,
)
from search.replay import Limited, Result, ours, replay
from search.tables import Table, invented_table, measured_tables, published_table
from whichlora.spec.plan import Budget

PATIENCE = (5, 10, 20)  # fine-tunings after which TPE gives up
WARM = (0, 4, 16, 64)  # records of the device before the search
HEAD = (
    "policy",
    "sets",
    "winner found",
    "or as good",
    "runs, median / p90",
    "share of the exhaustive device time, median / p90 / worst",
    "out of memory per search",
    "right where 95 % sure, or as good",
)


def summary(name: str, results: Sequence[Result]) -> tuple[object, ...]:
    """One row of the table."""
    shares = [one.share for one in results]
    runs = [one.runs for one in results]
    sure = [one for one in results if one.certain is True]
    right = f"{np.mean([one.right for one in sure]):.1%}" if sure else "-"
    near = f"{np.mean([one.near for one in sure]):.1%}" if sure else "-"
    return (
        name,
        len(results),
        f"{np.mean([one.right for one in results]):.1%}",
        f"{np.mean([one.near for one in results]):.1%}",
        median_and_p90(runs),
        f"{median_and_p90(shares, '.1%')} / {max(shares):.1%}",
        f"{np.mean([one.num_oom for one in results]):.2f}",
        f"{right} / {near}",
    )


def policies(seed: int) -> dict[str, Callable[[Limited], Result]]:
    """Every policy by its name; TPE where Optuna is installed."""
    dice = random.Random(seed)
    found: dict[str, Callable[[Limited], Result]] = {
        "WhichLoRA": lambda problem: ours(problem, Budget()),
        "WhichLoRA, stopped by an oracle": ours_stopped_by_oracle,
        "binary search on the batch": binary_search,
        "random order, stopped by an oracle": lambda problem: random_order(problem, dice),
        "exhaustive": exhaustive,
    }
    try:
        import optuna  # noqa: F401
    except ImportError:
        print("Optuna is not installed: TPE is left out; pip install optuna to compare with it")
    else:
        found["Optuna TPE, stopped by an oracle"] = lambda problem: optuna_tpe(
            problem, dice.randrange(2**31)
        )
        for patience in PATIENCE:
            found[f"Optuna TPE, {patience} runs without a better one"] = partial(
                _patient_tpe, patience=patience, dice=dice
            )
    return found


def _patient_tpe(problem: Limited, *, patience: int, dice: random.Random) -> Result:
    return optuna_tpe(problem, dice.randrange(2**31), patience=patience)


def compared(tables: Sequence[Table], num_sets: int, seed: int) -> str:
    """The table of all policies, over the same limits."""
    rows = []
    for name, policy in policies(seed).items():
        found: list[Result] = []
        for table in tables:
            found += replay(table, num_sets // len(tables), policy, seed)
        rows.append(summary(name, found))
    return markdown_table(HEAD, rows)


def _warm(problem: Limited, *, num_records: int, dice: random.Random) -> Result:
    records = problem.table.records
    return ours(problem, Budget(), dice.sample(records, min(num_records, len(records))))


def warmed(tables: Sequence[Table], num_sets: int, seed: int) -> str:
    """What records of earlier runs on the device spare: the same limits, ever more records."""
    head = ("records before", "runs, median / p90", "share, median / p90", "winner found")
    rows = []
    for num_records in WARM:
        dice = random.Random(seed)
        found: list[Result] = []
        for table in tables:
            policy = partial(_warm, num_records=num_records, dice=dice)
            found += replay(table, num_sets // len(tables), policy, seed)
        runs, shares = [one.runs for one in found], [one.share for one in found]
        right = f"{np.mean([one.right for one in found]):.1%}"
        rows.append((num_records, median_and_p90(runs), median_and_p90(shares, ".1%"), right))
    return markdown_table(head, rows)


def report(options: argparse.Namespace) -> str:
    """Every table as Markdown."""
    groups: dict[str, list[Table]] = {}
    if options.invented:
        groups["Invented devices (no evidence about real ones)"] = [
            invented_table(seed) for seed in range(options.invented)
        ]
    else:
        if (options.folder / "gpu.json").exists():
            groups["Measured on a CPU, one core"] = list(measured_tables(options.folder))
        groups["Published fine-tunings on A100 (fms-acceleration), costs assumed"] = [
            published_table()
        ]
    lines = [
        f"Python {platform.python_version()}, NumPy {np.__version__}, {options.sets} sets of "
        f"limits, seed {options.seed}."
    ]
    for title, tables in groups.items():
        sizes = ", ".join(f"{len(table.records)} runs" for table in tables[:3])
        lines += ["", f"## {title}", "", f"Tables: {len(tables)} ({sizes}).", ""]
        # two models and no inference: more limits would ask the same few questions again
        sets = min(options.sets, options.warm_sets) if "Published" in title else options.sets
        lines.append(compared(tables, sets, options.seed))
        lines += ["", warmed(tables, min(options.sets, options.warm_sets), options.seed)]
    return "\n".join(lines)
