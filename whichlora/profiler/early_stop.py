"""Sequential early stopping: when the batches of a profile have settled its purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

from whichlora.predict.repeated_times import KNOWN_TO, batch_variance, known_to, log_ratios

# Fewest timed batches, however clear the first is. A generation times many tokens; a training step
# is a single time, and may be an outlier.
LEAST: Mapping[str, int] = {"finetune": 2, "inference": 1}
DEVIATIONS = 2.5  # standard errors between the mean and the decisive time
MOST_TIMES = 2  # a profile whose mean is not known goes on up to so many times its batches


def is_enough(
    phase: str,
    times_s: Sequence[float],
    decisive_s: Sequence[float],
    predicted_s: Sequence[float] = (),
) -> bool:
    """Whether the batches so far have decided, or know their mean to `KNOWN_TO`.

    Args:
        decisive_s: time limit of each batch of the profile, infinite where any time will do; empty
            where the batches decide nothing.
        predicted_s: of each batch; empty where every batch is wanted.
    """
    return _is_decided(phase, times_s, decisive_s) or _is_known(times_s, predicted_s)


def _is_decided(phase: str, times_s: Sequence[float], decisive_s: Sequence[float]) -> bool:
    """Whether the batches so far are clearly faster or slower than the decisive time of their run.

    The mean log of time over decisive time must be `DEVIATIONS` standard errors from zero. The
    standard error starts from the spread of all profiles and is corrected by the batches seen: two
    equal batches decide from 4.4 % on, one from 7.5 %. A fast training is not decided: it may be
    the answer, whose time is to be known.
    """
    if not decisive_s or len(times_s) < LEAST[phase]:
        return False
    if math.inf in decisive_s:
        return phase == "inference"
    logs = log_ratios(times_s, decisive_s)
    deviations = mean(logs) / math.sqrt(batch_variance(logs) / len(logs))
    return deviations > DEVIATIONS or (phase == "inference" and deviations < -DEVIATIONS)


def _is_known(times_s: Sequence[float], predicted_s: Sequence[float]) -> bool:
    """Whether the mean of the batches is known to `KNOWN_TO`.

    Batches of several lengths have one factor on what is predicted of each, not one time.
    """
    return bool(predicted_s) and known_to(log_ratios(times_s, predicted_s)) <= KNOWN_TO
