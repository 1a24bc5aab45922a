"""Whom to measure next, and when the winner is certain: decisions over drawn worlds.

A world is one way the device may answer every run at once. In each the winner is known; the share
of the worlds in which nothing beats the best candidate measured is the confidence of the answer,
and a run is worth the share of the worlds that it would win, per device second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from whichlora.search.posterior import Belief
from whichlora.spec.plan import Budget, Prefer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

NUM_WORLDS = 1000
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
    """

    training: Flags
    form: NDArray[np.int64]
    tier: Array
    price: Array
    most_bytes: Array
    most_s: Array
    prefer: Prefer


@dataclass(frozen=True, slots=True)
class Known:
    """What measuring has settled.

    Args:
        measured: a run has been made, whatever came of it.
        impossible: it failed, or a smaller one ran out of memory.
        timed_out: its run was stopped before it told anything: it may still be the answer, and is
            not run again now.
    """

    measured: Flags
    impossible: Flags
    timed_out: Flags

    @property
    def settled(self) -> Flags:
        """Measured, with values that decide."""
        return self.measured & ~self.timed_out


@dataclass(frozen=True, slots=True)
class Decision:
    """What the worlds say now.

    Args:
        best: position of the measured candidate that meets everything and ranks first.
        confidence: that no other candidate beats it; without one, that nothing meets the limits.
        following: position of the run to make next, None where no run is worth making.
        chance_to_win: of every candidate that is not `best`.
        chance_to_meet: every limit of its own stage.
    """

    best: int | None
    confidence: float
    following: int | None
    chance_to_win: Array
    chance_to_meet: Array


def decide(
    problem: SearchProblem,
    known: Known,
    time: Belief,
    memory: Belief,
    run_s: Array,
    *,
    seed: int = SEED,
) -> Decision:
    """Draw worlds and judge every candidate in each.

    Args:
        run_s: device seconds that profiling each candidate would take.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    seconds = time.draw(NUM_WORLDS, rng)
    num_bytes = memory.draw(NUM_WORLDS, rng)
    # what was measured to equal its limit meets it: logarithms round
    in_time = seconds <= problem.most_s * (1 + ROUNDING)
    meets = in_time & (num_bytes <= problem.most_bytes * (1 + ROUNDING)) & ~known.impossible
    served = _per_form(problem, meets)
    confirmed = _per_form(problem, (meets & known.settled)[:1])[0]
    cost = _cost(problem, seconds, num_bytes)
    stands = meets & problem.training & served[:, problem.form]
    cost = np.where(stands, cost, np.inf)
    settled = known.settled & problem.training & confirmed[problem.form]
    best = _best(cost, settled)
    rivals = np.where(settled, np.inf, cost)
    if best is not None:
        # a gain within a tier; a better tier is any gain
        worthwhile = cost[:, best] + np.log(WORTHWHILE_GAIN)
        rivals = np.where(rivals < worthwhile[:, None], rivals, np.inf)
    first = np.argmin(rivals, axis=1)
    beaten = np.isfinite(rivals[np.arange(NUM_WORLDS), first])
    wins = np.bincount(first[beaten], minlength=len(run_s)) / NUM_WORLDS
    chance = meets.mean(axis=0)
    return Decision(
        best=best,
        confidence=float(1 - beaten.mean()),
        following=_following(problem, known, confirmed, wins, chance, run_s),
        chance_to_win=wins,
        chance_to_meet=chance,
    )


def _per_form(problem: SearchProblem, flags: Flags) -> Flags:
    """Whether an inference of each form is flagged, shape [num_worlds, num_forms].

    A form without an inference candidate was not asked for.
    """
    import numpy as np

    found = np.ones((len(flags), int(problem.form.max()) + 1), dtype=bool)
    for form in range(found.shape[1]):
        asked = ~problem.training & (problem.form == form)
        if asked.any():
            found[:, form] = flags[:, asked].any(axis=1)
    return found


def _cost(problem: SearchProblem, seconds: Array, num_bytes: Array) -> Array:
    """What the preferred candidate has least of: its tier, then the log of a quantity."""
    import numpy as np

    quantity = num_bytes if problem.prefer == "memory" else seconds
    if problem.prefer == "price":
        quantity = seconds * problem.price
    # the log of seconds or bytes lies far within a tier's width
    return np.asarray(np.log(quantity) + 1e3 * problem.tier)


def _best(cost: Array, settled: Flags) -> int | None:
    """The settled candidate that costs least; what is settled is the same in every world."""
    import numpy as np

    certain = np.where(settled, cost[0], np.inf)
    if not np.isfinite(certain).any():
        return None
    return int(np.argmin(certain))


def _following(
    problem: SearchProblem,
    known: Known,
    confirmed: Flags,
    wins: Array,
    chance: Array,
    run_s: Array,
) -> int | None:
    """The run with the best chance to settle the winner per device second.

    A candidate wins only if its form serves within the limits as well. Where both are open, the
    run that is likelier to refute the candidate per second goes first: it may spare the other.
    """
    import numpy as np

    serving = _serving(problem, known, chance, run_s)
    to_train = np.where(known.measured, 0.0, run_s)
    to_serve = np.zeros(len(run_s))
    for form, position in serving.items():
        if not confirmed[form]:
            to_serve[problem.form == form] = run_s[position]
    needed = to_train + to_serve
    # what timed out is not run again, nor what only an inference that timed out could confirm
    can_serve = confirmed[problem.form] | np.isin(problem.form, list(serving))
    is_open = (wins > 0) & ~known.timed_out & (can_serve | ~problem.training)
    value = np.where(is_open, wins / np.maximum(needed, 1e-9), 0.0)
    if not value.any():
        return None
    target = int(np.argmax(value))
    inference = serving.get(int(problem.form[target]))
    if confirmed[problem.form[target]] or inference is None:
        return target
    if known.measured[target]:
        return inference
    refutes = (1 - chance[[target, inference]] + 0.02) / run_s[[target, inference]]
    return target if refutes[0] >= refutes[1] else inference


def _serving(problem: SearchProblem, known: Known, chance: Array, run_s: Array) -> dict[int, int]:
    """The inference run of each form that most likely shows that it serves, per second."""
    import numpy as np

    found: dict[int, int] = {}
    open_ones = ~problem.training & ~known.measured & ~known.impossible & (chance > 0)
    for position in np.flatnonzero(open_ones).tolist():
        form = int(problem.form[position])
        other = found.get(form)
        # a second try costs as much again: a likely run is worth more than a cheap one
        if other is None or chance[position] ** 2 / run_s[position] > (
            chance[other] ** 2 / run_s[other]
        ):
            found[form] = position
    return found


@dataclass(slots=True)
class Spent:
    """What a search has used of its budget."""

    runs: int = 0
    device_s: float = 0.0


def stop(decision: Decision, spent: Spent, budget: Budget) -> StoppedBy | None:
    """Why the search ends here, if it does."""
    if decision.confidence >= budget.confidence:
        return "certain"
    if decision.following is None:
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
