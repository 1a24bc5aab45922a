"""Numbers of GPUs side by side, for one model: the fewest, the cheapest and the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whichlora.search.feasibility import Candidate, accepted
from whichlora.spec.costs import Offer, cheapest


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounts:
    """The best candidate of a model on each number of GPUs that meets the limits.

    Args:
        offers: prices of an hour of this GPU, where any is known.
        lacking: numbers on which nothing meets them.
    """

    candidates: Sequence[Candidate]
    offers: Sequence[Offer] = ()
    lacking: Sequence[int] = ()

    @property
    def model(self) -> str:
        return self.candidates[0].run.model

    @property
    def fewest(self) -> Candidate:
        return self.candidates[0]

    @property
    def fastest(self) -> Candidate:
        return min(self.candidates, key=_seconds)

    @property
    def cheapest(self) -> Candidate:
        """That of the least money; of the least GPU time, where no price is known."""
        return min(self.candidates, key=lambda each: self.cost(each) or gpu_seconds(each))

    def cost(self, candidate: Candidate) -> float | None:
        gpus = candidate.run.parallel.gpus
        offer = cheapest(self.offers, gpus)
        return None if offer is None else _seconds(candidate) / 3600 * offer.per_hour(gpus)

    @property
    def currency(self) -> str:
        """Of the costs; empty where the user states prices in one of their own."""
        return self.offers[0].currency if self.offers else ""

    def marks(self, candidate: Candidate) -> list[str]:
        """What is best about one of them."""
        best = {
            "fewest GPUs": self.fewest,
            "cheapest" if self.offers else "least GPU time": self.cheapest,
            "fastest": self.fastest,
        }
        return [mark for mark, marked in best.items() if marked is candidate]

    def to_rows(self) -> list[dict[str, Any]]:
        """The key `gpu_counts` of `answer.json`, the fewest GPUs first."""
        return [
            {
                "gpus": candidate.run.parallel.gpus,
                "config": candidate.run.to_dict(),
                "peak_bytes": round(candidate.memory_bytes.value),
                "total_time_s": _seconds(candidate),
                "gpu_time_s": gpu_seconds(candidate),
                "cost": self.cost(candidate),
                "fewest": candidate is self.fewest,
                "cheapest": candidate is self.cheapest,
                "fastest": candidate is self.fastest,
            }
            for candidate in self.candidates
        ]


def _seconds(candidate: Candidate) -> float:
    assert candidate.total_s is not None, "a fine-tuning with a time"
    return candidate.total_s.value


def gpu_seconds(candidate: Candidate) -> float:
    """Seconds of all its GPUs."""
    return candidate.run.parallel.gpus * _seconds(candidate)


def compare_counts(
    finetune: Sequence[Candidate],
    model: str,
    *,
    counts: Sequence[int],
    least: float,
    offers: Sequence[Offer] = (),
) -> GpuCounts | None:
    """The candidates of `model` that meet the limits, by number of GPUs; None without times.

    Args:
        counts: numbers of GPUs that are asked for.
        least: chance with which a candidate counts as meeting its limits.
    """
    best: dict[int, Candidate] = {}
    for candidate in sorted(finetune, key=lambda candidate: candidate.rank):
        timed = candidate.total_s is not None
        if candidate.run.model == model and timed and accepted(candidate, least):
            best.setdefault(candidate.run.parallel.gpus, candidate)
    if not best:
        return None
    return GpuCounts(
        candidates=[best[number] for number in sorted(best)],
        offers=offers,
        lacking=sorted(set(counts) - set(best)),
    )
