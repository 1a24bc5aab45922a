"""Sequential early stopping: when the batches of a profile have settled its purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Fewest timed batches, however clear the first is. A generation times many tokens; a training step
# is a single time, and may be an outlier.
LEAST: Mapping[str, int] = {"finetune": 2, "inference": 1}
# Deviation of the log of one batch's time around its profile's mean, and the number of batches
# that this prior weighs as much as. Kind: fitted, `benchmarks/search early`: the robust spread
# of the steps and generations of the CPU table.
BATCH_SPREAD, BATCH_SPREAD_COUNTS = 0.03, 2.0
DEVIATIONS = 2.5  # standard errors between the mean and the decisive time


def is_enough(phase: str, times_s: Sequence[float], decisive_s: Sequence[float]) -> bool:
    """Whether the batches so far are clearly faster or slower than the decisive time of their run.

    The mean log of time over decisive time must be `DEVIATIONS` standard errors from zero. The
    standard error starts from the spread of all profiles and is corrected by the batches seen: two
    equal batches decide from 4.4 % on, one from 7.5 %. A fast training never stops early: it may
    be the answer, whose time is worth every batch.

    Args:
        decisive_s: time limit of each batch of the profile, infinite where any time will do; empty
            where every batch is wanted.
    """
    number = len(times_s)
    if not decisive_s or number < LEAST[phase]:
        return False
    if math.inf in decisive_s:
        return phase == "inference"
    logs = [
        math.log(time_s / limit_s) for time_s, limit_s in zip(times_s, decisive_s, strict=False)
    ]
    mean = sum(logs) / number
    squares = sum((log - mean) ** 2 for log in logs)
    variance = (BATCH_SPREAD_COUNTS * BATCH_SPREAD**2 + squares) / (
        BATCH_SPREAD_COUNTS + number - 1
    )
    deviations = mean / math.sqrt(variance / number)
    return deviations > DEVIATIONS or (phase == "inference" and deviations < -DEVIATIONS)
