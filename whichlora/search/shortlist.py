"""The candidates of a large plan that may still win, without a prediction for each of them.

A decision correlates every two candidates, which is too much for a hundred thousand of them. So
posterior samples are drawn in which errors are shared within a group of candidates. Every group is
judged as one block, and the best few of each sample are the shortlist. The other candidates stay in
the plan: the shortlist is made again as soon as the calibration has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import CountedBlock, count_block
from whichlora.predict.judged import judge_block, judge_moments
from whichlora.predict.judgement import MEMORY_CONFIDENCE, TIME_CONFIDENCE
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.correlation import METHOD_SHARE, MODEL_SHARE, VARIANT_SHARE
from whichlora.search.counted_training import TrainingGroup, count_together, mean_of
from whichlora.search.spread_steps import WholeTraining
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.plan import Prefer
from whichlora.spec.run import RunConfig, usual_alpha
from whichlora.timing.model import FEATURES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

MANY = 300  # candidates from which on a plan is shortlisted
NUM_SAMPLES = 64
BEST_PER_SAMPLE = 4
LEAST_LOG = 100.0  # no quantity has a logarithm below its negative
MODELS_SHOWN = 3  # that meet the limits, before models of later tiers are left alone
SERVING_SHAPES = 4  # of each form that stay on the shortlist
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Candidates that differ in two settings only.

    Args:
        job: one of them, resolved.
        axes: arrays of integer settings that broadcast against each other; in fine-tuning batch
            sizes and their lengths are a row, ranks a column.
        steps: fine-tuning: optimizer steps by padded length, of each batch size.
        lora_alpha: None is twice the rank.
    """

    job: ResolvedRun
    axes: Mapping[str, NDArray[np.int64]]
    steps: Sequence[Mapping[int, float]] = ()
    lora_alpha: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        import numpy as np

        return np.broadcast_shapes(*(values.shape for values in self.axes.values()))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def run(self, position: int) -> RunConfig:
        """The candidate at `position` of the flattened group."""
        import numpy as np

        index = np.unravel_index(position, self.shape)
        settings: dict[str, Any] = {
            name: int(np.broadcast_to(values, self.shape)[index])
            for name, values in self.axes.items()
        }
        if "r" in settings:
            settings["lora_alpha"] = self.lora_alpha or usual_alpha(settings["r"])
        return replace(self.job.run, **settings)

    def runs(self) -> list[RunConfig]:
        return [self.run(position) for position in range(self.size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Limits and preference of a plan; a limit is infinite where there is none.

    Args:
        tier: by model, ranks before any time or memory, the least first.
        confidence: with which a candidate counts as meeting the limits.
    """

    inference_s: float
    inference_bytes: float
    total_s: float
    finetune_bytes: float
    tier: Mapping[str, float]
    prefer: Prefer
    confidence: float = 0.5


class CountedPlan:
    """The groups of a plan with what no calibration changes: counted once, judged many times.

    Models are counted in the order of their tiers, and no further than they may win.

    Args:
        serving, training: the groups of a model in either stage.
        form: in which a candidate of either stage is served.
        answered: whether a serving engine meets the limits in a form; None where shapes are judged.
    """

    def __init__(
        self,
        serving: Callable[[str], Iterable[Group]],
        training: Callable[[str], Iterable[Group]],
        form: Callable[[RunConfig], RunConfig],
        answered: Callable[[RunConfig], bool | None] = lambda form: None,
    ) -> None:
        self.answered = answered
        self._serving_of = serving
        self._training_of = training
        self._form = form
        self._serving: dict[str, list[tuple[RunConfig, Group, CountedBlock]]] = {}
        self._training: dict[str, list[TrainingGroup]] = {}

    def serving(self, model: str) -> list[tuple[RunConfig, Group, CountedBlock]]:
        if model not in self._serving:
            self._serving[model] = [
                (self._form(group.job.run), group, count_block(group.job, group.axes))
                for group in self._serving_of(model)
            ]
        return self._serving[model]

    def training(self, model: str) -> list[TrainingGroup]:
        if model not in self._training:
            self._training[model] = count_together(self._training_of(model), self._form)
        return self._training[model]

    def shortlist(self, calibration: Calibration, requirements: Requirements) -> list[RunConfig]:
        """The candidates of both stages that may win.

        Of training these are the best of every posterior sample, and of each model that was counted
        the fastest that surely meets the limits, and the smallest and the fastest of all: they
        explain what is lacking where nothing meets the limits. A model that may win has its fastest
        on every number of GPUs. Of serving these are the likeliest shapes of each form in which a
        shortlisted model is served.
        """
        listed = _Shortlist(self, calibration, requirements)
        for model in sorted(requirements.tier, key=requirements.tier.__getitem__):
            if listed.is_settled_before(requirements.tier[model]):
                break
            listed.add(model)
        trained = listed.trained()
        forms_of_trained = dict.fromkeys(map(self._form, trained))
        shapes = listed.shapes
        serving_runs = [run for f in forms_of_trained if f in shapes for run in shapes[f].runs()]
        return list(dict.fromkeys([*serving_runs, *trained]))


class _Shortlist:
    """The candidates that may win among the models that were looked at."""

    def __init__(
        self, plan: CountedPlan, calibration: Calibration, requirements: Requirements
    ) -> None:
        import numpy as np

        self._plan = plan
        self._calibration = calibration
        self._requirements = requirements
        self._samples = _PosteriorSamples(np.random.default_rng(SEED), calibration)
        self._best = _Best()
        self._extremes: dict[str, _Extremes] = {}
        self._on_gpus: dict[tuple[str, int], _Extremes] = {}
        self._judged: set[int] = set()  # groups by id
        self._seconds_of: dict[int, Array] = {}  # by id of the group
        self._by_cost: dict[str, list[tuple[TrainingGroup, Array]]] = {}
        self._num_meeting = 0
        self.shapes: dict[RunConfig, _Shapes] = {}

    def is_settled_before(self, tier: float) -> bool:
        """Whether no candidate of `tier` can be among the best, and enough models are listed."""
        is_worse = bool((self._best.threshold < 1e3 * tier - LEAST_LOG).all())
        return is_worse and self._num_meeting >= MODELS_SHOWN

    def add(self, model: str) -> None:
        """Look at the candidates of `model`, the fastest first."""
        for served_form, group, block in self._plan.serving(model):
            shapes = self.shapes.setdefault(served_form, _Shapes())
            shapes.add(group, block, self._samples, self._requirements)
        extremes = self._extremes[model] = _Extremes()
        optimistic = self._optimistic(model)
        for counted, cost in optimistic:
            if self._may_be_listed(counted, cost) and self._may_be_listed(
                counted, self._cost_in_time(counted)
            ):
                self._judge(counted)
        if not extremes.counted and optimistic:
            timed = [counted for counted, _ in optimistic if id(counted) in self._seconds_of]
            self._judge(min(timed or [optimistic[0][0]], key=self._least_seconds))
            self._judge(min((counted for counted, _ in optimistic), key=self._least_bytes))
        self._num_meeting += math.isfinite(self._least_cost(model))

    def _optimistic(self, model: str) -> list[tuple[TrainingGroup, Array]]:
        """The groups of `model` with no more than their cost: they wait for no message."""
        if model in self._by_cost:
            return self._by_cost[model]
        time = self._calibration.time["finetune"]
        groups = []
        for counted in self._plan.training(model):
            seconds = self._samples.seconds(counted, counted.computing(time))
            in_time = (seconds <= self._requirements.total_s) & self._served(counted)
            groups.append((counted, self._cost(counted, seconds, in_time)))
        self._by_cost[model] = sorted(groups, key=lambda each: float(each[1].min()))
        return self._by_cost[model]

    def _served(self, counted: TrainingGroup) -> Flags:
        """In which samples the form of each candidate meets the limits of inference."""
        import numpy as np

        def of_form(form: RunConfig) -> Flags:
            if form in self.shapes:
                return np.asarray(self.shapes[form].served)
            not_planned = self._plan.answered(form) is None
            return np.full(NUM_SAMPLES, not_planned or self._plan.answered(form))

        served = [of_form(form) for form in counted.forms]
        repeated = counted.group.size // len(counted.forms)
        return np.repeat(np.stack(served, axis=1), repeated, axis=1)

    def _cost(self, counted: TrainingGroup, quantity: Array, meets: Flags) -> Array:
        """What is minimised, in each sample: the tier, then the log of a quantity."""
        import numpy as np

        config, requirements = counted.group.job.run.parallel, self._requirements
        if requirements.prefer == "price":
            quantity = quantity * config.gpus
        tier = requirements.tier[counted.group.job.run.model]
        return np.where(meets, np.log(quantity) + 1e3 * tier, np.inf)

    def _seconds(self, counted: TrainingGroup) -> Array:
        """With what each candidate waits for, counted once."""
        if id(counted) not in self._seconds_of:
            whole = counted.whole_training(self._calibration)
            self._seconds_of[id(counted)] = self._samples.seconds(counted, whole)
        return self._seconds_of[id(counted)]

    def _least_seconds(self, counted: TrainingGroup) -> float:
        return float(self._seconds(counted)[0].min())

    def _cost_in_time(self, counted: TrainingGroup) -> Array:
        """The cost of those that meet all limits but memory's, which takes longer to count."""
        seconds = self._seconds(counted)
        in_time = (seconds <= self._requirements.total_s) & self._served(counted)
        return self._cost(counted, seconds, in_time)

    def _may_be_listed(self, counted: TrainingGroup, cost: Array) -> bool:
        """Whether candidates of no less than `cost` may be among the best, or their model's."""
        is_better = self._may_win(cost) or self._is_faster(counted, cost)
        return is_better and self._may_fit(counted)

    def _may_win(self, cost: Array) -> bool:
        import numpy as np

        if self._requirements.prefer == "memory":
            return bool(np.isfinite(cost).any())
        return bool((cost < self._best.threshold[:, None]).any())

    def _is_faster(self, counted: TrainingGroup, cost: Array) -> bool:
        """Whether one may be better than every candidate of its model that surely meets."""
        return bool(cost[0].min() < self._least_cost(counted.group.job.run.model))

    def _least_cost(self, model: str) -> float:
        """Of the candidates of `model` that surely meet the limits."""
        return min((on.least_cost for on in self._surely(model)), default=math.inf)

    def _may_fit(self, group: TrainingGroup) -> bool:
        return self._least_bytes(group) <= self._requirements.finetune_bytes

    def _least_bytes(self, group: TrainingGroup) -> float:
        return group.least_bytes(self._calibration)

    def _judge(self, counted: TrainingGroup) -> None:
        """Count what the candidates of a group really take."""
        import numpy as np

        requirements, group = self._requirements, counted.group
        run = group.job.run
        if id(counted) in self._judged:
            return
        self._judged.add(id(counted))
        seconds = self._seconds(counted)
        in_time = (seconds <= requirements.total_s) & self._served(counted)
        num_bytes = self._samples.num_bytes(counted)
        meets = in_time & (num_bytes <= requirements.finetune_bytes)
        quantity = num_bytes if requirements.prefer == "memory" else seconds
        cost = self._cost(counted, quantity, meets)
        self._best.add(group, cost)
        self._extremes[run.model].add(group, seconds[0], num_bytes[0])
        sure = meets.mean(axis=0) >= requirements.confidence
        likely = np.where(sure, self._cost(counted, quantity, in_time)[0], np.inf)
        of_count = self._on_gpus.setdefault((run.model, counted.gpus), _Extremes())
        of_count.add(group, likely, num_bytes[0])

    def trained(self) -> list[RunConfig]:
        """The fine-tunings of the list."""
        best = self._best.runs()
        may_win = dict.fromkeys(run.model for run in best)
        of_counts = [run for model in may_win for run in self._fastest(model)]
        others = [self._surely(model) for model in self._extremes if model not in may_win]
        meeting = [min(each, key=lambda on: on.least_cost).fastest for each in others if each]
        extremes = [run for extreme in self._extremes.values() for run in extreme.runs()]
        return [*extremes, *best, *of_counts, *meeting]

    def _fastest(self, model: str) -> list[RunConfig]:
        """Of `model` the fastest on every number of GPUs that surely meets the limits."""
        optimistic = self._optimistic(model)
        for group, cost in optimistic:
            of_count = self._on_gpus.setdefault((model, group.gpus), _Extremes())
            may_fit = cost[0].min() < of_count.least_cost and self._may_fit(group)
            if may_fit and self._cost_in_time(group)[0].min() < of_count.least_cost:
                self._judge(group)
        return [on.fastest for on in self._surely(model)]

    def _surely(self, model: str) -> list[_Extremes]:
        """Those of `model` on each number of GPUs on which one surely meets the limits."""
        of_model = (on for (name, _), on in self._on_gpus.items() if name == model)
        return [on for on in of_model if math.isfinite(on.least_cost)]


class _PosteriorSamples:
    """Samples of the errors of device and formulas; the first sample has no error."""

    def __init__(self, rng: np.random.Generator, calibration: Calibration) -> None:
        import numpy as np

        self._rng = rng
        self._calibration = calibration
        shares = (np.arange(NUM_SAMPLES - 1) + 0.5) / (NUM_SAMPLES - 1)
        self._quantiles = [NormalDist().inv_cdf(share) for share in shares.tolist()]
        self._coefficients = self._stratified(len(FEATURES))
        self._memory, self._serving = self._stratified(1), self._stratified(1)
        self._shared_errors: dict[str, Array] = {}
        self._residuals: dict[int, Array] = {}  # by id of the group
        self._roots = {
            phase: np.linalg.cholesky(np.array(model.covariance) + 1e-30 * np.eye(len(FEATURES)))
            for phase, model in calibration.time.items()
        }

    def _normal(self, number: int) -> Array:
        samples = self._rng.standard_normal((NUM_SAMPLES, number))
        samples[0] = 0.0
        return samples

    def _stratified(self, number: int) -> Array:
        """One of every quantile, in any order: what all candidates share has no luck in its tail.

        Source: Latin hypercube sampling (McKay, Beckman and Conover 1979).
        """
        import numpy as np

        orders = [self._rng.permutation(self._quantiles) for _ in range(number)]
        return np.vstack([np.zeros(number), np.stack(orders, axis=1)])

    def _shared(self, name: str) -> Array:
        """An error that all groups of one model or method share."""
        if name not in self._shared_errors:
            self._shared_errors[name] = self._stratified(1)
        return self._shared_errors[name]

    def serving(self, block: CountedBlock) -> tuple[Array, Array]:
        """Seconds per token and bytes, shape [num_samples, num_candidates]."""
        import numpy as np

        predicted = judge_block(block, self._calibration)
        spread = np.log(predicted.high_s / predicted.time_s).ravel() / TWO_SIDED_Z[TIME_CONFIDENCE]
        seconds = predicted.time_s.ravel() * np.exp(self._serving * spread)
        return seconds, self._bytes(predicted.device_used_bytes, predicted.high_bytes)

    def seconds(self, counted: TrainingGroup, whole: WholeTraining) -> Array:
        """Seconds of the whole training, shape [num_samples, num_candidates]."""
        import numpy as np

        model = self._calibration.time["finetune"]
        computing = whole.work @ mean_of(model)
        total = computing + whole.waits_s
        effect = whole.work @ self._roots["finetune"] / total[:, None]
        noise = model.noise * computing / total
        residual = self._residual(counted, len(total))
        error = model.interval_scale * (self._coefficients @ effect.T + noise * residual)
        if whole.waits_s.any():
            error = error + self._shared("messages") * whole.waits_deviation_s / total
        return np.asarray(total * np.exp(error))

    def _residual(self, counted: TrainingGroup, number: int) -> Array:
        """Of every candidate of a group, drawn once."""
        if id(counted) not in self._residuals:
            run = counted.group.job.run
            run_share = 1 - MODEL_SHARE - METHOD_SHARE - VARIANT_SHARE
            self._residuals[id(counted)] = (
                MODEL_SHARE**0.5 * self._shared(run.model)
                + METHOD_SHARE**0.5 * self._shared(run.method)
                + VARIANT_SHARE**0.5 * self._shared(f"{run.model} {run.method}")
                + run_share**0.5 * self._normal(number)
            )
        return self._residuals[id(counted)]

    def num_bytes(self, counted: TrainingGroup) -> Array:
        """Device memory, shape [num_samples, num_candidates]."""
        import numpy as np

        group = counted.group
        memory = judge_moments(group.job, counted.moments, self._calibration)
        _, _, high = memory.bounds()
        used, high = (
            np.broadcast_to(num_bytes, group.shape)
            for num_bytes in (memory.device_used_bytes, high)
        )
        return self._bytes(used, high)

    def _bytes(self, used: Array, high: Array) -> Array:
        import numpy as np

        spread = np.log(high / used).ravel() / TWO_SIDED_Z[MEMORY_CONFIDENCE]
        return np.asarray(used.ravel() * np.exp(self._memory * spread))


@dataclass(slots=True)
class _Best:
    """The best few candidates of every sample, updated group by group."""

    groups: list[Group] = field(default_factory=list)
    _cost: Array | None = None
    _where: NDArray[np.int64] | None = None  # group and position, shape [num_samples, num_best, 2]

    @property
    def threshold(self) -> Array:
        """Of each sample, the cost that a further candidate must stay below."""
        import numpy as np

        if self._cost is None or self._cost.shape[1] < BEST_PER_SAMPLE:
            return np.full(NUM_SAMPLES, np.inf)
        return self._cost[:, -1]

    def add(self, group: Group, cost: Array) -> None:
        import numpy as np

        number = len(self.groups)
        self.groups.append(group)
        chosen = np.argsort(cost, axis=1, kind="stable")[:, :BEST_PER_SAMPLE]
        where = np.stack([np.full_like(chosen, number), chosen], axis=-1)
        cost = np.take_along_axis(cost, chosen, axis=1)
        if self._cost is not None and self._where is not None:
            cost = np.concatenate([self._cost, cost], axis=1)
            where = np.concatenate([self._where, where], axis=1)
            best = np.argsort(cost, axis=1, kind="stable")[:, :BEST_PER_SAMPLE]
            cost = np.take_along_axis(cost, best, axis=1)
            where = np.take_along_axis(where, best[..., None], axis=1)
        self._cost, self._where = cost, where

    def runs(self) -> list[RunConfig]:
        """The candidates among the best of any sample, the most frequent first."""
        import numpy as np

        if self._cost is None or self._where is None:
            return []
        finite = self._where[np.isfinite(self._cost)]
        places, counts = np.unique(finite, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [self.groups[number].run(position) for number, position in places[order].tolist()]


@dataclass(slots=True)
class _Extremes:
    """The fastest and the smallest candidate of one model."""

    _candidates: dict[str, tuple[float, Group, int]] = field(default_factory=dict)

    @property
    def counted(self) -> bool:
        return bool(self._candidates)

    @property
    def least_cost(self) -> float:
        """Infinite where there is none."""
        return self._candidates["time"][0] if self._candidates else math.inf

    def add(self, group: Group, seconds: Array, num_bytes: Array) -> None:
        for name, values in (("time", seconds), ("memory", num_bytes)):
            position = int(values.argmin())
            value = float(values[position])
            if name not in self._candidates or value < self._candidates[name][0]:
                self._candidates[name] = (value, group, position)

    def runs(self) -> list[RunConfig]:
        return [group.run(position) for _, group, position in self._candidates.values()]

    @property
    def fastest(self) -> RunConfig:
        _, group, position = self._candidates["time"]
        return group.run(position)


@dataclass(slots=True)
class _Shapes:
    """The serving shapes of one form, and the samples in which a shape meets the limits."""

    served: Any = False
    _candidates: list[tuple[float, float, Group, int]] = field(default_factory=list)

    def add(
        self,
        group: Group,
        block: CountedBlock,
        samples: _PosteriorSamples,
        requirements: Requirements,
    ) -> None:
        seconds, num_bytes = samples.serving(block)
        meets = (seconds <= requirements.inference_s) & (num_bytes <= requirements.inference_bytes)
        self.served = self.served | meets.any(axis=1)
        chance, tokens = meets.mean(axis=0).tolist(), seconds[0].tolist()
        self._candidates += [
            (-likely, cost, group, position)
            for position, (likely, cost) in enumerate(zip(chance, tokens, strict=True))
        ]
        self._candidates.sort(key=lambda shape: shape[:2])
        del self._candidates[SERVING_SHAPES:]

    def runs(self) -> list[RunConfig]:
        return [group.run(position) for _, _, group, position in self._candidates]
