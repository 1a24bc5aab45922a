"""Optimizer steps on several GPUs, summed over a training: what they compute and wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import ranks_work
from whichlora.predict.judged import judged_ranks
from whichlora.predict.rank_time import RanksWork
from whichlora.predict.resolve import ResolvedRun
from whichlora.timing.model import FEATURES, deciding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTraining:
    """All optimizer steps of some candidates.

    Args:
        work: features that decide the time of the computing: [num_candidates, num_features].
        waits_s: for messages, which no coefficient scales: [num_candidates].
        waits_deviation_s: one standard deviation of it; of one training all steps err alike.
    """

    work: Array
    waits_s: Array
    waits_deviation_s: Array

    @classmethod
    def without_waits(cls, work: Array) -> Self:
        import numpy as np

        none = np.zeros(len(work))
        return cls(work=work, waits_s=none, waits_deviation_s=none)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSteps:
    """The steps of candidates on several GPUs that share a job, counted once.

    Args:
        ranks: at every width of every batch size.
        times: how many such steps there are: [num_batch_sizes, num_widths].
        num_rows: ranks of the adapters; 1 of a single candidate.
    """

    job: ResolvedRun
    ranks: RanksWork
    times: Array
    num_rows: int

    @classmethod
    def of(cls, job: ResolvedRun, steps: Mapping[int, float]) -> Self:
        """Of one candidate; `steps` by padded length."""
        import numpy as np

        widths = np.array([list(steps)], dtype=np.float64)
        counted = ranks_work(job, seq_len=widths)
        assert counted is not None, "the job is spread"
        times = np.array([list(steps.values())])
        return cls(job=job, ranks=counted, times=times, num_rows=1)

    def whole_training(self, calibration: Calibration) -> WholeTraining:
        """Every candidate, its ranks of the adapters before its batch sizes."""
        import numpy as np

        shape = (self.num_rows, self.times.shape[1])
        judged = judged_ranks(self.job, self.ranks, calibration)
        decided = deciding(calibration.time["finetune"], judged.features)

        def over_steps(values: Any) -> Array:
            return np.asarray(np.broadcast_to(values, shape) @ self.times.T).ravel()

        return WholeTraining(
            work=np.stack([over_steps(decided[name]) for name in FEATURES], axis=-1),
            waits_s=over_steps(judged.waits_s),
            waits_deviation_s=over_steps(judged.waits_deviation_s),
        )
