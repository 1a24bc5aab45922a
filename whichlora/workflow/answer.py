"""The answer of a run as a value, and as the content of `answer.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from whichlora.predict.coefficients import Calibration
from whichlora.predict.evaluation_and_saving import Besides
from whichlora.predict.life import Life
from whichlora.predict.repeated_times import Repeatability
from whichlora.search.acquisition import StoppedBy
from whichlora.search.feasibility import (
    Candidate,
)
from whichlora.search.gpu_choice import GpuChoice
from whichlora.search.gpu_counts import GpuCounts
from whichlora.spec.costs import RunningCost
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.plan import Plan
from whichlora.spec.results import (
    SCHEMA_VERSION,
    Measurement,
    Prediction,
    Refused,
    ServingPrediction,
)
from whichlora.spec.run import RunConfig

Ending: TypeAlias = StoppedBy | Literal["everything measured", "not measured", "under way"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured candidate beside its predictions.

    Args:
        cold: from datasheet priors; `before`: when it was chosen; `after`: from the final refit.
    """

    measurement: Measurement
    cold: Prediction
    before: Prediction
    after: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How sure the answer is, and what it cost.

    Args:
        confidence: that no other candidate beats the winner; without one, that nothing fits.
        stopped_by: why no further run was made; "not measured" in a dry run, "under way" where
            runs of a cluster are not back yet.
        chance_to_win: of fine-tuning candidates that may still beat the winner.
    """

    confidence: float
    stopped_by: Ending
    runs: int
    device_s: float
    chance_to_win: Mapping[RunConfig, float]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape."""
        return {
            "confidence": self.confidence,
            "stopped_by": self.stopped_by,
            "runs": self.runs,
            "device_s": self.device_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run found out, and where it wrote it.

    Args:
        inference, finetune: every candidate of the two stages, as it stands at the end.
        kept: models that meet the inference limits in a form in which they may be served, largest
            first.
        serving: stage 1 of the winner where a serving engine answers it, else None.
        waits: what more and more users of `serving` wait.
        front: fine-tuning candidates that meet the limits and that no other beats in both time
            and memory, fastest first.
        compared: every candidate measured in this run, beside its predictions.
        may_fit: of a dry run: what would rank before the winner and meets every limit with less
            than the asked confidence, best first.
        side_by_side: the best candidate with every method and rank, whatever the plan asked for.
        refused: combinations of the plan that a model or the device lacks.
        choice: what every GPU of a list comes to; this is the answer of the recommended one.
        counts: the model of the winner on each number of GPUs that the plan asks for; None where it
            asks for one.
        cost: what the winner takes of money and electricity; None where it has no time.
        besides: what the winner's evaluations and checkpoints take.
        life: the winner's stages from its download to its resumption; None on several GPUs.
        cautions: what must be known of the data and the winner before either is acted on.
        repeatability: of the device, and what the winner's profile knows of its time; None where
            no winner was measured.
        dataset: sequences, tokens and epochs that the total times are for.
        files: what was written, by purpose.
        training: what the winning job reported, where it was run, or the `error` it ended with.
    """

    plan: Plan
    gpu: GpuSpec
    basis: str
    inference: Sequence[Candidate]
    finetune: Sequence[Candidate]
    kept: Sequence[str]
    winner: Candidate | None
    front: Sequence[Candidate]
    search: Search
    compared: Sequence[Compared]
    tokens: str
    cautions: Sequence[str] = ()
    may_fit: Sequence[Candidate] = ()
    side_by_side: Sequence[Candidate] = ()
    serving: Candidate | None = None
    waits: Sequence[ServingPrediction] = ()
    cost: RunningCost | None = None
    besides: Besides | None = None
    life: Life | None = None
    repeatability: Repeatability | None = None
    refused: Sequence[Refused] = ()
    choice: GpuChoice | None = None
    counts: GpuCounts | None = None
    dataset: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from whichlora.terminal import answer_document, as_html

        return as_html(answer_document(self))

    def _prices(self) -> dict[str, float]:
        """Of the GPUs that are compared."""
        gpus = [self.gpu.key] if self.choice is None else [on.gpu for on in self.choice.gpus]
        offers = {gpu: self.plan.objective.offer(gpu) for gpu in gpus}
        return {gpu: offer.usd_per_hour for gpu, offer in offers.items() if offer is not None}

    def _cost(self) -> dict[str, Any] | None:
        if self.cost is None or self.winner is None or self.winner.total_s is None:
            return None
        return self.cost.to_dict(self.winner.total_s.value)

    def to_dict(self) -> dict[str, Any]:
        """The content of `answer.json`."""
        from whichlora.terminal import answer_facts, detailed_row

        return {
            "schema_version": SCHEMA_VERSION,
            "config": str(self.plan.source),
            "gpu": self.gpu.key,
            "basis": self.basis,
            "tokens": self.tokens,
            "cautions": list(self.cautions),
            "winner": None if self.winner is None else detailed_row(self.winner, self.plan),
            "objective": {
                "prefer": self.plan.objective.prefer,
                "order": self.plan.objective.order,
                "scores": {
                    name: asdict(score)
                    for name, score in self.plan.objective.scores.items()
                    if name in self.plan.models
                },
                "price_per_hour": self._prices(),
            },
            "cost": self._cost(),
            "search": self.search.to_dict(),
            "repeatability": self.repeatability and self.repeatability.to_dict(),
            "may_fit": [detailed_row(candidate, self.plan) for candidate in self.may_fit],
            "front": [detailed_row(candidate, self.plan) for candidate in self.front],
            "kept_models": list(self.kept),
            "refused": [combination.to_dict() for combination in self.refused],
            "inference": [detailed_row(candidate, self.plan) for candidate in self.inference],
            "finetune": [detailed_row(candidate, self.plan) for candidate in self.finetune],
            "files": {name: str(path) for name, path in self.files.items()},
            "training": None if self.training is None else dict(self.training),
            **({} if self.life is None else {"life": self.life.to_dict()}),
            **({} if self.choice is None else {"gpus": self.choice.to_rows()}),
            **({} if self.serving is None else {"serving": detailed_row(self.serving, self.plan)}),
            **({"waits": [each.to_dict() for each in self.waits]} if self.waits else {}),
            **({} if self.counts is None else {"gpu_counts": self.counts.to_rows()}),
        } | answer_facts(self)
