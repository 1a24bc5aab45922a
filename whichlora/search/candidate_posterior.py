"""The candidates of both stages as arrays, and what is believed of their time and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Self

from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import TIME_PHASES, Calibration, MemoryModel
from whichlora.predict.judgement import judge_memory
from whichlora.predict.outline import Outline, Pass
from whichlora.predict.predict import num_tokens, pool_bytes, step_features
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.correlation import correlation_of
from whichlora.search.posterior import Belief, Coefficients, conditioned, square_root
from whichlora.spec.results import Measurement
from whichlora.timing import model as timing
from whichlora.timing.model import FEATURES, TimeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Device seconds of a profile before its first step: building, and what the weights' bytes add.
BUILD_S, LOAD_BYTES_PER_S = 1.0, 1e9


class Outlook:
    """The candidates of both stages as arrays; `time` and `memory` say what is believed of them."""

    def __init__(self, outlines: Sequence[Outline]) -> None:
        import numpy as np

        self._outlines = outlines
        self.jobs = [outline.job for outline in outlines]
        num_moments = max(len(outline.moments) for outline in outlines)
        # a moment that is not there holds nothing
        self._moments = np.zeros((len(outlines), num_moments, len(PARTS)))
        for i, outline in enumerate(outlines):
            self._moments[i, : len(outline.moments)] = outline.moments
        self._passes = _Passes.of([outline.passes for outline in outlines])
        self._trials = _Passes.of([outline.trial for outline in outlines])
        self._alike = correlation_of(self.jobs)
        weights = PARTS.index("weights")
        self._build_s = BUILD_S + self._moments[:, 0, weights] / LOAD_BYTES_PER_S

    def time(
        self,
        calibration: Calibration,
        errors: Mapping[int, float] | None = None,
        *,
        before: Calibration | None = None,
    ) -> Belief:
        """Seconds of every candidate: a whole fine-tuning, or one generated token.

        Args:
            errors: log of measured over predicted seconds, by position of what was measured.
            before: what was known of the coefficients before that; without it, `calibration`.
        """
        import numpy as np

        by_phase = self._passes.by_phase(calibration)
        seconds = [
            summed @ np.array([calibration.time[phase].mean[name] for name in FEATURES])
            for phase, summed in by_phase.items()
        ]
        total = sum(seconds, np.zeros(len(self.jobs)))
        models = [calibration.time[phase] for phase in by_phase]
        coefficients = Coefficients(
            np.hstack([[model.mean[name] for name in FEATURES] for model in models]),
            _blocks(
                [
                    _scaled_root((before or calibration).time[phase], calibration.time[phase])
                    for phase in by_phase
                ]
            ),
        )
        work = np.hstack(list(by_phase.values())) / total[:, None]
        # one run's errors in both of its phases come from one host and one device: they add up
        noise = sum(
            (
                each * calibration.time[phase].interval_scale * calibration.time[phase].noise
                for phase, each in zip(by_phase, seconds, strict=True)
            ),
            np.zeros(len(self.jobs)),
        )
        return conditioned(
            np.log(total), work, noise / total, self._alike, coefficients, errors or {}, joint=True
        )

    def run_s(self, calibration: Calibration) -> Array:
        """Device seconds that profiling each candidate is expected to take."""
        import numpy as np

        steps_s = sum(
            summed @ np.array([calibration.time[phase].mean[name] for name in FEATURES])
            for phase, summed in self._trials.by_phase(calibration).items()
        )
        return np.asarray(self._build_s + steps_s)

    def time_error(self, position: int, measured: Measurement, calibration: Calibration) -> float:
        """Log of measured over predicted seconds of one candidate."""
        job, time = self.jobs[position], calibration.time
        if measured.generate_s:
            seconds = median(measured.generate_s) / num_tokens(job)
            predicted = sum(
                number
                * float(timing.seconds(time[phase], dict(zip(FEATURES, row, strict=True)))[0])
                for phase, number, row in self._outlines[position].passes
            )
            return math.log(seconds / predicted)
        lengths = measured.step_lengths
        by_length = {
            length: float(timing.seconds(time["finetune"], step_features(job, seq_len=length))[0])
            for length in set(lengths)
        }
        predicted = sum(by_length[length] for length in lengths)
        return math.log(sum(measured.step_s) / predicted)

    def memory_error(self, position: int, measured: Measurement, calibration: Calibration) -> float:
        """Log of measured over predicted bytes of one candidate."""
        _, used = _at_peak(
            self._moments[position : position + 1],
            self.jobs[position : position + 1],
            calibration.memory,
        )
        peak = measured.closest_peak_bytes
        assert peak is not None, "a run that ended well has a peak"
        return math.log(peak / float(used[0]))

    def memory(self, calibration: Calibration, errors: Mapping[int, float] | None = None) -> Belief:
        """Bytes of device memory that every candidate uses.

        How alike errors are was learned from times. For peaks that says where the others lie, but
        is not trusted to narrow the coefficients.

        Args:
            errors: log of measured over predicted bytes, by position of what was measured.
        """
        import numpy as np

        model = calibration.memory
        parts, used = _at_peak(self._moments, self.jobs, model)
        coefficients = Coefficients(
            np.array([model.mean[name] for name in PARTS]), square_root(np.array(model.covariance))
        )
        noise = np.full(len(used), model.noise)
        return conditioned(
            np.log(used),
            parts / used[:, None],
            noise,
            self._alike,
            coefficients,
            errors or {},
            joint=False,
        )


def _scaled_root(before: TimeModel, now: TimeModel) -> Array:
    """A square root of the covariance of `before`, of coefficients as large as those of `now`.

    What is not known of a coefficient is a share of it: a device that turned out ten times slower
    is as uncertain as it was, in relative terms.
    """
    import numpy as np

    grown = [now.mean[name] / before.mean[name] if before.mean[name] else 1.0 for name in FEATURES]
    root = square_root(np.array(before.covariance))
    return np.asarray(before.interval_scale * np.array(grown)[:, None] * root)


def _blocks(matrices: Sequence[Array]) -> Array:
    """A matrix with `matrices` along its diagonal."""
    import numpy as np

    size = sum(len(block) for block in matrices)
    joined, start = np.zeros((size, size)), 0
    for block in matrices:
        end = start + len(block)
        joined[start:end, start:end] = block
        start = end
    return joined


@dataclass(frozen=True, slots=True)
class _Passes:
    """Passes of every candidate; one that is not there counts nothing.

    Args:
        counts: shape [num_candidates, num_phases, num_passes].
        features: of one pass, shape [num_candidates, num_passes, num_features].
    """

    counts: Array
    features: Array

    @classmethod
    def of(cls, all_passes: Sequence[Sequence[Pass]]) -> Self:
        import numpy as np

        most = max(map(len, all_passes))
        counts = np.zeros((len(all_passes), len(TIME_PHASES), most))
        rows = np.zeros((len(all_passes), most, len(FEATURES)))
        for i, passes in enumerate(all_passes):
            for j, (phase, number, features) in enumerate(passes):
                counts[i, TIME_PHASES.index(phase), j] = number
                rows[i, j] = features
        return cls(counts, rows)

    def by_phase(self, calibration: Calibration) -> dict[str, Array]:
        """Features that decide the time, summed over each phase's passes: [n, num_features]."""
        import numpy as np

        return {
            phase: np.einsum(
                "nc,ncf->nf",
                self.counts[:, position],
                _deciding(calibration.time[phase], self.features),
            )
            for position, phase in enumerate(TIME_PHASES)
        }


def _deciding(model: TimeModel, features: Array) -> Array:
    import numpy as np

    columns = {name: features[..., i] for i, name in enumerate(FEATURES)}
    counted = timing.deciding(model, columns)
    return np.stack([counted[name] for name in FEATURES], axis=-1)


def _at_peak(
    moments: Array, jobs: Sequence[ResolvedRun], model: MemoryModel
) -> tuple[Array, Array]:
    """Bytes by part at the largest moment of every candidate, and what the card gives."""
    import numpy as np

    judged = judge_memory(
        {
            str(number): {name: moments[:, number, part] for part, name in enumerate(PARTS)}
            for number in range(moments.shape[1])
        },
        model,
        device_bytes=np.array([float(job.gpu.memory_bytes) for job in jobs]),
        pool_bytes=np.array([float(pool_bytes(job)) for job in jobs]),
    )
    return np.stack([judged.counted[name] for name in PARTS], axis=1), judged.device_used_bytes
