"""All candidates as arrays, and the posterior of their time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Self

from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import TIME_PHASES, Calibration, MemoryModel
from whichlora.predict.judged import step_s
from whichlora.predict.judgement import MemoryJudgement, judge_memory
from whichlora.predict.quantities import num_tokens, pool_bytes
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.correlation import residual_correlation
from whichlora.search.counted_candidate import CountedCandidate, PassRow
from whichlora.search.posterior import Coefficients, Posterior, condition, square_root
from whichlora.spec.results import Measurement
from whichlora.spec.run import BATCH_SETTINGS
from whichlora.timing import model as timing
from whichlora.timing.model import FEATURES, TimeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

# Device seconds of a profile before its first step: building, and what the weights' bytes add.
BUILD_S, LOAD_BYTES_PER_S = 1.0, 1e9


class CandidatePosterior:
    """The candidates of both stages as arrays; `time` and `memory` give their posteriors."""

    def __init__(self, candidates: Sequence[CountedCandidate]) -> None:
        import numpy as np

        self._candidates = candidates
        self.jobs = [candidate.job for candidate in candidates]
        moments = [candidate.moments for candidate in candidates]
        # missing moments are padded with zeros
        self._moments = np.zeros((len(candidates), max(map(len, moments)), len(PARTS)))
        for i, rows in enumerate(moments):
            self._moments[i, : len(rows)] = rows
        self._is_replayed = np.array([candidate.counted.is_replayed for candidate in candidates])
        self._passes = _Passes.of([candidate.passes for candidate in candidates])
        self._trials = _Passes.of([candidate.trial for candidate in candidates])
        self._correlation = residual_correlation(self.jobs)
        weights = PARTS.index("weights")
        self._build_s = BUILD_S + self._moments[:, 0, weights] / LOAD_BYTES_PER_S
        numbers: dict[object, int] = {}
        self._model = np.array([numbers.setdefault(_built(job), len(numbers)) for job in self.jobs])

    def time(
        self,
        calibration: Calibration,
        errors: Mapping[int, float] | None = None,
        *,
        before: Calibration | None = None,
    ) -> Posterior:
        """Posterior of every candidate's seconds: a whole fine-tuning, or one generated token.

        Args:
            errors: log of measured over predicted seconds, by position of each measured candidate.
            before: the calibration before these measurements; without it, `calibration`.
        """
        import numpy as np

        calibration = self._for_engine(calibration)
        before = None if before is None else self._for_engine(before)
        by_phase = self._passes.by_phase(calibration)
        waits_s, waits_deviation_s = self._add_spread_steps(by_phase, calibration)
        seconds = [
            summed @ np.array([calibration.time[phase].mean[name] for name in FEATURES])
            for phase, summed in by_phase.items()
        ]
        total = sum(seconds, waits_s)
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
                phase_s * calibration.time[phase].interval_scale * calibration.time[phase].noise
                for phase, phase_s in zip(by_phase, seconds, strict=True)
            ),
            np.zeros(len(self.jobs)),
        )
        return condition(
            np.log(total),
            work,
            np.hypot(noise, waits_deviation_s) / total,
            self._correlation,
            coefficients,
            errors or {},
            joint=True,
        )

    def _add_spread_steps(
        self, by_phase: Mapping[str, Array], calibration: Calibration
    ) -> tuple[Array, Array]:
        """Adds what several GPUs compute to `by_phase`; what they wait, and its deviation."""
        import numpy as np

        waits_s, deviation_s = np.zeros(len(self.jobs)), np.zeros(len(self.jobs))
        for position, candidate in enumerate(self._candidates):
            if candidate.steps is not None:
                whole = candidate.steps.whole_training(calibration)
                by_phase["finetune"][position] += whole.work[0]
                waits_s[position] = whole.waits_s[0]
                deviation_s[position] = whole.waits_deviation_s[0]
        return waits_s, deviation_s

    def _for_engine(self, calibration: Calibration) -> Calibration:
        """`calibration` for the engine that serves; all inferences of a plan share theirs."""
        serving = next((job for job in self.jobs if job.run.phase == "inference"), self.jobs[0])
        return calibration.for_engine(serving.run.engine, serving.gpu)

    def run_s(self, calibration: Calibration, *, after: int | None = None) -> Array:
        """Device seconds that profiling each candidate is expected to take.

        Args:
            after: position of the candidate before, whose model its profiler has kept.
        """
        import numpy as np

        calibration = self._for_engine(calibration)
        steps_s = sum(
            summed @ np.array([calibration.time[phase].mean[name] for name in FEATURES])
            for phase, summed in self._trials.by_phase(calibration).items()
        )
        build_s = self._build_s
        if after is not None:
            build_s = np.where(self._model == self._model[after], 0.0, build_s)
        return np.asarray(build_s + steps_s)

    def time_error(self, position: int, measured: Measurement, calibration: Calibration) -> float:
        """Log of measured over predicted seconds of one candidate."""
        job, time = self.jobs[position], calibration.time
        if measured.generate_s:
            seconds = median(measured.generate_s) / num_tokens(job)
            predicted = sum(
                count * float(timing.seconds(time[phase], dict(zip(FEATURES, row, strict=True)))[0])
                for phase, count, row in self._candidates[position].passes
            )
            return math.log(seconds / predicted)
        lengths = measured.step_lengths
        by_length = {length: step_s(job, calibration, length) for length in set(lengths)}
        predicted = sum(by_length[length] for length in lengths)
        return math.log(sum(measured.step_s) / predicted)

    def memory_error(self, position: int, measured: Measurement, calibration: Calibration) -> float:
        """Log of measured over predicted bytes of one candidate."""
        here = slice(position, position + 1)
        judged = _at_peak(
            self._moments[here], self.jobs[here], self._is_replayed[here], calibration.memory
        )
        peak = measured.closest_peak_bytes
        assert peak is not None, "a run that ended well has a peak"
        return math.log(peak / float(judged.device_used_bytes[0]))

    def memory(
        self, calibration: Calibration, errors: Mapping[int, float] | None = None
    ) -> Posterior:
        """Posterior of the bytes of device memory that every candidate uses.

        The residual correlation was fitted to times. For peaks it moves the estimates of the
        candidates that were not measured, but does not narrow the coefficients.

        Args:
            errors: log of measured over predicted bytes, by position of each measured candidate.
        """
        import numpy as np

        model = calibration.memory
        judged = _at_peak(self._moments, self.jobs, self._is_replayed, model)
        used = judged.device_used_bytes
        uncertain = np.stack([judged.uncertain[name] for name in PARTS], axis=1)
        coefficients = Coefficients(
            np.array([model.mean[name] for name in PARTS]), square_root(np.array(model.covariance))
        )
        noise = np.full(len(used), model.noise)
        return condition(
            np.log(used),
            uncertain / used[:, None],
            noise,
            self._correlation,
            coefficients,
            errors or {},
            joint=False,
        )


def _scaled_root(before: TimeModel, now: TimeModel) -> Array:
    """A square root of the covariance of `before`, scaled to the coefficients of `now`.

    The uncertainty of a coefficient is relative to its size. A device that turned out ten times
    slower is as uncertain as before, in relative terms.
    """
    import numpy as np

    growth = [now.mean[name] / before.mean[name] if before.mean[name] else 1.0 for name in FEATURES]
    root = square_root(np.array(before.covariance))
    return np.asarray(before.interval_scale * np.array(growth)[:, None] * root)


def _built(job: ResolvedRun) -> tuple[object, ...]:
    """What the profiler builds for `job`: equal where it can keep the model of the run before."""
    settings = fields(job.run)
    return job.gpu.key, *(
        getattr(job.run, setting.name) for setting in settings if setting.name not in BATCH_SETTINGS
    )


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
    """Passes of every candidate, padded with passes whose count is zero.

    Args:
        counts: shape [num_candidates, num_phases, num_passes].
        features: of one pass, shape [num_candidates, num_passes, num_features].
    """

    counts: Array
    features: Array

    @classmethod
    def of(cls, all_passes: Sequence[Sequence[PassRow]]) -> Self:
        import numpy as np

        most = max(1, *map(len, all_passes))
        counts = np.zeros((len(all_passes), len(TIME_PHASES), most))
        rows = np.zeros((len(all_passes), most, len(FEATURES)))
        for i, passes in enumerate(all_passes):
            for j, (phase, count, features) in enumerate(passes):
                counts[i, TIME_PHASES.index(phase), j] = count
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
    moments: Array, jobs: Sequence[ResolvedRun], is_replayed: Flags, model: MemoryModel
) -> MemoryJudgement:
    """Memory at the peak of every candidate."""
    import numpy as np

    return judge_memory(
        {
            str(number): {name: moments[:, number, part] for part, name in enumerate(PARTS)}
            for number in range(moments.shape[1])
        },
        model,
        device_bytes=np.array([float(job.gpu.memory_bytes) for job in jobs]),
        pool_bytes=np.array([float(pool_bytes(job)) for job in jobs]),
        is_replayed=is_replayed,
    )
