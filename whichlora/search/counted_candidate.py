"""Bytes and passes of one candidate, counted before any calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from whichlora.memory.training import PARTS
from whichlora.predict.evaluation_and_saving import evaluation_features
from whichlora.predict.predict import (
    CountedRun,
    features_by_length,
    num_tokens,
    passes,
    step_features,
)
from whichlora.predict.resolve import ResolvedRun
from whichlora.search.spread_steps import SpreadSteps
from whichlora.timing.model import FEATURES

NO_EVALUATION: Mapping[int, float] = MappingProxyType({})
# Steps of a profile beside the timed ones: the warm-up, and the step that counts bytes.
UNTIMED_STEPS = 2

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
    num_batches: int,
    evaluated: Mapping[int, float] = NO_EVALUATION,
) -> CountedCandidate:
    """Count a fine-tuning.

    Args:
        steps: number of optimizer steps by padded length.
        num_batches: timed in a profile.
        evaluated: number of evaluation batches by padded length.
    """
    job = counted.job
    rows = features_by_length(lambda width: evaluation_features(job, width=width), evaluated)
    evaluations = tuple(
        ("prefill", count, _row(rows[length])) for length, count in evaluated.items()
    )
    if job.layout is not None:
        return CountedCandidate(counted, evaluations, (), SpreadSteps.of(job, steps))
    if len(counted.passes) > 1:  # answers are written, too
        trained = tuple(
            (phase, count * float(times), _row(features))
            for length, count in steps.items()
            for phase, times, features in passes(job, seq_len=length)
        )
    else:
        rows = features_by_length(lambda width: step_features(job, seq_len=width), steps)
        trained = tuple(("finetune", count, _row(rows[length])) for length, count in steps.items())
    of_step = tuple((phase, float(times), _row(row)) for phase, times, row in counted.passes)
    trial = _scaled(of_step, float(num_batches + UNTIMED_STEPS))
    return CountedCandidate(counted, trained + evaluations, trial)


def count_inference(counted: CountedRun, *, num_runs: int) -> CountedCandidate:
    """Count a generation.

    Args:
        num_runs: generations timed in a profile.
    """
    generation = tuple(
        (phase, float(count), _row(features)) for phase, count, features in counted.passes
    )
    return CountedCandidate(
        counted,
        _scaled(generation, 1.0 / num_tokens(counted.job)),
        _scaled(generation, float(num_runs + UNTIMED_STEPS)),
    )


def _scaled(passes: tuple[PassRow, ...], factor: float) -> tuple[PassRow, ...]:
    return tuple((phase, factor * count, features) for phase, count, features in passes)


def _row(features: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(float(features[name]) for name in FEATURES)
