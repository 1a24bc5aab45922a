"""Acquisition and stopping rule: which run to measure next, and when the search ends.

Both are decided on posterior samples: each sample is one joint outcome of all candidates, and has a
winner. The confidence of the answer is the share of samples in which no candidate beats the best
measured one by more than `WORTHWHILE_GAIN`. The acquisition value of a run is the share of samples
that it wins, per device second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from whichlora.search.posterior import Posterior
from whichlora.spec.plan import Budget, Prefer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

NUM_SAMPLES = 1000
SEED = 0
ROUNDING = 1e-9
WORTHWHILE_GAIN = 0.98  # a rival must promise at least 2 % less of what is preferred

StoppedBy = Literal["certain", "runs", "device_s", "nothing left"]


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The candidates of both stages, as far as a decision needs them.

    Args:
        training: fine-tuning, as opposed to inference; a winner is one of these.
        form: number of the form in which its model is served; that must meet the limits, too.
        tier: what goes before any time or memory, the least first (the largest model, or the
            user's order); all equal where the preference is a quantity.
        price: of an hour on its device.
        most_bytes, most_s: its limits, infinite where there are none.
        answered: forms that no run has to confirm, as a serving engine says whether it starts;
            whether each meets the limits.
    """

    training: Flags
    form: NDArray[np.int64]
    tier: Array
    price: Array
    most_bytes: Array
    most_s: Array
    prefer: Prefer
    answered: Mapping[int, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MeasuredState:
    """Which candidates were measured, and how their runs ended.

    Args:
        measured: a run was made, whatever its outcome.
        impossible: it failed, or a smaller one ran out of memory.
        timed_out: its run was stopped too early to have values. It may still win, and is not run
            again in this search.
    """

    measured: Flags
    impossible: Flags
    timed_out: Flags

    @property
    def settled(self) -> Flags:
        """Measured, with values to decide on."""
        return self.measured & ~self.timed_out


@dataclass(frozen=True, slots=True)
class Decision:
    """What the samples say now.

    Args:
        best: position of the measured candidate that meets every limit and ranks first.
        confidence: that no candidate beats `best`; without a `best`, that nothing meets the limits.
        next_run: position of the run to make next, None where no run is worth making.
        chance_to_win: of every candidate that is not `best`.
        chance_to_meet: every limit of its own stage.
    """

    best: int | None
    confidence: float
    next_run: int | None
    chance_to_win: Array
    chance_to_meet: Array


def decide(
    problem: SearchProblem,
    state: MeasuredState,
    time: Posterior,
    memory: Posterior,
    run_s: Array,
    *,
    seed: int = SEED,
) -> Decision:
    """Judge every candidate in every posterior sample.

    Args:
        run_s: device seconds that profiling each candidate would take.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    seconds = time.sample(NUM_SAMPLES, rng)
    num_bytes = memory.sample(NUM_SAMPLES, rng)
    # a measured value that equals its limit meets it: logarithms round
    in_time = seconds <= problem.most_s * (1 + ROUNDING)
    meets = in_time & (num_bytes <= problem.most_bytes * (1 + ROUNDING)) & ~state.impossible
    served = _per_form(problem, meets)
    confirmed = _per_form(problem, (meets & state.settled)[:1])[0]
    cost = _cost(problem, seconds, num_bytes)
    stands = meets & problem.training & served[:, problem.form]
    cost = np.where(stands, cost, np.inf)
    settled = state.settled & problem.training & confirmed[problem.form]
    best = _best(cost, settled)
    rivals = np.where(settled, np.inf, cost)
    if best is not None:
        # a gain within a tier; a better tier is any gain
        worthwhile = cost[:, best] + np.log(WORTHWHILE_GAIN)
        rivals = np.where(rivals < worthwhile[:, None], rivals, np.inf)
    first = np.argmin(rivals, axis=1)
    beaten = np.isfinite(rivals[np.arange(NUM_SAMPLES), first])
    wins = np.bincount(first[beaten], minlength=len(run_s)) / NUM_SAMPLES
    chance = meets.mean(axis=0)
    return Decision(
        best=best,
        confidence=float(1 - beaten.mean()),
        next_run=_next_run(problem, state, confirmed, wins, chance, run_s),
        chance_to_win=wins,
        chance_to_meet=chance,
    )


def _per_form(problem: SearchProblem, flags: Flags) -> Flags:
    """Whether an inference of each form is flagged, shape [num_samples, num_forms].

    A form without an inference candidate is not part of the plan and counts as flagged, unless an
    engine has answered for it.
    """
    import numpy as np

    flagged = np.ones((len(flags), int(problem.form.max()) + 1), dtype=bool)
    for form, meets in problem.answered.items():
        flagged[:, form] = meets
    for form in range(flagged.shape[1]):
        inferences = ~problem.training & (problem.form == form)
        if inferences.any():
            flagged[:, form] = flags[:, inferences].any(axis=1)
    return flagged


def _cost(problem: SearchProblem, seconds: Array, num_bytes: Array) -> Array:
    """What the preference minimises: the tier, then the log of a quantity."""
    import numpy as np

    quantity = num_bytes if problem.prefer == "memory" else seconds
    if problem.prefer == "price":
        quantity = seconds * problem.price
    # the log of seconds or bytes lies far within a tier's width
    return np.asarray(np.log(quantity) + 1e3 * problem.tier)


def _best(cost: Array, settled: Flags) -> int | None:
    """The settled candidate that costs least; settled values are equal in every sample."""
    import numpy as np

    certain = np.where(settled, cost[0], np.inf)
    if not np.isfinite(certain).any():
        return None
    return int(np.argmin(certain))


def _next_run(
    problem: SearchProblem,
    state: MeasuredState,
    confirmed: Flags,
    wins: Array,
    chance: Array,
    run_s: Array,
) -> int | None:
    """The run with the highest chance to settle the winner per device second.

    A candidate wins only if its form also serves within the limits. Where training and serving are
    both open, the run that is likelier to rule the candidate out per second goes first: it may
    make the second run unnecessary.
    """
    import numpy as np

    serving = _serving(problem, state, chance, run_s)
    to_train = np.where(state.measured, 0.0, run_s)
    to_serve = np.zeros(len(run_s))
    for form, position in serving.items():
        if not confirmed[form]:
            to_serve[problem.form == form] = run_s[position]
    needed = to_train + to_serve
    # not again: runs that timed out, and runs whose form only a timed-out inference could confirm
    can_serve = confirmed[problem.form] | np.isin(problem.form, list(serving))
    is_open = (wins > 0) & ~state.timed_out & (can_serve | ~problem.training)
    value = np.where(is_open, wins / np.maximum(needed, 1e-9), 0.0)
    if not value.any():
        return None
    target = int(np.argmax(value))
    inference = serving.get(int(problem.form[target]))
    if confirmed[problem.form[target]] or inference is None:
        return target
    if state.measured[target]:
        return inference
    refutes = (1 - chance[[target, inference]] + 0.02) / run_s[[target, inference]]
    return target if refutes[0] >= refutes[1] else inference


def _serving(
    problem: SearchProblem, state: MeasuredState, chance: Array, run_s: Array
) -> dict[int, int]:
    """For each form, the open inference run likeliest to show that it serves, per second."""
    import numpy as np

    best: dict[int, int] = {}
    is_open = ~problem.training & ~state.measured & ~state.impossible & (chance > 0)
    for position in np.flatnonzero(is_open).tolist():
        form = int(problem.form[position])
        rival = best.get(form)
        # a second attempt costs as much again, so a likely run is worth more than a cheap one
        if rival is None or chance[position] ** 2 / run_s[position] > (
            chance[rival] ** 2 / run_s[rival]
        ):
            best[form] = position
    return best


@dataclass(slots=True)
class Spent:
    """What a search has used of its budget."""

    runs: int = 0
    device_s: float = 0.0


def stop(decision: Decision, spent: Spent, budget: Budget) -> StoppedBy | None:
    """Why the search ends here, if it does: certain enough, nothing left to measure, or no budget.

    `workflow.run` searches again where a shortlist of a large plan has changed; `profile: all` does
    not ask.
    """
    if decision.confidence >= budget.confidence:
        return "certain"
    if decision.next_run is None:
        return "nothing left"
    return exhausted(spent, budget)


def exhausted(spent: Spent, budget: Budget) -> Literal["runs", "device_s"] | None:
    """Which part of the budget is used up, if one is."""
    if budget.runs is not None and spent.runs >= budget.runs:
        return "runs"
    if budget.device_s is not None and spent.device_s >= budget.device_s:
        return "device_s"
    return None


def tiers(places: Sequence[float]) -> list[float]:
    """`places` (`Objective.place`) as consecutive numbers from zero."""
    ordered = sorted(set(places))
    return [float(ordered.index(place)) for place in places]
