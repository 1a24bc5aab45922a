"""One candidate as the predictors see it, whatever the calibration: its bytes and its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from whichlora.memory.training import PARTS
from whichlora.predict.evaluation_and_saving import evaluation_features
from whichlora.predict.predict import moment_parts, num_tokens, passes, step_features
from whichlora.predict.resolve import ResolvedRun
from whichlora.timing.model import FEATURES

NOTHING: Mapping[int, float] = MappingProxyType({})
UNTIMED = 2  # steps of a profile beside the timed ones: warm-up, and the one that counts bytes

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

    job: ResolvedRun
    moments: tuple[tuple[float, ...], ...]
    passes: tuple[Pass, ...]
    trial: tuple[Pass, ...]


def outline_training(
    job: ResolvedRun,
    steps: Mapping[int, float],
    *,
    num_batches: int,
    evaluated: Mapping[int, float] = NOTHING,
) -> Outline:
    """A fine-tuning.

    Args:
        steps: number of optimizer steps by padded length.
        num_batches: timed in a profile.
        evaluated: number of evaluation batches by padded length.
    """
    passes = tuple(
        ("finetune", count, _row(step_features(job, seq_len=length)))
        for length, count in steps.items()
    ) + tuple(
        ("prefill", count, _row(evaluation_features(job, width=length)))
        for length, count in evaluated.items()
    )
    longest = _row(step_features(job))
    trial = ("finetune", float(num_batches + UNTIMED), longest)
    return Outline(job, _moments(job), passes, (trial,))


def outline_inference(job: ResolvedRun, *, num_runs: int) -> Outline:
    """A generation.

    Args:
        num_runs: generations timed in a profile.
    """
    whole = tuple((phase, float(count), _row(features)) for phase, count, features in passes(job))
    return Outline(
        job,
        _moments(job),
        _times(whole, 1.0 / num_tokens(job)),
        _times(whole, float(num_runs + UNTIMED)),
    )


def _times(passes: tuple[Pass, ...], factor: float) -> tuple[Pass, ...]:
    return tuple((phase, factor * number, features) for phase, number, features in passes)


def _row(features: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(float(features[name]) for name in FEATURES)


def _moments(job: ResolvedRun) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(float(parts[name]) for name in PARTS) for parts in moment_parts(job).values()
    )
