"""Fine-tunings of one model in groups: their time first, their memory only where it may matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import weight_bytes
from whichlora.parallel.base import RankKind
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judgement import least_bytes
from whichlora.predict.quantities import moment_parts, of_each_source, training_step
from whichlora.predict.rank_time import RanksWork, count_ranks, features_of_step
from whichlora.search.spread_steps import SpreadSteps, WholeTraining
from whichlora.spec.numeric import Real
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.run import RunConfig
from whichlora.timing.model import FEATURES, TimeModel, deciding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from whichlora.search.shortlist import Group

    Array = NDArray[np.float64]


class SharedFeatures:
    """Time features of optimizer steps, counted once for all groups whose ranks compute alike.

    The GPUs of data parallel strategies compute what one does, however many they are.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], tuple[TrainingStep, Mapping[str, Real]]] = {}

    def __call__(self, step: TrainingStep, *, update_share: float = 1.0) -> Mapping[str, Real]:
        """As `rank_time.features_of_step`."""
        import numpy as np

        run = replace(step.run, parallel=ONE_GPU)
        sizes = (np.asarray(size).tobytes() for size in (step.batch_size, step.seq_len, step.r))
        key = (id(step.model), run, step.dtypes, *sizes)
        if key not in self._counted:  # the step is kept, so that no other model has its id
            self._counted[key] = step, features_of_step(step)
        _, features = self._counted[key]
        return {**features, "optimizer": update_share * features["optimizer"]}


@dataclass(kw_only=True)
class TrainingGroup:
    """A group of fine-tunings, counted as far as it was asked.

    Args:
        forms: in which each rank is served.
        axes: batch sizes and padded lengths of steps of all groups of the model, and the ranks.
        times: how many such steps there are: [num_batch_sizes, num_steps].
    """

    group: Group
    forms: Sequence[RunConfig]
    axes: Mapping[str, Array]
    times: Array
    features_of: SharedFeatures

    @property
    def gpus(self) -> int:
        return self.group.job.run.parallel.gpus

    @cached_property
    def _step(self) -> TrainingStep:
        return training_step(self.group.job, **self.axes)

    @cached_property
    def _kinds(self) -> Sequence[RankKind]:
        layout = self.group.job.layout
        return () if layout is None else layout.rank_kinds(self._step)

    @cached_property
    def _features(self) -> Sequence[Mapping[str, Real]]:
        """Of each kind of rank."""
        layout = self.group.job.layout
        if layout is None or layout.order == "one after the other":
            # all of it on one GPU at a time
            return [of_each_source(self.group.job, self._features_at, self.axes)]
        share = layout.update_share
        return [self.features_of(kind.step, update_share=share) for kind in self._kinds]

    def _features_at(self, **sizes: Any) -> dict[str, Any]:
        return dict(self.features_of(training_step(self.group.job, **sizes)))

    @cached_property
    def _ranks(self) -> RanksWork | None:
        layout = self.group.job.layout
        if layout is None:
            return None
        return count_ranks(layout, self._step.run, self._kinds, self.features_of)

    @cached_property
    def moments(self) -> Mapping[str, Mapping[str, Any]]:
        """Bytes by part at each that can be the peak."""
        import numpy as np

        sizes = {name: values.astype(np.float64) for name, values in self.group.axes.items()}
        return moment_parts(self.group.job, **sizes)

    def computing(self, model: TimeModel) -> WholeTraining:
        """The steps without what they wait for: no more than they take.

        Where there are several kinds of rank, the one that computes longest.
        """
        of_kinds = [self._summed(deciding(model, features)) for features in self._features]
        slowest = max(of_kinds, key=lambda work: float((work @ mean_of(model)).sum()))
        return WholeTraining.without_waits(slowest)

    def whole_training(self, calibration: Calibration) -> WholeTraining:
        """What decides each candidate's time, over all of its steps."""
        if self._ranks is None:
            return self.computing(calibration.time["finetune"])
        steps = SpreadSteps(
            job=self.group.job, ranks=self._ranks, times=self.times, num_rows=len(self.forms)
        )
        return steps.whole_training(calibration)

    def _summed(self, features: Mapping[str, Real]) -> Array:
        import numpy as np

        shape = (len(self.forms), self.times.shape[1])
        columns = np.stack([np.broadcast_to(features[name], shape) for name in FEATURES], axis=-1)
        summed = self.times @ columns  # [num_ranks, num_batch_sizes, num_features]
        return np.asarray(summed.reshape(-1, len(FEATURES)))

    @cached_property
    def _least_weights(self) -> float:
        job = self.group.job
        if job.layout is None:
            return sum(weight_bytes(job.model, job.dtypes).values())
        return max(job.layout.least_weight_bytes(kind) for kind in self._kinds)

    def least_bytes(self, calibration: Calibration) -> float:
        """Device memory that every candidate needs on some rank: the weights that it keeps.

        Kind: lower bound. Source: `Layout.least_weight_bytes`, `judgement.least_bytes`.
        """
        return float(least_bytes({"weights": self._least_weights}, calibration.memory))


def mean_of(model: TimeModel) -> Array:
    """The coefficients of `model` in the order of `FEATURES`."""
    import numpy as np

    return np.array([model.mean[name] for name in FEATURES])


def count_together(
    groups: Iterable[Group], form: Callable[[RunConfig], RunConfig]
) -> list[TrainingGroup]:
    """`groups`, all of one model, which share the steps that they compute alike."""
    import numpy as np

    groups = list(groups)
    pairs = dict.fromkeys(
        (size, width)
        for group in groups
        for size, steps in zip(group.axes["batch_size"][0].tolist(), group.steps, strict=True)
        for width in steps
    )
    place = {pair: number for number, pair in enumerate(pairs)}
    batch_size, seq_len = np.array(list(pairs), dtype=np.float64).reshape(-1, 2).T[:, None]
    ranks: dict[tuple[int, ...], Array] = {}
    features_of = SharedFeatures()
    counted = []
    for group in groups:
        job, sizes = group.job, group.axes["batch_size"][0].tolist()
        r = group.axes["r"]
        key = tuple(r[:, 0].tolist())
        times = np.zeros((len(sizes), len(pairs)))
        for row, (size, steps) in enumerate(zip(sizes, group.steps, strict=True)):
            for width, number in steps.items():
                times[row, place[size, width]] = number
        counted.append(
            TrainingGroup(
                group=group,
                forms=[form(replace(job.run, r=each)) for each in key],
                axes={
                    "batch_size": batch_size,
                    "seq_len": seq_len,
                    "r": ranks.setdefault(key, r.astype(np.float64)),
                },
                times=times,
                features_of=features_of,
            )
        )
    return counted
