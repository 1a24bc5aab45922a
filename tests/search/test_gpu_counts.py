"""Numbers of GPUs side by side: which are the fewest, the cheapest and the fastest."""

from __future__ import annotations

from candidates import prediction

from whichlora.search.feasibility import Candidate, Quantity, judge
from whichlora.search.gpu_counts import GpuCounts, compare_counts, gpu_seconds
from whichlora.spec.costs import own_price
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.plan import Limits
from whichlora.spec.run import RunConfig
from whichlora.units import GiB


def candidate(gpus: int, total_s: float, *, used_bytes: float = 8 * GiB) -> Candidate:
    parallel = ParallelConfig(strategy="ddp", gpus=gpus) if gpus > 1 else ONE_GPU
    run = RunConfig(model="m", parallel=parallel)
    total = Quantity(value=total_s, low=total_s / 2, high=2 * total_s, measured=False)
    return judge(prediction(run, used_bytes=used_bytes), Limits(), total_s=total)


def compared(*candidates: Candidate, price: float | None = None) -> GpuCounts:
    offers = [] if price is None else [own_price("gpu", price)]
    counts = compare_counts(candidates, "m", counts=(1, 2, 4, 8), least=0.9, offers=offers)
    assert counts is not None
    return counts


def test_the_fewest_the_cheapest_and_the_fastest_are_found_among_what_fits() -> None:
    one, two, four = candidate(1, 1000, used_bytes=30 * GiB), candidate(2, 450), candidate(4, 240)
    slower = candidate(4, 300)
    counts = compared(one, slower, two, four, price=3.0)
    assert list(counts.candidates) == [two, four]
    assert (counts.fewest, counts.cheapest, counts.fastest) == (two, two, four)
    assert counts.lacking == [1, 8]
    assert counts.cost(two) == 2 * 450 / 3600 * 3.0
    assert counts.marks(two) == ["fewest GPUs", "cheapest"]
    assert [row["gpu_time_s"] for row in counts.to_rows()] == [gpu_seconds(two), gpu_seconds(four)]


def test_without_a_candidate_that_meets_the_limits_nothing_is_compared() -> None:
    too_large = [candidate(1, 10, used_bytes=30 * GiB)]
    assert compare_counts(too_large, "m", counts=(1, 2), least=0.9) is None
