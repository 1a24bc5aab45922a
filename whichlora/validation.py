"""Measure what could change the answer, refit, and look again, until nothing could."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whichlora.results import Measurement
from whichlora.search import Candidate, Choose
from whichlora.specs import RunConfig

Measure = Callable[[RunConfig], Measurement]
JudgeAll = Callable[[], list[Candidate]]
Learned = Callable[[Measurement], None]


def check(judge_all: JudgeAll, choose: Choose, measure: Measure, learn: Learned) -> list[Candidate]:
    """Run the loop of one stage; the device is behind `measure`.

    Args:
        judge_all: every candidate in the light of what is known now.
        choose: the next one to measure, or None.
        learn: takes in a measurement, so that `judge_all` sees it and the refitted predictors.

    Returns:
        The candidates as they stand when nothing is left to measure.
    """
    seen: set[RunConfig] = set()
    while True:
        candidates = judge_all()
        chosen = choose(candidates)
        if chosen is None:
            return candidates
        # a candidate that stays unmeasured after its run would be chosen for ever
        assert chosen.run not in seen, f"{chosen.run} was measured and is still open"
        seen.add(chosen.run)
        learn(measure(chosen.run))


def rejected_before(winner: Candidate | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that would rank before `winner` had they met the limits, best first."""
    before = [
        candidate
        for candidate in candidates
        if candidate.verdict != "meets" and (winner is None or candidate.rank < winner.rank)
    ]
    return sorted(before, key=lambda candidate: candidate.rank)
