"""How well a few repeated times know their mean, and how alike a device repeats a run."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.results import Measurement

# Deviation of the log of one batch's time around its profile's mean, and the number of batches
# that this prior weighs as much as. Kind: fitted, `benchmarks/search early`: the robust spread
# of the steps and generations of the CPU table.
BATCH_SPREAD, BATCH_SPREAD_COUNTS = 0.03, 2.0
# Deviation of the log of a profile that is repeated, on a device where none was, and the number of
# repeats that this prior weighs as much as. Kind: estimate.
REPEATABILITY, REPEATABILITY_COUNTS = 0.02, 2.0
KNOWN_TO = 0.02  # half the interval of a mean that needs no further batch


def batch_variance(logs: Sequence[float]) -> float:
    """Variance of the log of one batch's time: that of `logs`, and the spread of all profiles."""
    center = mean(logs)
    squares = sum((log - center) ** 2 for log in logs)
    freedom = BATCH_SPREAD_COUNTS + len(logs) - 1
    return (BATCH_SPREAD_COUNTS * BATCH_SPREAD**2 + squares) / freedom


def known_to(logs: Sequence[float]) -> float:
    """Half the relative interval of the mean of batches whose times have these logs."""
    return TWO_SIDED_Z[TIME_CONFIDENCE] * math.sqrt(batch_variance(logs) / len(logs))


def batches_wanted(logs: Sequence[float]) -> int:
    """How many batches like these know their mean to `KNOWN_TO`."""
    deviations = KNOWN_TO / TWO_SIDED_Z[TIME_CONFIDENCE]
    return math.ceil(batch_variance(logs) / deviations**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeatability:
    """What a profile can know of a time, and what more of it would cost.

    Args:
        run_deviation: standard deviation of the log of a run's time when it is repeated.
        num_repeated: runs of this device that were made more than once; with none,
            `run_deviation` is what is taken without any.
        num_batches: batches of the profile.
        known_to: half the relative interval of their mean.
        more_batches: that would make it `KNOWN_TO`; `more_s` is the time that they take.
    """

    run_deviation: float
    num_repeated: int
    num_batches: int
    known_to: float
    more_batches: int
    more_s: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape."""
        return asdict(self)


def repeatability(
    times_s: Sequence[float], predicted_s: Sequence[float], run_deviation: float, num_repeated: int
) -> Repeatability:
    """What the batches of one profile know of their mean.

    Args:
        predicted_s: of each batch; batches of several lengths have one factor, not one time.
    """
    logs = log_ratios(times_s, predicted_s)
    more = max(0, batches_wanted(logs) - len(logs)) if known_to(logs) > KNOWN_TO else 0
    return Repeatability(
        run_deviation=run_deviation,
        num_repeated=num_repeated,
        num_batches=len(logs),
        known_to=known_to(logs),
        more_batches=more,
        more_s=more * mean(times_s),
    )


def log_ratios(times_s: Sequence[float], expected_s: Sequence[float]) -> list[float]:
    """Logs of times over what was expected of each."""
    return [math.log(time_s / each) for time_s, each in zip(times_s, expected_s, strict=False)]


def run_deviation(records: Iterable[Measurement]) -> tuple[float, int]:
    """How far a run on one device is from itself when it is repeated, and how many runs were.

    Runs are repeated where settings, model, library versions and machine agree. Published records,
    which do not name the machine, may be of several. The median size of the differences counts, so
    that one disturbed run does not stand for the device.
    """
    repeated: dict[str, list[float]] = defaultdict(list)
    for record in records:
        machine = record.environment.get("platform")
        if record.outcome != "ok" or machine is None or record.provenance.get("busy"):
            continue
        lengths = record.step_lengths
        longest = max(lengths, default=0)
        times_s = list(record.generate_s) or [
            step_s
            for step_s, length in zip(record.step_s, lengths, strict=True)
            if length == longest
        ]
        if times_s:
            settings = (record.config, record.model_config, longest)
            libraries = record.environment.get("libraries")
            key = json.dumps((settings, machine, libraries), sort_keys=True, default=str)
            repeated[key].append(math.log(median(times_s)))
    differences = [
        (log - mean(logs)) * math.sqrt(len(logs) / (len(logs) - 1))
        for logs in repeated.values()
        if len(logs) > 1
        for log in logs
    ]
    number = sum(len(logs) > 1 for logs in repeated.values())
    if not number:
        return REPEATABILITY, 0
    ordinary = 1.4826 * median(map(abs, differences))
    pooled = REPEATABILITY_COUNTS * REPEATABILITY**2 + number * ordinary**2
    return math.sqrt(pooled / (REPEATABILITY_COUNTS + number)), number
