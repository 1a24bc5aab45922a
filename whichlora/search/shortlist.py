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
from typing import TYPE_CHECKING, Any, Self

from whichlora.predict.coefficients import Calibration
from whichlora.predict.judgement import MEMORY_CONFIDENCE, TIME_CONFIDENCE
from whichlora.predict.parallel_choice import is_last_resort
from whichlora.predict.predict import (
    CountedBlock,
    count_block,
    judge_moments,
    moment_parts,
    predict_counted_block,
    ranks_work,
    step_features,
)
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.correlation import METHOD_SHARE, MODEL_SHARE, VARIANT_SHARE
from whichlora.search.spread_steps import SpreadSteps, WholeTraining
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.plan import LAST_RESORT, Prefer
from whichlora.spec.run import RunConfig
from whichlora.timing.model import FEATURES, deciding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

MANY = 300  # candidates from which on a plan is shortlisted
NUM_SAMPLES = 64
BEST_PER_SAMPLE = 4
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
            settings["lora_alpha"] = self.lora_alpha or 2 * settings["r"]
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

    Args:
        form: in which a candidate of either stage is served.
    """

    def __init__(
        self,
        serving: Iterable[Group],
        training: Iterable[Group],
        form: Callable[[RunConfig], RunConfig],
    ) -> None:
        self._serving = [
            (form(group.job.run), group, count_block(group.job, group.axes)) for group in serving
        ]
        self._training = [_CountedTraining.of(group, form) for group in training]
        self._form = form

    def shortlist(self, calibration: Calibration, requirements: Requirements) -> list[RunConfig]:
        """The candidates of both stages that may win.

        Of training these are the best of every posterior sample, and the smallest and the fastest
        of each model: they explain what is lacking where nothing meets the limits. A model that may
        win has its fastest on every number of GPUs. Of serving these are the likeliest shapes of
        each form in which a shortlisted model is served.
        """
        import numpy as np

        samples = _PosteriorSamples(np.random.default_rng(SEED), calibration)
        shapes: dict[RunConfig, _Shapes] = {}
        for served_form, group, block in self._serving:
            shapes.setdefault(served_form, _Shapes()).add(group, block, samples, requirements)
        best = _Best()
        extremes: dict[str, _Extremes] = {}
        on_gpus: dict[tuple[str, int], _Extremes] = {}
        not_planned = np.ones(NUM_SAMPLES, dtype=bool)
        for counted in self._training:
            group, forms = counted.group, counted.forms
            model = group.job.run.model
            seconds, num_bytes = samples.training(counted)
            meets = (seconds <= requirements.total_s) & (num_bytes <= requirements.finetune_bytes)
            served = [shapes[f].served if f in shapes else not_planned for f in forms]
            meets &= np.repeat(np.stack(served, axis=1), group.size // len(forms), axis=1)
            quantity = num_bytes if requirements.prefer == "memory" else seconds
            if requirements.prefer == "price":
                quantity = quantity * group.job.run.parallel.gpus
            tier = requirements.tier[model] + LAST_RESORT * is_last_resort(group.job.run.parallel)
            cost = np.log(quantity) + 1e3 * tier
            best.add(group, np.where(meets, cost, np.inf))
            extremes.setdefault(model, _Extremes()).add(group, seconds[0], num_bytes[0])
            likely = np.where(meets.mean(axis=0) >= requirements.confidence, cost[0], np.inf)
            count = model, group.job.run.parallel.gpus
            on_gpus.setdefault(count, _Extremes()).add(group, likely, num_bytes[0])
        trained = [run for extreme in extremes.values() for run in extreme.runs()] + best.runs()
        may_win = {run.model for run in best.runs()}
        trained += [on.fastest for (model, _), on in on_gpus.items() if model in may_win]
        forms_of_trained = dict.fromkeys(map(self._form, trained))
        serving_runs = [run for f in forms_of_trained if f in shapes for run in shapes[f].runs()]
        return list(dict.fromkeys([*serving_runs, *trained]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountedTraining:
    """A group of fine-tunings, counted.

    Args:
        forms: in which each rank is served.
        moments: bytes by part at each that can be the peak.
        features: of one optimizer step, by rank and by batch size and padded length.
        times: how many such steps there are: [num_batch_sizes, num_batch_sizes_and_lengths].
        spread: the steps of several GPUs, which have no features of one.
    """

    group: Group
    forms: Sequence[RunConfig]
    moments: Mapping[str, Mapping[str, Any]]
    features: Mapping[str, Any]
    times: Array
    spread: SpreadSteps | None = None

    @classmethod
    def of(cls, group: Group, form: Callable[[RunConfig], RunConfig]) -> Self:
        import numpy as np

        sizes = {name: values.astype(np.float64) for name, values in group.axes.items()}
        pairs = [
            (row, width, number)
            for row, steps in enumerate(group.steps)
            for width, number in steps.items()
        ]
        rows, widths, numbers = (np.array(column) for column in zip(*pairs, strict=True))
        times = np.zeros((len(group.steps), len(pairs)))
        times[rows, np.arange(len(pairs))] = numbers
        axes = {
            "batch_size": sizes["batch_size"][0][rows][None],
            "seq_len": widths[None].astype(np.float64),
            "r": sizes["r"],
        }
        job = group.job
        forms = [form(replace(job.run, r=int(r))) for r in group.axes["r"][:, 0]]
        ranks = ranks_work(job, **axes)
        return cls(
            group=group,
            forms=forms,
            moments=moment_parts(job, **sizes),
            features=step_features(job, **axes) if ranks is None else {},
            times=times,
            spread=None
            if ranks is None
            else SpreadSteps(job=job, ranks=ranks, times=times, num_rows=len(forms)),
        )

    def whole_training(self, calibration: Calibration) -> WholeTraining:
        """What decides each candidate's time, over all of its steps."""
        import numpy as np

        if self.spread is not None:
            return self.spread.whole_training(calibration)
        decided = deciding(calibration.time["finetune"], self.features)
        shape = (len(self.forms), self.times.shape[1])
        columns = np.stack([np.broadcast_to(decided[name], shape) for name in FEATURES], axis=-1)
        summed = np.einsum("bp,rpf->rbf", self.times, columns)
        work = np.asarray(summed.reshape(-1, len(FEATURES)))
        none = np.zeros(len(work))
        return WholeTraining(work=work, waits_s=none, waits_deviation_s=none)


class _PosteriorSamples:
    """Samples of the errors of device and formulas; the first sample has no error."""

    def __init__(self, rng: np.random.Generator, calibration: Calibration) -> None:
        import numpy as np

        self._rng = rng
        self._calibration = calibration
        self._coefficients = self._normal(len(FEATURES))
        self._memory, self._serving = self._normal(1), self._normal(1)
        self._shared_errors: dict[str, Array] = {}
        self._roots = {
            phase: np.linalg.cholesky(np.array(model.covariance) + 1e-30 * np.eye(len(FEATURES)))
            for phase, model in calibration.time.items()
        }

    def _normal(self, number: int) -> Array:
        samples = self._rng.standard_normal((NUM_SAMPLES, number))
        samples[0] = 0.0
        return samples

    def _shared(self, name: str) -> Array:
        """An error that all groups of one model or method share."""
        if name not in self._shared_errors:
            self._shared_errors[name] = self._normal(1)
        return self._shared_errors[name]

    def serving(self, block: CountedBlock) -> tuple[Array, Array]:
        """Seconds per token and bytes, shape [num_samples, num_candidates]."""
        import numpy as np

        predicted = predict_counted_block(block, self._calibration)
        spread = np.log(predicted.high_s / predicted.time_s).ravel() / TWO_SIDED_Z[TIME_CONFIDENCE]
        seconds = predicted.time_s.ravel() * np.exp(self._serving * spread)
        return seconds, self._bytes(predicted.device_used_bytes, predicted.high_bytes)

    def training(self, counted: _CountedTraining) -> tuple[Array, Array]:
        """Seconds of the whole training and bytes, shape [num_samples, num_candidates]."""
        import numpy as np

        model = self._calibration.time["finetune"]
        whole = counted.whole_training(self._calibration)
        computing = whole.work @ np.array([model.mean[name] for name in FEATURES])
        total = computing + whole.waits_s
        effect = whole.work @ self._roots["finetune"] / total[:, None]
        group = counted.group
        run = group.job.run
        run_share = 1 - MODEL_SHARE - METHOD_SHARE - VARIANT_SHARE
        residual = (
            MODEL_SHARE**0.5 * self._shared(run.model)
            + METHOD_SHARE**0.5 * self._shared(run.method)
            + VARIANT_SHARE**0.5 * self._shared(f"{run.model} {run.method}")
            + run_share**0.5 * self._normal(len(total))
        )
        noise = model.noise * computing / total
        error = model.interval_scale * (self._coefficients @ effect.T + noise * residual)
        if whole.waits_s.any():
            error = error + self._shared("messages") * whole.waits_deviation_s / total
        seconds = total * np.exp(error)
        memory = judge_moments(group.job, counted.moments, self._calibration)
        _, _, high = memory.bounds()
        used, high = (
            np.broadcast_to(num_bytes, group.shape)
            for num_bytes in (memory.device_used_bytes, high)
        )
        return seconds, self._bytes(used, high)

    def _bytes(self, used: Array, high: Array) -> Array:
        import numpy as np

        spread = ((high - used) / TWO_SIDED_Z[MEMORY_CONFIDENCE]).ravel()
        return np.asarray(used.ravel() + self._memory * spread)


@dataclass(slots=True)
class _Best:
    """The best few candidates of every sample, updated group by group."""

    groups: list[Group] = field(default_factory=list)
    _cost: Array | None = None
    _where: NDArray[np.int64] | None = None  # group and position, shape [num_samples, num_best, 2]

    def add(self, group: Group, cost: Array) -> None:
        import numpy as np

        number = len(self.groups)
        self.groups.append(group)
        chosen = np.argsort(cost, axis=1)[:, :BEST_PER_SAMPLE]
        where = np.stack([np.full_like(chosen, number), chosen], axis=-1)
        cost = np.take_along_axis(cost, chosen, axis=1)
        if self._cost is not None and self._where is not None:
            cost = np.concatenate([self._cost, cost], axis=1)
            where = np.concatenate([self._where, where], axis=1)
            best = np.argsort(cost, axis=1)[:, :BEST_PER_SAMPLE]
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
