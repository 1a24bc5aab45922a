"""Candidates against limits: who meets them, who may, who cannot.

A candidate is judged on its measured values where it was measured and on its predictive
intervals where it was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.plan import Limits, Objective, Plan
from whichlora.spec.results import (
    Measurement,
    Prediction,
    ServingPrediction,
    ServingTime,
)
from whichlora.spec.run import RunConfig

Verdict = Literal["meets", "misses", "undecided"]
Unit = Literal["bytes", "s", "sequences", "tokens", "requests/s"]

KEEPS_UP = 0.95  # of the rate of arrivals: a finite number of them is not answered faster
MIN_CHANCE = 0.05  # a candidate with less is not worth a run
LIKELY = 0.5
LARGEST = Objective()


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

    def divided(self, number: float) -> Quantity:
        """The same for one of `number` equal parts."""
        return replace(
            self, value=self.value / number, low=self.low / number, high=self.high / number
        )

    def chance_below(self, bound: float) -> float:
        """Probability that the true value is at most `bound`, log-normal on either side.

        The two sides of the value may reach differently far.
        """
        end = self.high if bound >= self.value else self.low
        if self.measured or end == self.value or self.low <= 0:
            return 1.0 if self.value <= bound else 0.0
        deviation = abs(math.log(end / self.value)) / TWO_SIDED_Z[self.confidence]
        return 0.5 * math.erfc(math.log(self.value / bound) / deviation / math.sqrt(2))

    def widened(self, deviation: float) -> Quantity:
        """The same with a further error, whose logarithm has this standard deviation."""
        if not deviation:
            return self
        further = TWO_SIDED_Z[self.confidence] * deviation
        below = math.hypot(math.log(self.value / self.low), further)
        above = math.hypot(math.log(self.high / self.value), further)
        return replace(
            self,
            low=self.value * math.exp(-below),
            high=self.value * math.exp(above),
            measured=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit applied to one candidate.

    Args:
        limit: name of the limit as messages show it.
        chance: probability that the candidate meets it.
        is_least: whether the quantity must be `bound` or more, not at most that.
    """

    limit: str
    unit: Unit
    quantity: Quantity
    bound: float
    chance: float
    is_least: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.chance >= 1 - MIN_CHANCE:
            return "meets"
        return "misses" if self.chance < MIN_CHANCE else "undecided"

    @property
    def needed(self) -> float:
        """The bound that this candidate surely meets."""
        return self.quantity.low if self.is_least else self.quantity.high

    @property
    def excess(self) -> float:
        """How many times too much the quantity is, or too little; 1 where it equals the bound."""
        if not self.is_least:
            return self.quantity.value / self.bound
        return self.bound / self.quantity.value if self.quantity.value else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One run with its predicted and measured values.

    Args:
        time_per_token_s: of the batches that `total_s` is summed over, padding included; without
            it of what was profiled, or of the run's own length.
        total_s: whole fine-tuning; None for inference.
        failure: why it has no measured values (a failed profile, or a smaller batch that ran out
            of memory), empty otherwise.
        objective: what ranks it among those that meet the limits.
        form: in which its model is served (`serving.serving_form`).
        chance_to_serve: of a fine-tuning: that its form meets the limits of inference.
    """

    prediction: Prediction
    memory_bytes: Quantity
    time_per_token_s: Quantity
    total_s: Quantity | None
    checks: tuple[Check, ...]
    measurement: Measurement | None = None
    failure: str = ""
    objective: Objective = LARGEST
    form: RunConfig | None = None
    chance_to_serve: float = 1.0

    @property
    def run(self) -> RunConfig:
        return self.prediction.run

    @property
    def measured(self) -> bool:
        return self.measurement is not None

    @property
    def timed_out(self) -> bool:
        """Whether its profile was stopped: more time may show that it meets every limit."""
        return self.measurement is not None and self.measurement.outcome == "timeout"

    @property
    def source(self) -> Literal["measured", "predicted"]:
        """Where its values are from; of a profile that was stopped they are the predicted ones."""
        return "measured" if self.measured and not self.timed_out else "predicted"

    @property
    def failed(self) -> bool:
        """Whether it cannot run at all."""
        return bool(self.failure) and not self.timed_out

    @property
    def chance(self) -> float:
        """Probability that every limit is met, taking the limits as independent."""
        if self.failed:
            return 0.0
        return math.prod(check.chance for check in self.checks)

    @property
    def chance_of_both_stages(self) -> float:
        """That its form meets the limits of inference, too; of an inference its own chance."""
        return self.chance * self.chance_to_serve

    @property
    def verdict(self) -> Verdict:
        if self.failed or any(check.verdict == "misses" for check in self.checks):
            return "misses"
        if not self.timed_out and all(check.verdict == "meets" for check in self.checks):
            return "meets"
        return "undecided"

    @property
    def rank(self) -> tuple[float, ...]:
        """Sorts the better candidate first: by model, unless a quantity is preferred to all.

        Where there are no times, the larger batch goes for the faster one.
        """
        time, memory = (self.total_s or self.time_per_token_s).value, self.memory_bytes.value
        if not self.prediction.time.is_known:
            time = -float(self.run.batch_size)
        if self.objective.prefer == "memory":
            return (memory, time)
        place = self.objective.place(self.run.model, self.prediction.num_params)
        if self.objective.prefer == "price":
            time *= self.run.parallel.gpus
        return (place, time, memory)


def judge(
    prediction: Prediction,
    limits: Limits,
    *,
    memory: Quantity | None = None,
    time_per_token_s: Quantity | None = None,
    total_s: Quantity | None = None,
    total_tokens: int | None = None,
    measurement: Measurement | None = None,
    failure: str = "",
    objective: Objective = LARGEST,
    form: RunConfig | None = None,
    serving_gpus: int = 1,
) -> Candidate:
    """Apply `limits` and the device's own memory to one candidate.

    Args:
        memory, time_per_token_s: the posterior of a candidate that was not measured; without them,
            the prediction alone counts.
        total_s: time of the whole fine-tuning, measured as soon as its profile is.
        serving_gpus: whose memory together an inference may take.
        total_tokens: what that time is over, padding included; the time per token is then of the
            same batches, not of the longest one or of those that were profiled.

    A target that is only an amount of memory has no time, whatever the posterior is.
    """
    if not prediction.time.is_known:
        time_per_token_s = total_s = None
    if measurement is not None and measurement.outcome != "ok":
        failure = f"{measurement.outcome}: {measurement.detail}".rstrip(": ")
    good = measurement if measurement is not None and measurement.outcome == "ok" else None
    if good is not None or memory is None:
        memory = _memory(prediction, good)
    time = time_per_token_s
    if good is not None or time is None:
        time = _time_per_token(prediction, good)
    if total_s is not None and total_tokens is not None:
        time = total_s.divided(total_tokens)
    serving = prediction.serving
    if serving is not None:
        failure = _failure_to_serve(serving, prediction.gpu, limits)
    training = prediction.run.phase == "finetune"
    limit_bytes = limits.finetune_bytes if training else limits.inference_bytes
    of_device, usable = "memory of the device", prediction.usable_bytes
    if serving_gpus > 1 and not training:
        of_device, usable = f"memory of {serving_gpus} devices", serving_gpus * usable
    bounds: list[tuple[str, Unit, Quantity, float | None]] = [
        (of_device, "bytes", memory, None if serving else usable),  # its share is a starting rule
        ("peak memory limit", "bytes", memory, limit_bytes),
    ]
    if total_s is not None:
        bounds.append(("total time limit", "s", total_s, limits.total_time_s))
    if not training:
        bounds.append(("time per token limit", "s", time, limits.time_per_token_s))
    checks = [
        Check(
            limit=name,
            unit=unit,
            quantity=quantity,
            bound=bound,
            chance=quantity.chance_below(bound),
        )
        for name, unit, quantity, bound in bounds
        if bound is not None
    ]
    return Candidate(
        prediction=prediction,
        memory_bytes=memory,
        time_per_token_s=time,
        total_s=total_s,
        checks=(*checks, *(() if serving is None else serving_checks(serving, limits))),
        measurement=measurement,
        failure=failure,
        objective=objective,
        form=form,
    )


def _failure_to_serve(serving: ServingPrediction, gpu: str, limits: Limits) -> str:
    """Why an engine cannot be judged at all; empty where it can."""
    if serving.starts and serving.time is None and limits.on_waits:
        return f"no times of {serving.engine} on {gpu} are known, and the plan limits them"
    if serving.starts or serving.lacks_context:
        return ""
    return serving.refusal(serving.engine)


def serving_checks(serving: ServingPrediction, limits: Limits) -> tuple[Check, ...]:
    """Whether an engine takes sequences as long and as many as it is asked to, and in time."""
    asked: list[tuple[str, Unit, int, int]] = [
        ("context", "tokens", serving.max_context, serving.context)
    ]
    if serving.concurrency > 1 or not serving.lacks_context:
        asked.append(("concurrency", "sequences", serving.max_running, serving.concurrency))
    of_size = (
        Check(
            limit=name,
            unit=unit,
            quantity=replace(_exactly(most), measured=False),
            bound=bound,
            chance=float(most >= bound),
            is_least=True,
        )
        for name, unit, most, bound in asked
    )
    return (*of_size, *(() if serving.time is None else _wait_checks(serving.time, limits)))


def _wait_checks(time: ServingTime, limits: Limits) -> Iterator[Check]:
    """The median waits of an engine's users, and whether it answers as many as arrive."""
    for name, value, (low, high), bound in (
        ("ttft limit", time.ttft_s, time.interval_ttft_s, limits.ttft_s),
        ("tpot limit", time.tpot_s, time.interval_tpot_s, limits.tpot_s),
    ):
        if bound is not None:
            quantity = Quantity(
                value=value, low=low, high=high, measured=False, confidence=time.confidence
            )
            chance = quantity.chance_below(bound)
            yield Check(limit=name, unit="s", quantity=quantity, bound=bound, chance=chance)
    if limits.requests_per_s is not None:
        yield _rate_check(time, limits.requests_per_s)


def _rate_check(time: ServingTime, rate: float) -> Check:
    """Whether requests that arrive at `rate` are answered as fast.

    Steps were timed as predicted and at both ends of their interval. What is known of the chance
    is its least value: of an end at which the queue does not grow, what lies beyond it.
    """
    share = time.requests_per_s / time.output_tokens_per_s
    low, high = (share * tokens for tokens in time.interval_output_tokens_per_s)
    beyond = (1 - time.confidence) / 2
    steps = (
        (low >= KEEPS_UP * rate, 1 - beyond),
        (not time.queue_grows, 0.5),
        (high >= KEEPS_UP * rate, beyond),
    )
    value = time.requests_per_s if time.queue_grows else max(rate, time.requests_per_s)
    return Check(
        limit="requests limit",
        unit="requests/s",
        quantity=Quantity(
            value=value,
            low=min(low, value),
            high=max(high, value),
            measured=False,
            confidence=time.confidence,
        ),
        bound=rate,
        chance=next((chance for holds, chance in steps if holds), 0.0),
        is_least=True,
    )


def _memory(prediction: Prediction, measurement: Measurement | None) -> Quantity:
    if measurement is not None and measurement.closest_peak_bytes is not None:
        return _exactly(measurement.closest_peak_bytes)
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
    if prediction.serving is not None and prediction.serving.time is not None:
        served = prediction.serving.time
        low, high = served.interval_output_tokens_per_s
        return Quantity(
            value=1 / served.output_tokens_per_s,
            low=1 / high,
            high=1 / low,
            measured=False,
            confidence=served.confidence,
        )
    if measurement is not None and measurement.generate_s:
        return _exactly(median(measurement.generate_s) / prediction.tokens_per_generation)
    if measurement is not None and measurement.step_s:
        tokens = sum(measurement.step_lengths) * run.batch_size * run.gradient_accumulation_steps
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
    for failure in failed:
        more = (
            run.batch_size >= failure.batch_size
            and run.seq_len >= failure.seq_len
            and run.prompt_len >= failure.prompt_len
            and run.max_new_tokens >= failure.max_new_tokens
        )
        if more and run == replace(
            failure,
            batch_size=run.batch_size,
            seq_len=run.seq_len,
            prompt_len=run.prompt_len,
            max_new_tokens=run.max_new_tokens,
        ):
            return failure
    return None


def least_chance(plan: Plan) -> float:
    """With which a candidate of `plan` counts as meeting its limits where nothing was measured."""
    return plan.budget.confidence if plan.profile == "none" else LIKELY


def accepted(candidate: Candidate, least: float = LIKELY) -> bool:
    """Whether `candidate` counts as meeting its limits: more likely than not, or than `least`."""
    return candidate.chance_of_both_stages >= least


def predicted_winner(candidates: Sequence[Candidate], confidence: float) -> Candidate | None:
    """Of a dry run: the best-ranked candidate that meets every limit with `confidence`.

    Another method of it counts, too, that holds no more.
    """
    meeting = [candidate for candidate in candidates if accepted(candidate, confidence)]
    best = min(meeting, key=lambda candidate: candidate.rank, default=None)
    return best and _as_small_and_better(best, candidates, confidence)


def best_of_models(candidates: Iterable[Candidate], confidence: float) -> dict[str, Candidate]:
    """By model, what `predicted_winner` is of its candidates."""
    by_model: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        by_model.setdefault(candidate.run.model, []).append(candidate)
    winners = {model: predicted_winner(alike, confidence) for model, alike in by_model.items()}
    return {model: best for model, best in winners.items() if best is not None}


def _as_small_and_better(
    best: Candidate, candidates: Iterable[Candidate], confidence: float
) -> Candidate:
    """`best`, or another method of its model and sizes that ranks before it and holds no more.

    What then tells their memory apart is the slack that the allocator happens to keep: QLoRA is as
    good as QDoRA there, which holds all that it does and more, and takes two thirds of its time.
    The doubt may be twice what `confidence` leaves, at most.
    """
    sizes = ("model", "phase", "batch_size", "seq_len", "r", "parallel")
    live_bytes = best.prediction.memory.peak_allocated_bytes
    alike = (
        candidate
        for candidate in candidates
        if all(getattr(candidate.run, name) == getattr(best.run, name) for name in sizes)
        and candidate.prediction.memory.peak_allocated_bytes <= live_bytes
        and accepted(candidate, max(LIKELY, 2 * confidence - 1))
    )
    return min((best, *alike), key=lambda candidate: candidate.rank)


def bolder_than(
    winner: Candidate | None, candidates: Sequence[Candidate], confidence: float
) -> list[Candidate]:
    """Of a dry run: what would rank before `winner` and may fit, best first."""
    bolder = [
        candidate
        for candidate in candidates
        if MIN_CHANCE <= candidate.chance_of_both_stages < confidence
        and (winner is None or candidate.rank < winner.rank)
    ]
    return sorted(bolder, key=lambda candidate: candidate.rank)


def likeliest_of_models(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Of each model the candidate that most likely meets every limit, the likeliest first."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda each: (-each.chance_of_both_stages, each.rank)):
        best.setdefault(candidate.run.model, candidate)
    return list(best.values())


def closest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Of candidates that miss the limits, the likeliest; of equally likely ones the smallest.

    Below `MIN_CHANCE` a wider interval alone would make it likely. There it is what misses the
    fewest limits, by the least factor.
    """

    def nearness(candidate: Candidate) -> tuple[float, int, float, float]:
        memory = candidate.memory_bytes.value
        if candidate.chance >= MIN_CHANCE:
            return candidate.chance, 0, 0.0, -memory
        missed = [check.excess for check in candidate.checks if check.verdict != "meets"]
        return 0.0, -len(missed), -max(missed, default=0.0), -memory

    return max(candidates, key=nearness, default=None)


def kept_models(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Models with at least one accepted inference configuration, the best ranked first."""
    serving = [candidate for candidate in candidates if accepted(candidate)]
    serving.sort(key=lambda candidate: (-candidate.prediction.num_params, candidate.run.model))
    return tuple(dict.fromkeys(candidate.run.model for candidate in serving))


def chance_to_serve(inference: Iterable[Candidate]) -> dict[RunConfig | None, float]:
    """By form in which a model is served: that of its likeliest shape to meet the limits."""
    chances: dict[RunConfig | None, float] = {}
    for candidate in inference:
        chances[candidate.form] = max(candidate.chance, chances.get(candidate.form, 0.0))
    return chances


def rejected_before(winner: Candidate | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that would rank before `winner` had they met the limits, best first.

    Those that are predicted to meet them and were not worth a run are among them.
    """
    before = [
        candidate
        for candidate in candidates
        if (winner is None or candidate.rank < winner.rank)
        and not (candidate.measured and candidate.verdict == "meets")
    ]
    return sorted(before, key=lambda candidate: candidate.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The smallest change of one limit alone that would make something fit.

    Args:
        check: the limit as it is, and the quantity that it would have to reach.
        candidate: what would fit then.
    """

    check: Check
    candidate: Candidate


def relaxations(candidates: Iterable[Candidate]) -> list[Relaxation]:
    """For every limit that alone keeps some candidate out, the one that misses it least.

    The memory of the device is a limit like the others: to relax it is to take a larger device.
    """
    closest: dict[str, Relaxation] = {}
    for candidate in candidates:
        missed = [check for check in candidate.checks if check.chance < LIKELY]
        # the device and the user's limit bound the same memory: the tighter one names it
        missed.sort(key=lambda check: (check.is_least, check.bound))
        if candidate.failure or len({check.quantity for check in missed}) != 1:
            continue
        check = missed[0]
        best = closest.get(check.limit)
        if best is None or check.excess < best.check.excess:
            closest[check.limit] = Relaxation(check=check, candidate=candidate)
    return list(closest.values())
