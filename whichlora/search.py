"""Candidates against limits: who meets them, who may, who cannot, and whom to measure next.

A candidate is judged on its measured values where it was measured and on its predictive
intervals where it was not. Only a candidate that is undecided, and would rank before the best one
known, is worth device time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from whichlora.numeric import TWO_SIDED_Z
from whichlora.plan import Limits, ProfilePolicy
from whichlora.results import Measurement, Prediction
from whichlora.specs import RunConfig

Verdict = Literal["meets", "misses", "undecided"]

MIN_CHANCE = 0.05  # a candidate with less is not worth a run
LIKELY = 0.5
WORTHWHILE_GAIN = 0.98  # a rival must promise at least 2 % less time


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A value with its bounds; equal where it was measured.

    Args:
        confidence: of the two-sided interval from `low` to `high`.
    """

    value: float
    low: float
    high: float
    measured: bool
    confidence: float = 0.9

    def chance_below(self, bound: float) -> float:
        """Probability that the true value is at most `bound`, log-normal between the bounds."""
        if self.measured or self.high <= self.low or self.low <= 0:
            return 1.0 if self.value <= bound else 0.0
        deviation = math.log(self.high / self.low) / (2 * TWO_SIDED_Z[self.confidence])
        return 0.5 * math.erfc(math.log(self.value / bound) / deviation / math.sqrt(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit applied to one candidate.

    Args:
        limit: name of the limit as messages show it; `unit` is "bytes" or "s".
        chance: probability that the candidate meets it.
    """

    limit: str
    unit: Literal["bytes", "s"]
    quantity: Quantity
    bound: float
    chance: float

    @property
    def verdict(self) -> Verdict:
        if self.chance >= 1 - MIN_CHANCE:
            return "meets"
        return "misses" if self.chance < MIN_CHANCE else "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One run with everything known about it.

    Args:
        total_s: whole fine-tuning; None for inference.
        failure: why it cannot run at all (a failed profile, or a smaller batch that ran out of
            memory), empty otherwise.
    """

    prediction: Prediction
    memory_bytes: Quantity
    time_per_token_s: Quantity
    total_s: Quantity | None
    checks: tuple[Check, ...]
    measurement: Measurement | None = None
    failure: str = ""

    @property
    def run(self) -> RunConfig:
        return self.prediction.run

    @property
    def measured(self) -> bool:
        return self.measurement is not None

    @property
    def chance(self) -> float:
        """Probability that every limit is met, taking the limits as independent."""
        if self.failure:
            return 0.0
        return math.prod(check.chance for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        if self.failure or any(check.verdict == "misses" for check in self.checks):
            return "misses"
        if all(check.verdict == "meets" for check in self.checks):
            return "meets"
        return "undecided"

    @property
    def rank(self) -> tuple[float, ...]:
        """Sorts the better candidate first: larger model, then less time, then less memory."""
        time = self.total_s or self.time_per_token_s
        return (-self.prediction.num_params, time.value, self.memory_bytes.value)


def judge(
    prediction: Prediction,
    limits: Limits,
    *,
    total_s: Quantity | None = None,
    measurement: Measurement | None = None,
    failure: str = "",
) -> Candidate:
    """Apply `limits` and the device's own memory to one candidate.

    Args:
        total_s: time of the whole fine-tuning, measured as soon as its profile is.
    """
    if measurement is not None and measurement.outcome != "ok":
        failure = f"{measurement.outcome}: {measurement.detail}".rstrip(": ")
    good = measurement if measurement is not None and measurement.outcome == "ok" else None
    memory = _memory(prediction, good)
    time = _time_per_token(prediction, good)
    training = prediction.run.phase == "finetune"
    limit_bytes = limits.finetune_bytes if training else limits.inference_bytes
    bounds: list[tuple[str, Literal["bytes", "s"], Quantity, float | None]] = [
        ("memory of the device", "bytes", memory, prediction.usable_bytes),
        ("peak memory limit", "bytes", memory, limit_bytes),
    ]
    if total_s is not None:
        bounds.append(("total time limit", "s", total_s, limits.total_time_s))
    if not training:
        bounds.append(("time per token limit", "s", time, limits.time_per_token_s))
    checks = tuple(
        Check(
            limit=name,
            unit=unit,
            quantity=quantity,
            bound=bound,
            chance=quantity.chance_below(bound),
        )
        for name, unit, quantity, bound in bounds
        if bound is not None
    )
    return Candidate(
        prediction=prediction,
        memory_bytes=memory,
        time_per_token_s=time,
        total_s=total_s,
        checks=checks,
        measurement=measurement,
        failure=failure,
    )


def _memory(prediction: Prediction, measurement: Measurement | None) -> Quantity:
    if measurement is not None:
        # the counter closest to the card that the device has
        for value in (
            measurement.device_used_bytes,
            measurement.peak_reserved_bytes,
            measurement.peak_allocated_bytes,
        ):
            if value is not None:
                return _exactly(value)
    memory = prediction.memory
    low, high = memory.interval_bytes
    return Quantity(
        value=memory.device_used_bytes,
        low=low,
        high=high,
        measured=False,
        confidence=memory.confidence,
    )


def _time_per_token(prediction: Prediction, measurement: Measurement | None) -> Quantity:
    run = prediction.run
    if measurement is not None and measurement.generate_s:
        times = sorted(measurement.generate_s)
        generated = run.batch_size * run.max_new_tokens
        return _exactly(times[len(times) // 2] / generated)
    if measurement is not None and measurement.step_s:
        lengths = measurement.batch_seq_len or (run.seq_len,) * len(measurement.step_s)
        tokens = sum(lengths) * run.batch_size * run.gradient_accumulation_steps
        return _exactly(sum(measurement.step_s) / tokens)
    time = prediction.time
    scale = 1.0
    if time.step_s is not None:
        scale = time.time_per_token_s / time.step_s
    low, high = time.interval_s
    return Quantity(
        value=time.time_per_token_s,
        low=low * scale,
        high=high * scale,
        measured=False,
        confidence=time.confidence,
    )


def _exactly(value: float) -> Quantity:
    return Quantity(value=value, low=value, high=value, measured=True)


def dominated(run: RunConfig, failed: Iterable[RunConfig]) -> RunConfig | None:
    """The failed run that `run` asks more of in every dimension, else being equal."""
    from dataclasses import replace

    for other in failed:
        more = (
            run.batch_size >= other.batch_size
            and run.seq_len >= other.seq_len
            and run.prompt_len >= other.prompt_len
            and run.max_new_tokens >= other.max_new_tokens
        )
        if more and run == replace(
            other,
            batch_size=run.batch_size,
            seq_len=run.seq_len,
            prompt_len=run.prompt_len,
            max_new_tokens=run.max_new_tokens,
        ):
            return other
    return None


# --- whom to measure next -----------------------------------------------------------------

Choose = Callable[[Sequence[Candidate]], Candidate | None]


def _by_model(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates of each model, the largest model first."""

    def key(candidate: Candidate) -> tuple[float, str]:
        return (-candidate.prediction.num_params, candidate.run.model)

    return [list(group) for _, group in groupby(sorted(candidates, key=key), key=key)]


def choose_inference(candidates: Sequence[Candidate]) -> Candidate | None:
    """A model is kept once one of its configurations is known to meet the limits.

    A model whose best configuration surely meets them, or whose every configuration surely
    misses them, needs no run; of the others the most promising configuration is next.
    """
    for group in _by_model(candidates):
        if any(candidate.verdict == "meets" for candidate in group):
            continue
        open_ones = [c for c in group if c.verdict == "undecided" and not c.measured]
        if open_ones:
            return max(open_ones, key=lambda candidate: candidate.chance)
    return None


def choose_finetune(candidates: Sequence[Candidate]) -> Candidate | None:
    """The best-ranked candidate that may still win; None once the winner is certain."""
    best = winner(candidates, "frontier")
    rivals = [
        candidate
        for candidate in candidates
        if not candidate.measured and candidate.verdict != "misses" and _may_beat(candidate, best)
    ]
    return min(rivals, key=lambda candidate: candidate.rank, default=None)


def _may_beat(candidate: Candidate, best: Candidate | None) -> bool:
    if best is None:
        return True
    size, best_size = candidate.prediction.num_params, best.prediction.num_params
    if size != best_size:
        return size > best_size
    if candidate.total_s is None or best.total_s is None:
        return False
    return candidate.total_s.chance_below(best.total_s.value * WORTHWHILE_GAIN) > MIN_CHANCE


def choose_any(candidates: Sequence[Candidate]) -> Candidate | None:
    """Everything is measured, as the original WhichLoRA did."""
    return next((one for one in candidates if not one.measured and not one.failure), None)


def choose_nothing(candidates: Sequence[Candidate]) -> Candidate | None:
    """A dry run: predictions only."""
    return None


CHOOSE_INFERENCE: dict[ProfilePolicy, Choose] = {
    "none": choose_nothing,
    "frontier": choose_inference,
    "all": choose_any,
}
CHOOSE_FINETUNE: dict[ProfilePolicy, Choose] = {
    "none": choose_nothing,
    "frontier": choose_finetune,
    "all": choose_any,
}


def accepted(candidate: Candidate, policy: ProfilePolicy) -> bool:
    """Whether `candidate` counts as meeting its limits in an answer found under `policy`.

    A dry run has no measurement to decide: there, more likely than not is enough, and the answer
    states the chance.
    """
    if policy == "none":
        return candidate.chance >= LIKELY
    return candidate.verdict == "meets"


def winner(candidates: Sequence[Candidate], policy: ProfilePolicy) -> Candidate | None:
    """The best-ranked accepted candidate, and a measured one unless nothing may be measured."""
    meeting = [
        candidate
        for candidate in candidates
        if accepted(candidate, policy) and (candidate.measured or policy == "none")
    ]
    return min(meeting, key=lambda candidate: candidate.rank, default=None)


def kept_models(candidates: Sequence[Candidate], policy: ProfilePolicy) -> tuple[str, ...]:
    """Models with at least one accepted inference configuration, largest first."""
    return tuple(
        group[0].run.model
        for group in _by_model(candidates)
        if any(accepted(candidate, policy) for candidate in group)
    )
