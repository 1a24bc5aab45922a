"""The search of one plan: decide, measure, refit, and decide again until nothing could change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whichlora.predict.coefficients import Calibration
from whichlora.search.acquisition import (
    Decision,
    Known,
    SearchProblem,
    Spent,
    StoppedBy,
    decide,
    stop,
)
from whichlora.search.candidate_posterior import Outlook
from whichlora.search.feasibility import Quantity, dominated
from whichlora.search.posterior import Belief
from whichlora.spec.plan import Budget
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    import numpy as np

Measure = Callable[[int, Decision | None], Measurement]
Learn = Callable[[Measurement], Calibration]


@dataclass(slots=True)
class Pursuit:
    """A search in progress; its device is behind the functions that it is given.

    Args:
        contest, outlook: the candidates, in one order.
        calibration: what is known of the device before the first run.
        measured: by position, what this search has measured.
        before: the first `calibration`, which has not seen what was measured.
    """

    problem: SearchProblem
    outlook: Outlook
    calibration: Calibration
    measured: dict[int, Measurement] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    before: Calibration = field(init=False)
    _believed: tuple[Belief, Belief] | None = None

    def __post_init__(self) -> None:
        self.before = self.calibration

    @property
    def runs(self) -> Sequence[RunConfig]:
        return [job.run for job in self.outlook.jobs]

    def beliefs(self) -> tuple[Belief, Belief]:
        """Time and memory of all candidates, in the light of what was measured."""
        good = {i: one for i, one in self.measured.items() if one.outcome == "ok"}
        outlook, calibration = self.outlook, self.calibration
        time_errors = {i: outlook.time_error(i, one, calibration) for i, one in good.items()}
        memory_errors = {i: outlook.memory_error(i, one, calibration) for i, one in good.items()}
        return (
            outlook.time(calibration, time_errors, before=self.before),
            outlook.memory(calibration, memory_errors),
        )

    def quantities(self, position: int) -> tuple[Quantity, Quantity]:
        """Time and memory of one candidate."""
        if self._believed is None:
            self._believed = self.beliefs()
        time, memory = (belief.quantity(position) for belief in self._believed)
        return time, memory

    def decide(self) -> Decision:
        """Where the search stands."""
        self._believed = self.beliefs()
        return decide(
            self.problem,
            Known(
                measured=self._flags(self.measured),
                impossible=self._impossible(),
                timed_out=self._flags(
                    i for i, one in self.measured.items() if one.outcome == "timeout"
                ),
            ),
            *self._believed,
            self.outlook.run_s(self.calibration),
        )

    def decisive_s(self, position: int, decision: Decision) -> float:
        """The time that a candidate must stay below to be the answer, infinite where any will do.

        That is its limit, or the time of the best measured candidate where it has to beat that.
        """
        problem, best = self.problem, decision.best
        limit = float(problem.most_s[position])
        if best is None or not problem.training[position] or problem.prefer == "memory":
            return limit
        if problem.tier[best] != problem.tier[position]:
            return limit
        return min(limit, self.quantities(best)[0].value)

    def pursue(self, measure: Measure, learn: Learn, budget: Budget) -> tuple[Decision, StoppedBy]:
        """Measure until the winner is certain or the budget is spent."""
        while True:
            decision = self.decide()
            reason = stop(decision, self.spent, budget)
            if reason is not None:
                return decision, reason
            assert decision.following is not None
            # a candidate that stays open after its run would be chosen for ever
            assert decision.following not in self.measured
            self.take(decision.following, measure(decision.following, decision), learn)

    def measure_all(self, measure: Measure, learn: Learn) -> Decision:
        """Measure everything that can still be an answer, whatever the predictions say."""
        training = self.problem.training
        for stage in (~training, training):
            for position in stage.nonzero()[0].tolist():
                if training[position] and self.problem.form[position] not in self._serving():
                    continue
                if position not in self.measured and not self._impossible()[position]:
                    self.take(position, measure(position, None), learn)
        return self.decide()

    def take(self, position: int, found: Measurement, learn: Learn) -> None:
        """Take in what was measured of one candidate."""
        self.measured[position] = found
        self.spent.runs += 1
        self.spent.device_s += found.device_s
        self.calibration = learn(found)
        self._believed = None

    def _serving(self) -> set[int]:
        """Forms with a measured inference that meets its limits."""
        found = set()
        for position, one in self.measured.items():
            if one.outcome == "ok" and not self.problem.training[position]:
                time, memory = self.quantities(position)
                limits = self.problem.most_s[position], self.problem.most_bytes[position]
                if time.value <= limits[0] and memory.value <= limits[1]:
                    found.add(int(self.problem.form[position]))
        return found

    def out_of_memory(self) -> list[RunConfig]:
        """Runs that were measured and did not fit."""
        return [self.runs[i] for i, one in self.measured.items() if one.outcome == "oom"]

    def _impossible(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Runs that failed, and those that ask for more than one that ran out of memory."""
        runs = self.runs
        failed = {i for i, one in self.measured.items() if one.outcome not in ("ok", "timeout")}
        too_large = self.out_of_memory()
        if too_large:
            failed |= {
                i
                for i, run in enumerate(runs)
                if i not in self.measured and dominated(run, too_large)
            }
        return self._flags(failed)

    def _flags(self, positions: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        import numpy as np

        flags = np.zeros(len(self.outlook.jobs), dtype=bool)
        flags[list(positions)] = True
        return flags
