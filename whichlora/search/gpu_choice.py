"""Which of several GPUs a plan is best carried out on: the one whose winner ranks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whichlora.search.feasibility import LIKELY, Candidate, accepted
from whichlora.spec.plan import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """What a plan comes to on one GPU of its list.

    Args:
        finetune: candidates of the fine-tuning.
        least_chance: with which one of them counts as meeting its limits.
        measured: whether its candidates could be profiled: it is in this machine.
        folder: of its own answer, empty where there is none.
        refusal: why it can carry out nothing of the plan.
    """

    gpu: str
    winner: Candidate | None = None
    finetune: Sequence[Candidate] = ()
    least_chance: float = LIKELY
    measured: bool = False
    folder: str = ""
    refusal: str = ""

    @property
    def best_chance(self) -> float:
        """Of the likeliest fine-tuning to meet every limit."""
        return max((candidate.chance_of_both_stages for candidate in self.finetune), default=0.0)

    @property
    def without_winner(self) -> str:
        """What stands in the place of a winner; empty where there is one."""
        if self.winner is not None or self.refusal:
            return self.refusal
        if self.best_chance >= LIKELY:
            best = max(self.finetune, key=lambda candidate: candidate.chance_of_both_stages)
            return f"{best.run.model} may fit, {self.best_chance:.0%}"
        return "nothing meets every limit"

    def timed(self, model: str) -> list[tuple[float, int]]:
        """Seconds and GPUs of each fine-tuning of `model` that meets the limits."""
        return [
            (candidate.total_s.value, candidate.run.parallel.gpus)
            for candidate in self.finetune
            if candidate.run.model == model
            and candidate.total_s
            and accepted(candidate, self.least_chance)
        ]

    def least_s(self, model: str) -> float | None:
        """Seconds of the fastest fine-tuning of `model` that meets the limits."""
        return min((seconds for seconds, _ in self.timed(model)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """The GPUs of a plan, and which of them is recommended.

    Args:
        best: the one whose winner ranks first; None where none has a winner.
        fastest, cheapest: for the model of that winner; cheapest of those with a price.
    """

    gpus: Sequence[OnGpu]
    objective: Objective
    best: OnGpu | None = None
    fastest: OnGpu | None = None
    cheapest: OnGpu | None = None

    @property
    def model(self) -> str:
        """The model that the times and prices are compared for."""
        return "" if self.best is None or self.best.winner is None else self.best.winner.run.model

    def cost(self, on: OnGpu) -> float | None:
        """What the winner on one GPU costs, where an hour has a price."""
        if on.winner is None or on.winner.total_s is None:
            return None
        gpus = on.winner.run.parallel.gpus
        return self.objective.money(on.gpu, gpus, on.winner.total_s.value)

    def currency(self, on: OnGpu) -> str:
        """Of the cost on one GPU; empty where the user states prices in one of their own."""
        offer = self.objective.offer(on.gpu)
        return "" if offer is None else offer.currency

    def cost_of_model(self, on: OnGpu) -> float | None:
        """What the cheapest fine-tuning of `model` costs on one GPU."""
        timed = on.timed(self.model)
        costs = (self.objective.money(on.gpu, gpus, seconds) for seconds, gpus in timed)
        return min((cost for cost in costs if cost is not None), default=None)

    def to_rows(self) -> list[dict[str, Any]]:
        """The key `gpus` of `answer.json`, in the order of the plan."""
        return [
            {
                "gpu": on.gpu,
                "recommended": on is self.best,
                "fastest": on is self.fastest,
                "cheapest": on is self.cheapest,
                "measured": on.measured,
                "winner": None if on.winner is None else on.winner.run.to_dict(),
                "peak_bytes": None if on.winner is None else round(on.winner.memory_bytes.value),
                "total_time_s": (
                    None if on.winner is None or not on.winner.total_s else on.winner.total_s.value
                ),
                "cost": self.cost(on),
                "currency": self.currency(on),
                "compared_model": self.model or None,
                "compared_total_time_s": on.least_s(self.model),
                "compared_cost": self.cost_of_model(on),
                "refusal": on.refusal,
                "without_winner": on.without_winner,
                "folder": on.folder,
            }
            for on in self.gpus
        ]


def choose_gpu(gpus: Sequence[OnGpu], objective: Objective) -> GpuChoice:
    """Compare the winners of `gpus` as the candidates of one GPU are compared."""
    with_winner = [on for on in gpus if on.winner is not None]
    if not with_winner:
        return GpuChoice(gpus=gpus, objective=objective)
    best = min(with_winner, key=lambda on: rank_across(objective, on.winner, on.gpu))
    choice = GpuChoice(gpus=gpus, objective=objective, best=best)
    times = {i: seconds for i, on in enumerate(gpus) if (seconds := on.least_s(choice.model))}
    costs = {i: cost for i, on in enumerate(gpus) if (cost := choice.cost_of_model(on)) is not None}
    return GpuChoice(
        gpus=gpus,
        objective=objective,
        best=best,
        fastest=gpus[min(times, key=times.__getitem__)] if times else None,
        cheapest=gpus[min(costs, key=costs.__getitem__)] if costs else None,
    )


def rank_across(objective: Objective, winner: Candidate | None, gpu: str) -> tuple[float, ...]:
    """As among the candidates of one GPU; where money decides, an hour costs what it does there."""
    assert winner is not None
    place, *tie_breaks = winner.rank
    if objective.prefer == "price" and winner.total_s is not None:
        cost = objective.money(gpu, winner.run.parallel.gpus, winner.total_s.value)
        assert cost is not None  # a GPU without a price is refused
        return (place, cost, *tie_breaks)
    return winner.rank
