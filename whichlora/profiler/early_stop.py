"""When the batches of a profile have settled what it was made for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Timed batches, however clear the first is. A generation is many timed tokens; a training step is
# one time, and may be a hiccup.
LEAST: Mapping[str, int] = {"finetune": 2, "inference": 1}
# Deviation of the log of one batch's time around its profile's mean, and the batches whose own
# scatter weighs as much. Kind: fitted, `benchmarks/search early`: the robust spread of the steps
# and generations of the CPU table.
BATCH_SPREAD, BATCH_SPREAD_COUNTS = 0.03, 2.0
DEVIATIONS = 2.5  # that the mean must lie off what decides


def is_enough(phase: str, times_s: Sequence[float], decisive_s: Sequence[float]) -> bool:
    """Whether the batches so far are clearly on one side of what decides about their run.

    The mean log of time over decisive time must be `DEVIATIONS` standard errors from zero. The
    spread behind them is that of profiles in general, corrected by the batches seen: two that
    agree are clear from 4.4 % on, one from 7.5 %. A training that is fast enough is never enough:
    it may be the answer, whose time is worth every batch.

    Args:
        decisive_s: what each batch of the profile may take, infinite where any time will do;
            empty where every batch is wanted.
    """
    number = len(times_s)
    if not decisive_s or number < LEAST[phase]:
        return False
    if math.inf in decisive_s:
        return phase == "inference"
    logs = [math.log(one / most) for one, most in zip(times_s, decisive_s, strict=False)]
    mean = sum(logs) / number
    around = sum((one - mean) ** 2 for one in logs)
    variance = (BATCH_SPREAD_COUNTS * BATCH_SPREAD**2 + around) / (BATCH_SPREAD_COUNTS + number - 1)
    off = mean / math.sqrt(variance / number)
    return off > DEVIATIONS or (phase == "inference" and off < -DEVIATIONS)
