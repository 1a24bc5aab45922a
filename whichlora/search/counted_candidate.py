"""Bytes and passes of one candidate, counted before any calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from whichlora.memory.training import PARTS
from whichlora.predict.counted import CountedRun
from whichlora.predict.evaluation_and_saving import evaluation_features
from whichlora.predict.quantities import features_by_length, num_tokens, passes, step_features
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.spread_steps import SpreadSteps
from whichlora.spec.profile_steps import steps_by_length
from whichlora.timing.model import FEATURES

NO_EVALUATION: Mapping[int, float] = MappingProxyType({})

PassRow: TypeAlias = tuple[str, float, tuple[float, ...]]
"""Phase, count, and the time features of one pass in the order of `FEATURES`."""


@dataclass(frozen=True, slots=True)
class CountedCandidate:
    """Bytes and passes of one candidate, counted before any calibration.

    Args:
        counted: one optimizer step of it, or one generation.
        passes: they add up to the whole fine-tuning, or to one generated token.
        trial: the passes of one profile, which give its cost; of several GPUs none yet.
        steps: on several GPUs their optimizer steps, which are no passes of one.
    """

    counted: CountedRun
    passes: tuple[PassRow, ...]
    trial: tuple[PassRow, ...]
    steps: SpreadSteps | None = None

    @property
    def job(self) -> ResolvedRun:
        return self.counted.job

    @property
    def moments(self) -> list[list[float]]:
        """Bytes at each moment that can be the peak, in the order of `PARTS`."""
        return [[float(parts[name]) for name in PARTS] for parts in self.counted.moments.values()]


def count_training(
    counted: CountedRun,
    steps: Mapping[int, float],
    *,
    profiled: Sequence[int],
    evaluated: Mapping[int, float] = NO_EVALUATION,
) -> CountedCandidate:
    """Count a fine-tuning.

    Args:
        steps: number of optimizer steps by padded length.
        profiled: padded lengths of the batches that a profile times.
        evaluated: number of evaluation batches by padded length.
    """
    job = counted.job
    rows = features_by_length(lambda width: evaluation_features(job, width=width), evaluated)
    evaluations = tuple(
        ("prefill", count, _row(rows[length])) for length, count in evaluated.items()
    )
    if job.layout is not None:
        return CountedCandidate(counted, evaluations, (), SpreadSteps.of(job, steps))
    tried = steps_by_length(profiled, job.gpu.backend.torch_device)
    lengths = list(dict.fromkeys((*steps, *tried)))
    if len(counted.passes) > 1:  # answers are written, too
        of_step = {
            length: tuple(
                (phase, float(times), _row(features))
                for phase, times, features in passes(job, seq_len=length)
            )
            for length in lengths
        }
    else:
        rows = features_by_length(lambda width: step_features(job, seq_len=width), lengths)
        of_step = {length: (("finetune", 1.0, _row(row)),) for length, row in rows.items()}

    def passes_of(numbers: Mapping[int, float]) -> tuple[PassRow, ...]:
        return tuple(
            row for length, count in numbers.items() for row in _scaled(of_step[length], count)
        )

    return CountedCandidate(counted, passes_of(steps) + evaluations, passes_of(tried))


def count_inference(counted: CountedRun, *, num_runs: int) -> CountedCandidate:
    """Count a generation.

    Args:
        num_runs: generations timed in a profile.
    """
    device = counted.job.gpu.backend.torch_device
    generation = tuple(
        (phase, float(count), _row(features)) for phase, count, features in counted.passes
    )
    return CountedCandidate(
        counted,
        _scaled(generation, 1.0 / num_tokens(counted.job)),
        _scaled(generation, float(steps_by_length([1] * num_runs, device).total())),
    )


def _scaled(passes: tuple[PassRow, ...], factor: float) -> tuple[PassRow, ...]:
    return tuple((phase, factor * count, features) for phase, count, features in passes)


def _row(features: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(float(features[name]) for name in FEATURES)
