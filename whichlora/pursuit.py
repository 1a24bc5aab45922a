"""The search of one plan: decide, measure, refit, and decide again until nothing could change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whichlora.calibration import Calibration
from whichlora.outlook import Outlook
from whichlora.plan import Budget
from whichlora.policy import Contest, Decision, Known, Spent, StoppedBy, decide, stop
from whichlora.results import Measurement
from whichlora.search import dominated
from whichlora.specs import RunConfig

if TYPE_CHECKING:
    import numpy as np

Measure = Callable[[int, Decision], Measurement]
Learn = Callable[[Measurement], Calibration]


@dataclass(slots=True)
class Pursuit:
    """A search in progress; its device is behind the functions that it is given.

    Args:
        contest, outlook: the candidates, in one order.
        calibration: what is known of the device before the first run.
        measured: by position, what this search has measured.
    """

    contest: Contest
    outlook: Outlook
    calibration: Calibration
    measured: dict[int, Measurement] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)

    @property
    def runs(self) -> Sequence[RunConfig]:
        return [job.run for job in self.outlook.jobs]

    def decide(self) -> Decision:
        """Where the search stands."""
        good = {i: one for i, one in self.measured.items() if one.outcome == "ok"}
        time_errors = {
            i: self.outlook.time_error(i, one, self.calibration) for i, one in good.items()
        }
        memory_errors = {
            i: self.outlook.memory_error(i, one, self.calibration) for i, one in good.items()
        }
        return decide(
            self.contest,
            Known(measured=self._flags(self.measured), impossible=self._impossible()),
            self.outlook.time(self.calibration, time_errors),
            self.outlook.memory(self.calibration, memory_errors),
            self.outlook.run_s(self.calibration),
        )

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
            found = measure(decision.following, decision)
            self.measured[decision.following] = found
            self.spent.runs += 1
            self.spent.device_s += found.device_s
            self.calibration = learn(found)

    def _impossible(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Runs that failed, and those that ask for more than one that ran out of memory."""
        runs = self.runs
        failed = {i for i, one in self.measured.items() if one.outcome != "ok"}
        too_large = [runs[i] for i in failed if self.measured[i].outcome == "oom"]
        if too_large:
            failed |= {
                i
                for i, run in enumerate(runs)
                if i not in self.measured and dominated(run, too_large)
            }
        return self._flags(failed)

    def _flags(self, positions: object) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        import numpy as np

        flags = np.zeros(len(self.outlook.jobs), dtype=bool)
        flags[list(positions)] = True  # type: ignore[call-overload]
        return flags
