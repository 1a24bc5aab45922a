"""What is believed of all candidates at once, and how their errors hang together.

Two candidates that do the same work are wrong in the same way: the coefficients that predict them
are the same, and what the formulas leave out is alike where the model, the method or the batch is.
So a belief is not an interval per candidate but one distribution over all of them, from which
whole worlds are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from whichlora import timing
from whichlora.calibration import TIME_PHASES, Calibration, MemoryModel
from whichlora.memory import allocator
from whichlora.memory.ledger import PARTS
from whichlora.numeric import TWO_SIDED_Z
from whichlora.prediction import (
    ALLOCATED_PARTS,
    forward_features,
    ledger,
    mean_context,
    part_bytes,
    step_features,
)
from whichlora.resolution import Job
from whichlora.results import Measurement
from whichlora.search import Quantity
from whichlora.timing import FEATURES, TimeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# How alike the unexplained errors of two runs are: the share of their variance that runs of one
# model have in common, of one method, of both, and where every other setting is the same, too; the
# last two fall with every doubling of the batch. Kind: fitted, `benchmarks/search_shares.py`, which
# cannot tell the last two apart; what a doubling of the rank takes away is an estimate.
MODEL_SHARE, METHOD_SHARE, VARIANT_SHARE, SETTINGS_SHARE = 0.27, 0.02, 0.52, 0.17
ALIKE_PER_DOUBLING, ALIKE_PER_RANK_DOUBLING = 0.43, 0.9
EXPECTED_RUNS = 2.0  # measured runs that the expected size of those errors counts for
LARGEST_GAIN = 0.95  # a coefficient may turn out to be so much less than guessed
REPEATABILITY = 0.02  # deviation of the log of a profile that is repeated
UNTIMED = 2  # steps of a profile beside the timed ones: warm-up, and the one that counts bytes
# Device seconds of a profile before its first step: building, and what the weights' bytes add.
BUILD_S, LOAD_BYTES_PER_S = 1.0, 1e9

Pass: TypeAlias = tuple[str, float, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Outline:
    """One candidate as the predictors see it, whatever the calibration.

    Args:
        moments: bytes by part at each moment that can be the peak.
        passes: phase, how many of them, and the features of one; they add up to the time that
            is judged: of the whole fine-tuning, or of one generated token.
        trial: the same for one profile, which costs that time.
    """

    job: Job
    moments: tuple[tuple[float, ...], ...]
    passes: tuple[Pass, ...]
    trial: tuple[Pass, ...]


def outline_training(job: Job, steps: Mapping[int, float], *, num_batches: int) -> Outline:
    """A fine-tuning.

    Args:
        steps: number of optimizer steps by padded length.
        num_batches: timed in a profile.
    """
    passes = tuple(
        ("finetune", count, _row(step_features(job, seq_len=length)))
        for length, count in steps.items()
    )
    longest = _row(step_features(job))
    trial = ("finetune", float(num_batches + UNTIMED), longest)
    return Outline(job, _moments(job), passes, (trial,))


def outline_inference(job: Job, *, num_runs: int) -> Outline:
    """A generation.

    Args:
        num_runs: generations timed in a profile.
    """
    run = job.run
    prefill = _row(forward_features(job, context=run.prompt_len, decoding=False))
    whole: tuple[Pass, ...] = (("prefill", 1.0, prefill),)
    if job.model.task != "encoder":
        context = mean_context(run.prompt_len, run.max_new_tokens)
        decode = _row(forward_features(job, context=context, decoding=True))
        whole = (*whole, ("decode", float(run.max_new_tokens - 1), decode))
    return Outline(
        job,
        _moments(job),
        _times(whole, 1.0 / num_tokens(job)),
        _times(whole, float(num_runs + UNTIMED)),
    )


def num_tokens(job: Job) -> int:
    """What the time per token of an inference is over: generated tokens; an encoder's input."""
    run = job.run
    encoder = job.model.task == "encoder"
    return run.batch_size * (run.prompt_len if encoder else run.max_new_tokens)


def _times(passes: tuple[Pass, ...], factor: float) -> tuple[Pass, ...]:
    return tuple((phase, factor * number, features) for phase, number, features in passes)


def _row(features: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(float(features[name]) for name in FEATURES)


def _moments(job: Job) -> tuple[tuple[float, ...], ...]:
    found = ledger(job)
    by_moment = (part_bytes(job, found, moment) for moment in found.moments)
    return tuple(tuple(float(parts[name]) for name in PARTS) for parts in by_moment)


@dataclass(frozen=True, slots=True)
class Belief:
    """One quantity of all candidates: log-normal, with shared and own errors.

    Args:
        log_value: log of the best guess, shape [num_candidates].
        work: what a unit more of each coefficient adds to it, as a fraction of it, shape
            [num_candidates, num_coefficients]; zero of what was measured, and less of what is
            like it.
        own: covariance of what the coefficients do not explain, shape [n, n].
        coefficients: the best guess of each.
        root: a square root of their covariance.
    """

    log_value: Array
    work: Array
    own: Array
    coefficients: Array
    root: Array

    @property
    def shared(self) -> Array:
        """Effect of each independent error of the coefficients, shape [num_candidates, n]."""
        return self.work @ self.root

    def quantity(self, position: int) -> Quantity:
        """What is believed of one candidate."""
        variance = float((self.shared[position] ** 2).sum() + self.own[position, position])
        value = math.exp(self.log_value[position])
        confidence = 0.95
        reach = math.exp(TWO_SIDED_Z[confidence] * math.sqrt(max(0.0, variance)))
        return Quantity(
            value=value,
            low=value / reach,
            high=value * reach,
            measured=reach == 1.0,
            confidence=confidence,
        )

    def draw(self, num_worlds: int, rng: np.random.Generator) -> Array:
        """Values in `num_worlds` worlds, shape [num_worlds, num_candidates]."""
        import numpy as np

        errors = rng.standard_normal((num_worlds, self.root.shape[1])) @ self.root.T
        # more work never takes less: no coefficient is negative, however little is known of it
        errors = np.maximum(errors, -LARGEST_GAIN * self.coefficients)
        own = rng.standard_normal((num_worlds, len(self.log_value))) @ _root(self.own).T
        factor = np.maximum(1 - LARGEST_GAIN, 1 + errors @ self.work.T)
        return np.asarray(np.exp(self.log_value + own) * factor)


class Outlook:
    """The candidates of both stages as arrays; `time` and `memory` say what is believed of them."""

    def __init__(self, outlines: Sequence[Outline]) -> None:
        import numpy as np

        self._outlines = outlines
        self.jobs = [one.job for one in outlines]
        num_moments = max(len(one.moments) for one in outlines)
        # a moment that is not there holds nothing
        self._moments = np.zeros((len(outlines), num_moments, len(PARTS)))
        for i, one in enumerate(outlines):
            self._moments[i, : len(one.moments)] = one.moments
        self._passes = _Passes.of([one.passes for one in outlines])
        self._trials = _Passes.of([one.trial for one in outlines])
        self._alike = _alike(self.jobs)
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
        spread = [(before or calibration).time[phase] for phase in by_phase]
        coefficients = _Coefficients(
            np.hstack([[model.mean[name] for name in FEATURES] for model in models]),
            _blocks([model.interval_scale * _root(np.array(model.covariance)) for model in spread]),
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
        return _conditioned(
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
        lengths = measured.batch_seq_len or (job.run.seq_len,) * len(measured.step_s)
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
        peak = closest_counter(measured)
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
        coefficients = _Coefficients(
            np.array([model.mean[name] for name in PARTS]), _root(np.array(model.covariance))
        )
        noise = np.full(len(used), model.noise)
        return _conditioned(
            np.log(used),
            parts / used[:, None],
            noise,
            self._alike,
            coefficients,
            errors or {},
            joint=False,
        )


class _Coefficients(NamedTuple):
    """Best guesses, and a square root of the covariance of what is believed of them."""

    mean: Array
    root: Array


def _blocks(matrices: Sequence[Array]) -> Array:
    """A matrix with `matrices` along its diagonal."""
    import numpy as np

    size = sum(len(one) for one in matrices)
    found, start = np.zeros((size, size)), 0
    for one in matrices:
        end = start + len(one)
        found[start:end, start:end] = one
        start = end
    return found


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


def closest_counter(measured: Measurement) -> int | None:
    """The measured peak that is closest to the card."""
    counters = (
        measured.device_used_bytes,
        measured.peak_reserved_bytes,
        measured.peak_allocated_bytes,
    )
    return next((value for value in counters if value is not None), None)


def _deciding(model: TimeModel, features: Array) -> Array:
    import numpy as np

    columns = {name: features[..., i] for i, name in enumerate(FEATURES)}
    counted = timing.deciding(model, columns)
    return np.stack([counted[name] for name in FEATURES], axis=-1)


def _at_peak(moments: Array, jobs: Sequence[Job], model: MemoryModel) -> tuple[Array, Array]:
    """Bytes by part at the largest moment of every candidate, and what the card gives."""
    import numpy as np

    mean = np.array([model.mean[name] for name in PARTS])
    live = np.array([name in ALLOCATED_PARTS for name in PARTS])
    largest = np.argmax(moments @ (mean * live), axis=1)
    parts = moments[np.arange(len(moments)), largest]
    context = parts[:, PARTS.index("context")] * mean[PARTS.index("context")]
    idle = parts[:, PARTS.index("allocator")] * mean[PARTS.index("allocator")]
    live_bytes = parts @ (mean * live) + context
    device = np.array([float(job.gpu.memory_bytes) for job in jobs])
    pool = np.array([_pool_bytes(job) for job in jobs])
    # idle segments are given back before a request fails
    used = live_bytes + np.clip(device - live_bytes, 0.0, idle)
    return parts, np.where(pool > 0, np.maximum(pool, live_bytes), used)


def _pool_bytes(job: Job) -> float:
    training = job.run.phase == "finetune"
    return 0.0 if training else float(allocator.pool_bytes(job.gpu, job.run.kv_cache))


# Settings in which two runs of one method may differ.
_ANY: dict[str, Any] = {
    "model": "any",
    "batch_size": 1,
    "seq_len": 1,
    "r": 1,
    "lora_alpha": 1,
    "prompt_len": 1,
    "max_new_tokens": 1,
    "padding": "none",
}


def _alike(jobs: Sequence[Job]) -> Array:
    """Correlation of the unexplained errors of every two candidates, shape [n, n]."""
    import numpy as np

    model = _codes([job.run.model for job in jobs])
    method = _codes([(job.run.phase, job.run.method) for job in jobs])
    settings = _codes([replace(job.run, **_ANY) for job in jobs])
    phase = _codes([job.run.phase for job in jobs])
    doublings = np.log2([job.run.batch_size for job in jobs])
    same_phase = phase[:, None] == phase
    same_model = (model[:, None] == model) & same_phase
    same_method = (method[:, None] == method) & same_phase
    closeness = ALIKE_PER_DOUBLING ** np.abs(doublings[:, None] - doublings)
    rank = np.log2([job.run.r for job in jobs])
    closeness = closeness * ALIKE_PER_RANK_DOUBLING ** np.abs(rank[:, None] - rank)
    shares = (
        MODEL_SHARE * same_model
        + METHOD_SHARE * same_method
        + VARIANT_SHARE * (same_model & same_method) * closeness
        + SETTINGS_SHARE * (same_model & (settings[:, None] == settings)) * closeness
    )
    np.fill_diagonal(shares, 1.0)
    return np.asarray(shares)


def _codes(values: Sequence[object]) -> NDArray[np.int64]:
    import numpy as np

    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])


def _conditioned(
    log_value: Array,
    work: Array,
    noise: Array,
    alike: Array,
    coefficients: _Coefficients,
    errors: Mapping[int, float],
    *,
    joint: bool,
) -> Belief:
    """The belief once the errors of some candidates are known: the others err alike.

    What was measured is known: its own error is the one seen, without spread. A measurement shows
    coefficients and own error together. Conditioned jointly, it narrows the coefficients by as
    much as own errors let them be seen; and where the coefficients are worse than guessed, the own
    errors of it and of its like are better by what is explained twice.

    Args:
        coefficients: best guesses after what was measured, and their spread: before that where
            both are conditioned jointly, after it otherwise.
    """
    import numpy as np

    own = alike * np.outer(noise, noise)
    if not errors:
        return Belief(log_value, work, own, *coefficients)
    seen = np.fromiter(errors, dtype=np.intp)
    wanted = np.array([errors[i] for i in seen.tolist()])
    # a measurement repeats to about this much, which also keeps the matrix regular
    repeats = REPEATABILITY**2 * np.eye(len(seen))
    inner = own[np.ix_(seen, seen)] + repeats
    # the errors seen may be smaller or larger than the noise that was expected
    size = float(wanted @ np.linalg.solve(inner, wanted))
    own = own * (EXPECTED_RUNS + size) / (EXPECTED_RUNS + len(seen))
    inner = own[np.ix_(seen, seen)] + repeats
    gain = np.linalg.solve(inner, own[seen]).T  # [n, num_seen]
    known = log_value + gain @ wanted
    known[seen] = log_value[seen] + wanted
    left = own - gain @ own[seen]
    left[seen] = left[:, seen] = 0.0
    if not joint:
        work = work.copy()
        work[seen] = 0.0
        return Belief(known, work, left, *coefficients)
    shown = work[seen] @ coefficients.root  # by each independent error of the coefficients
    explained = shown.T @ np.linalg.solve(shown @ shown.T + inner, shown)
    root = coefficients.root @ _root(np.eye(len(explained)) - explained)
    work = work - gain @ work[seen]
    work[seen] = 0.0
    return Belief(known, work, left, coefficients.mean, root)


def _root(matrix: Array) -> Array:
    """A square root of a covariance, which may have lost rank: root @ root.T is the matrix."""
    import numpy as np

    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
