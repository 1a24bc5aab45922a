"""The search of one plan: decide, measure, refit, and decide again until nothing could change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whichlora.predict.coefficients import Calibration
from whichlora.search.acquisition import (
    Decision,
    MeasuredState,
    SearchProblem,
    Spent,
    StoppedBy,
    decide,
    stop,
)
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.feasibility import Quantity, dominated
from whichlora.search.posterior import Posterior
from whichlora.spec.plan import Budget
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    import numpy as np

Measure = Callable[[int, Decision | None], Measurement]
Learn = Callable[[Measurement], Calibration]


@dataclass(slots=True)
class SearchLoop:
    """The loop of one search; its device is behind the functions `measure` and `learn`.

    Args:
        problem, candidate_posterior: the candidates, in the same order.
        calibration: of the device; before the first run it holds what earlier runs taught.
        measured: measurements of this search, by position of the candidate.
        before: the first `calibration`, fitted to none of these measurements.
    """

    problem: SearchProblem
    candidate_posterior: CandidatePosterior
    calibration: Calibration
    measured: dict[int, Measurement] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    before: Calibration = field(init=False)
    _posteriors: tuple[Posterior, Posterior] | None = None
    _kept: int | None = None  # the candidate whose model the profiler has kept

    def __post_init__(self) -> None:
        self.before = self.calibration

    @property
    def runs(self) -> Sequence[RunConfig]:
        return [job.run for job in self.candidate_posterior.jobs]

    def posteriors(self) -> tuple[Posterior, Posterior]:
        """Posterior of time and memory of all candidates, given what was measured."""
        good = {
            i: measurement
            for i, measurement in self.measured.items()
            if measurement.outcome == "ok"
        }
        candidates, calibration = self.candidate_posterior, self.calibration
        time_errors = {
            i: candidates.time_error(i, measurement, calibration) for i, measurement in good.items()
        }
        memory_errors = {
            i: candidates.memory_error(i, measurement, calibration)
            for i, measurement in good.items()
        }
        return (
            candidates.time(calibration, time_errors, before=self.before),
            candidates.memory(calibration, memory_errors),
        )

    def quantities(self, position: int) -> tuple[Quantity, Quantity]:
        """Time and memory of one candidate."""
        if self._posteriors is None:
            self._posteriors = self.posteriors()
        time, memory = (posterior.quantity(position) for posterior in self._posteriors)
        return time, memory

    def decide(self) -> Decision:
        """The decision after the measurements so far."""
        self._posteriors = self.posteriors()
        return decide(
            self.problem,
            MeasuredState(
                measured=self._flags(self.measured),
                impossible=self._impossible(),
                timed_out=self._flags(
                    i
                    for i, measurement in self.measured.items()
                    if measurement.outcome == "timeout"
                ),
            ),
            *self._posteriors,
            self.candidate_posterior.run_s(self.calibration, after=self._kept),
        )

    def decisive_s(self, position: int, decision: Decision) -> float:
        """The time that a candidate must stay below to win, infinite where any time will do.

        It is the limit, or the time of the best measured candidate where it must beat that.
        """
        problem, best = self.problem, decision.best
        limit = float(problem.most_s[position])
        if best is None or not problem.training[position] or problem.prefer == "memory":
            return limit
        if problem.tier[best] != problem.tier[position]:
            return limit
        return min(limit, self.quantities(best)[0].value)

    def measure_until_certain(
        self, measure: Measure, learn: Learn, budget: Budget
    ) -> tuple[Decision, StoppedBy]:
        """Measure until the winner is certain or the budget is spent."""
        while True:
            decision = self.decide()
            reason = stop(decision, self.spent, budget)
            if reason is not None:
                return decision, reason
            assert decision.next_run is not None
            # otherwise a candidate that stays open after its run would be chosen for ever
            assert decision.next_run not in self.measured
            self.take(decision.next_run, measure(decision.next_run, decision), learn)

    def measure_all(self, measure: Measure, learn: Learn) -> Decision:
        """Measure every candidate that can still win, whatever the predictions say."""
        training = self.problem.training
        for stage in (~training, training):
            for position in stage.nonzero()[0].tolist():
                if training[position] and self.problem.form[position] not in self._serving():
                    continue
                if position not in self.measured and not self._impossible()[position]:
                    self.take(position, measure(position, None), learn)
        return self.decide()

    def take(self, position: int, measurement: Measurement, learn: Learn) -> None:
        """Record the measurement of one candidate and refit."""
        self.measured[position] = measurement
        self._kept = position if measurement.outcome == "ok" else None
        self.spent.runs += 1
        self.spent.device_s += measurement.device_s
        self.calibration = learn(measurement)
        self._posteriors = None

    def _serving(self) -> set[int]:
        """Forms with a measured inference that meets its limits, or an engine that does."""
        forms = {form for form, meets in self.problem.answered.items() if meets}
        for position, measurement in self.measured.items():
            if measurement.outcome == "ok" and not self.problem.training[position]:
                time, memory = self.quantities(position)
                limits = self.problem.most_s[position], self.problem.most_bytes[position]
                if time.value <= limits[0] and memory.value <= limits[1]:
                    forms.add(int(self.problem.form[position]))
        return forms

    def out_of_memory(self) -> list[RunConfig]:
        """Runs that ran out of memory."""
        return [
            self.runs[i] for i, measurement in self.measured.items() if measurement.outcome == "oom"
        ]

    def _impossible(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Runs that failed, and those that need more than a run that ran out of memory."""
        runs = self.runs
        failed = {
            i
            for i, measurement in self.measured.items()
            if measurement.outcome not in ("ok", "timeout")
        }
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

        flags = np.zeros(len(self.candidate_posterior.jobs), dtype=bool)
        flags[list(positions)] = True
        return flags
