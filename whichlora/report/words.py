"""Runs, checks and times in words."""

from __future__ import annotations

from whichlora.methods import get_method
from whichlora.results import Measurement, Prediction
from whichlora.search import Candidate, Check
from whichlora.specs import RunConfig
from whichlora.units import format_bytes, format_seconds


def variant(run: RunConfig) -> str:
    """What distinguishes a run beside its model and shape."""
    if run.phase == "inference":
        return f"inference, {run.kv_cache} cache"
    return run.method if run.method == "full" else f"{run.method} r={run.r}"


def describe(run: RunConfig) -> str:
    """One line that names a candidate."""
    name = run.model.split("/")[-1]
    if run.phase == "inference":
        return (
            f"{name} inference, batch {run.batch_size}, prompt {run.prompt_len}, "
            f"{run.max_new_tokens} new tokens"
        )
    rank = "" if get_method(run.method).trains_base else f" r={run.r}"
    return f"{name} {run.method}{rank}, batch {run.batch_size}, {run.seq_len} tokens"


def times(prediction: Prediction, measurement: Measurement) -> list[tuple[str, float, float]]:
    """Name, predicted and measured seconds of every time that was measured."""
    from statistics import median

    time = prediction.time
    found: list[tuple[str, float, float]] = []
    if measurement.step_s and time.step_s:
        longest = max(measurement.batch_seq_len, default=prediction.run.seq_len)
        lengths = measurement.batch_seq_len or (longest,) * len(measurement.step_s)
        at_longest = [
            step
            for width, step in zip(lengths, measurement.step_s, strict=True)
            if width == longest
        ]
        found.append(("step", time.step_s, median(at_longest)))
    if measurement.prefill_s and time.prefill_s:
        found.append(("prefill", time.prefill_s, median(measurement.prefill_s)))
    if measurement.decode_s_per_token and time.decode_s_per_token:
        found.append(("decode", time.decode_s_per_token, median(measurement.decode_s_per_token)))
    return found


def reason(check: Check) -> str:
    """One limit in words: the value, the bound, and where the value is from."""
    show = format_bytes if check.unit == "bytes" else format_seconds
    quantity = check.quantity
    how = "measured" if quantity.measured else "predicted"
    text = f"{how} {show(quantity.value)} against {check.limit} {show(check.bound)}"
    if not quantity.measured:
        text += f" ({check.chance:.0%} chance to meet it)"
    return text


def deciding(candidate: Candidate) -> str:
    """Why a candidate does not meet the limits, in one line."""
    if candidate.failure:
        return candidate.failure
    failing = [check for check in candidate.checks if check.verdict != "meets"]
    if not failing:
        return ""
    return reason(min(failing, key=lambda check: check.chance))
