"""From counted bytes and work to calibrated estimates with intervals, and whether a run fits.

A number belongs to one run, or is an array over many runs; arrays broadcast.
A single prediction passes plain numbers; `judge_block` and `search` pass arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from whichlora.memory.training import PARTS, RETURNED
from whichlora.predict.coefficients import MemoryModel
from whichlora.spec.numeric import (
    TWO_SIDED_Z,
    WIDEST,
    Count,
    Real,
    added,
    any_of,
    exp,
    largest,
    quadratic_form,
    rounded,
    smallest,
    sqrt,
    where,
)
from whichlora.timing import model as timing
from whichlora.timing.model import TimeModel

MEMORY_CONFIDENCE = 0.95
TIME_CONFIDENCE = 0.90
ALLOCATED_PARTS = tuple(part for part in PARTS if part not in ("allocator", "context"))
_LIVE_PARTS = (*ALLOCATED_PARTS, "context")

# What a replay leaves of the spread of the allocator's part: what the interval of 67 reserved peaks
# measured on a T4 needs to hold 95 %, 0.28 (`spread_of` of `benchmarks/reserved_accuracy.py`),
# rounded up. Replays of real requests need less (`docs/accuracy/reserved.md`).
REPLAYED_SPREAD = 0.3

SECONDS, DEVIATION = "seconds", "log_deviation"
Pass: TypeAlias = tuple[str, Count, Mapping[str, Real]]
"""Phase, how many such passes there are, and the time features of one.

An engine's own formulas time its passes: these have `SECONDS`, and the `DEVIATION` of their log.
"""


def corrected(parts: Mapping[str, Count], model: MemoryModel) -> dict[str, Count]:
    """`parts` of the ledger in whole bytes, as the device has them."""
    return {name: rounded(parts[name] * model.mean[name]) for name in PARTS}


def allocated_bytes(parts: Mapping[str, Count]) -> Count:
    """Bytes of live tensors among `parts`."""
    return sum(parts[name] for name in ALLOCATED_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryJudgement:
    """Memory at the largest moment.

    Args:
        counted: bytes by part, before the calibration, of idle segments what the device has room
            for.
        breakdown: the same as the device has them; adds up to `device_used_bytes`.
        moments: their names; `position` is that of the largest.
        device_bytes: memory of the device.
        held_bytes: of its idle segments, those in which live tensors are, too; the others are given
            back before a request fails.
        pool_bytes: of an engine that takes its memory at once, else 0.
        is_replayed: the allocator's part is of the run's own requests, not an estimate; of many
            runs an array.
    """

    model: MemoryModel
    counted: Mapping[str, Count]
    breakdown: Mapping[str, Count]
    moments: tuple[str, ...]
    position: Count
    device_bytes: Count
    held_bytes: Count
    pool_bytes: Count
    is_replayed: Count
    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    device_used_bytes: Count

    def least(self) -> Count:
        """What the run cannot do without; never more than a bound of `device_used_bytes`.

        It is of live tensors and context alone: when a request fails, the allocator drops its idle
        cache first, so only live tensors make a run fail. However uncertain a context is, it is
        not negative.
        """
        live = self.peak_allocated_bytes + self.breakdown["context"]
        without_context, _ = self.allocated_interval()
        return largest(without_context, rounded(live - self._width(_LIVE_PARTS)))

    def bounds(self) -> tuple[Count, Count, Count]:
        """`least`, and bounds of `device_used_bytes`."""
        used, pooled = self.device_used_bytes, self.pool_bytes > 0
        least = self.least()
        width = where(self._is_fixed(), 0.0, self._width(PARTS))
        low = where(pooled, used, smallest(used, largest(least, rounded(used - width))))
        return least, low, self._most(used + width, PARTS, self.device_bytes)

    def allocated_interval(self) -> tuple[Count, Count]:
        allocated, width = self.peak_allocated_bytes, self._width(ALLOCATED_PARTS)
        return rounded(allocated - width), rounded(allocated + width)

    def reserved_interval(self) -> tuple[Count, Count]:
        reserved = self.peak_reserved_bytes
        width = where(self._is_fixed(), 0.0, self._width((*ALLOCATED_PARTS, "allocator")))
        least, _ = self.allocated_interval()
        low = where(self.pool_bytes > 0, reserved, largest(least, rounded(reserved - width)))
        room = self.device_bytes - self.breakdown["context"]
        return low, self._most(reserved + width, (*ALLOCATED_PARTS, "allocator"), room)

    def _most(self, high: Real, names: Sequence[str], limit: Count) -> Count:
        """`high`, of a sum of `names`, where what is given back takes no more than `limit`.

        What is held may need more than `limit`: then a request fails.
        """
        held = {**self.uncertain, "allocator": self.held_bytes}
        total = sum(self.breakdown[name] for name in names if name != "allocator")
        needed = total + self.held_bytes + self._width(names, held)
        returns = self.counted["allocator"] > self.held_bytes
        return rounded(where(returns, largest(needed, smallest(high, limit)), high))

    @property
    def uncertain(self) -> dict[str, Count]:
        """`counted`, of the allocator's part only what a replay leaves open."""
        share = where(self.is_replayed, REPLAYED_SPREAD, 1.0)
        return {**self.counted, "allocator": share * self.counted["allocator"]}

    def _is_fixed(self) -> Count:
        """Whether a pool holds everything: it is as large as it is."""
        return where(self.pool_bytes > 0, self.device_used_bytes <= self.pool_bytes, False)

    def _width(self, names: Sequence[str], uncertain: Mapping[str, Count] | None = None) -> Real:
        """Half the interval of the sum of `names`, of which `uncertain` is not known."""
        uncertain = uncertain or self.uncertain
        index = [PARTS.index(name) for name in names]
        covariance = [[self.model.covariance[i][j] for j in index] for i in index]
        variance = quadratic_form([uncertain[name] for name in names], covariance)
        total = added(self.counted[name] * self.model.mean[name] for name in names)
        deviation = sqrt(variance + (self.model.noise * total) ** 2)
        return TWO_SIDED_Z[MEMORY_CONFIDENCE] * deviation


def least_bytes(parts: Mapping[str, Count], model: MemoryModel) -> Real:
    """What a run cannot do without that at some moment has `parts` at least.

    The width of a sum is at most the sum of the widths, so it is no larger a share of the live
    tensors than that of the widest part. `MemoryJudgement.least` is no less than this.
    """
    deviations = [
        math.hypot(math.sqrt(model.covariance[i][i]) / model.mean[name], model.noise)
        if model.mean[name]
        else math.inf
        for i, name in enumerate(PARTS)
        if name in ALLOCATED_PARTS
    ]
    share = TWO_SIDED_Z[MEMORY_CONFIDENCE] * max(deviations)
    live = added(model.mean[name] * num_bytes for name, num_bytes in parts.items())
    return max(0.0, 1 - share) * live - len(PARTS)  # each part is rounded


def judge_memory(
    moments: Mapping[str, Mapping[str, Count]],
    model: MemoryModel,
    *,
    device_bytes: Count,
    pool_bytes: Count,
    is_replayed: Count = False,
) -> MemoryJudgement:
    """What is in use at the largest of `moments`.

    Args:
        moments: bytes by part at each, before the calibration.
        device_bytes: memory of the device.
        pool_bytes: what an engine takes at once, 0 where it takes what it needs.
        is_replayed: whether the allocator's part comes from a replay of the run.
    """
    counted, position = _largest(tuple(moments.values()), model)
    held = largest(0, counted["allocator"] - counted.pop(RETURNED))
    breakdown = corrected(counted, model)
    allocated = allocated_bytes(breakdown)
    live = allocated + breakdown["context"]
    # idle segments are given back before a request fails: no more of them than there is room
    room = largest(0, device_bytes - live)
    idle = smallest(breakdown["allocator"], room)
    breakdown["allocator"] = largest(0, where(pool_bytes > 0, pool_bytes - live, idle))
    counted["allocator"] = smallest(counted["allocator"], room)
    reserved = allocated + breakdown["allocator"]
    return MemoryJudgement(
        model=model,
        counted=counted,
        breakdown=breakdown,
        moments=tuple(moments),
        position=position,
        device_bytes=device_bytes,
        held_bytes=smallest(held, counted["allocator"]),
        pool_bytes=pool_bytes,
        is_replayed=is_replayed,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=reserved + breakdown["context"],
    )


def _largest(
    moments: Sequence[Mapping[str, Count]], model: MemoryModel
) -> tuple[dict[str, Count], Count]:
    """Bytes by part at the largest moment, the first of equal ones, and its position."""
    parts: dict[str, Count] = {RETURNED: 0, **moments[0]}
    peak: Count = 0
    most = _live_bytes(moments[0], model)
    for position, moment in enumerate(moments[1:], 1):
        size = _live_bytes(moment, model)
        larger = size > most
        if not any_of(larger):
            continue
        for name in (*PARTS, RETURNED):
            if moment.get(name, 0) is not parts[name]:
                parts[name] = where(larger, moment.get(name, 0), parts[name])
        peak = where(larger, position, peak)
        most = largest(most, size)
    return parts, peak


def _live_bytes(parts: Mapping[str, Count], model: MemoryModel) -> Real:
    return added(parts[name] * model.mean[name] for name in ALLOCATED_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeJudgement:
    """Time of one optimizer step, or of one generation.

    Args:
        pass_s: seconds of one pass, by phase.
        pass_parts: its seconds by feature, and on several GPUs by what else it waits for.
        log_deviation: of the log of `total_s`.
    """

    passes: Sequence[Pass]
    pass_s: Mapping[str, Real]
    pass_parts: Mapping[str, Mapping[str, Real]]
    total_s: Real
    log_deviation: Real

    @property
    def breakdown(self) -> dict[str, Real]:
        """Seconds by feature; adds up to `total_s`."""
        names = dict.fromkeys(name for parts in self.pass_parts.values() for name in parts)
        return {
            name: added(
                count * self.pass_parts[phase].get(name, 0.0) for phase, count, _ in self.passes
            )
            for name in names
        }

    @property
    def fitted_parts(self) -> dict[str, Mapping[str, Real]]:
        """`pass_parts` of what fitted coefficients time, and no engine's own formulas."""
        by_engine = {phase for phase, _, features in self.passes if SECONDS in features}
        return {phase: parts for phase, parts in self.pass_parts.items() if phase not in by_engine}

    def interval(self) -> tuple[Real, Real]:
        """Bounds of `total_s`."""
        return time_interval(self.total_s, self.log_deviation)


def judge_time(passes: Sequence[Pass], models: Mapping[str, TimeModel]) -> TimeJudgement:
    """Seconds of `passes` one after the other, each phase with its own model."""
    pass_s, pass_parts = {}, {}
    total: Real = 0.0
    error: Real = 0.0
    for phase, count, features in passes:
        if SECONDS in features:
            seconds, deviation = features[SECONDS], features[DEVIATION]
            pass_parts[phase] = {**dict.fromkeys(timing.FEATURES, 0.0), "engine": seconds}
        else:
            seconds, pass_parts[phase], deviation = timing.pass_time(models[phase], features)
        pass_s[phase] = seconds
        total = total + count * seconds
        # one run's errors in both phases come from one host and one device: they add up
        error = error + count * seconds * deviation
    return TimeJudgement(
        passes=passes,
        pass_s=pass_s,
        pass_parts=pass_parts,
        total_s=total,
        log_deviation=error / total,
    )


def joined(first: TimeJudgement, then: TimeJudgement) -> TimeJudgement:
    """Both, one after the other; errors of one device add up."""
    total = first.total_s + then.total_s
    error = first.total_s * first.log_deviation + then.total_s * then.log_deviation
    return TimeJudgement(
        passes=(*first.passes, *then.passes),
        pass_s={**first.pass_s, **then.pass_s},
        pass_parts={**first.pass_parts, **then.pass_parts},
        total_s=total,
        log_deviation=error / total,
    )


def time_interval(total: Real, deviation: Real) -> tuple[Real, Real]:
    """Bounds of `total` seconds at `TIME_CONFIDENCE`, its log having that `deviation`."""
    factor = exp(smallest(TWO_SIDED_Z[TIME_CONFIDENCE] * deviation, WIDEST))
    return total / factor, total * factor
