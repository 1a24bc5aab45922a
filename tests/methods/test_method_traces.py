"""The ledger against the kept traces of every method, without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import method_traces


def test_traced_runs_of_every_method_are_predicted() -> None:
    by_method = method_traces.RUNS.errors()
    later = {name for drawn in method_traces.LATER.values() for name in drawn}
    assert set(by_method) == {*method_traces.METHODS, *later}
    sizes = [size for of_method in by_method.values() for size in of_method]
    assert len(sizes) >= 300
    assert median(sizes) < 0.003
    assert quantiles(sizes, n=20, method="inclusive")[18] < 0.02
    assert max(sizes) < 0.05
