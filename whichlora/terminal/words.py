"""Checks, answers and times in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whichlora.predict.notes import says_whence
from whichlora.predict.parallel_choice import ON_CHOICE
from whichlora.predict.words import describe, gpus_in_words, kind, on_gpus
from whichlora.search.feasibility import Candidate, Check, Relaxation
from whichlora.spec.parallel import AUTO, ParallelConfig
from whichlora.spec.results import Measurement, Prediction, Refused
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from whichlora.spec.plan import Plan
    from whichlora.workflow.answer import Search


def variant(run: RunConfig, plan: Plan | None = None) -> str:
    """Method or serving form of a run and its GPUs: what its model and shape do not say.

    Args:
        plan: settings with several values in it are named, too.
    """
    training = run.phase == "finetune"
    words = [kind(run)]
    if not run.parallel.is_one_device:
        words.append(on_gpus(run.parallel))
    elif training and plan is not None and plan.is_spread:
        words.append(gpus_in_words(1))
    if plan is None:
        return ", ".join(words)
    if len(plan.attn) > 1:
        words.append(run.attn)
    if training and len(plan.optimizers) > 1:
        words.append(run.optimizer)
    if training and len(plan.gradient_checkpointing) > 1 and not run.gradient_checkpointing:
        words.append("no checkpointing")
    return ", ".join(words)


def variants(runs: Sequence[RunConfig], devices: Sequence[str]) -> list[str]:
    """`kind` of each run, with the settings in which runs differ whose rows would look alike.

    Args:
        devices: the device of each.
    """
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    flat = [_flat(run) for run in runs]
    for run, settings, device in zip(runs, flat, devices, strict=True):
        spread = (run.parallel.gpus, run.parallel.in_words)
        sizes = (run.batch_size, run.lengths, run.seq_len, run.prompt_len, run.max_new_tokens)
        looks = (device, run.model, kind(run), run.trainer, *spread, *sizes)
        alike.setdefault(looks, []).append(settings)
    differing = ["trainer"] if len({run.trainer for run in runs}) > 1 else []
    differing += [
        name
        for name in dict.fromkeys(name for settings in flat for name in settings)
        if any(
            settings.get(name) != group[0].get(name)
            for group in alike.values()
            for settings in group
        )
    ]
    return [
        ", ".join(
            [
                kind(run),
                *(_in_words(name, settings[name]) for name in differing if name in settings),
            ]
        )
        for run, settings in zip(runs, flat, strict=True)
    ]


def _flat(run: RunConfig) -> dict[str, Any]:
    """The settings of `run`, the options of its strategy, method and trainer beside the others."""
    settings = run.to_dict()
    for name in ("parallel", "method_options", "trainer_options", "serving_options"):
        settings |= settings.pop(name, {})
    return settings


def _in_words(setting: str, value: Any) -> str:
    texts = {True: "yes", False: "no", None: "none"}
    text = texts[value] if value is None or isinstance(value, bool) else value
    if isinstance(text, list):
        text = "+".join(map(str, text)) or "none"
    return f"{setting.replace('_', ' ')} {text}"


def shared_notes(predictions: Sequence[Prediction]) -> list[str]:
    """The notes of all, once each, those last that say where facts are from.

    Those on the choice of a strategy are only of one prediction.
    """
    notes = dict.fromkeys(note for prediction in predictions for note in prediction.notes)
    if len(predictions) > 1:
        notes = {note: None for note in notes if not note.startswith(ON_CHOICE)}
    return sorted(notes, key=says_whence)


def times(prediction: Prediction, measurement: Measurement) -> list[tuple[str, float, float]]:
    """Name, predicted and measured seconds of every time that was measured."""
    from statistics import median

    time = prediction.time
    rows: list[tuple[str, float, float]] = []
    if measurement.step_s and time.step_s:
        lengths = measurement.step_lengths
        steps = zip(lengths, measurement.step_s, strict=True)
        at_longest = [step_s for length, step_s in steps if length == max(lengths)]
        rows.append(("step", time.step_s, median(at_longest)))
    if measurement.prefill_s and time.prefill_s:
        rows.append(("prefill", time.prefill_s, median(measurement.prefill_s)))
    if measurement.decode_s_per_token and time.decode_s_per_token:
        rows.append(("decode", time.decode_s_per_token, median(measurement.decode_s_per_token)))
    return rows


def in_unit(check: Check, value: float) -> str:
    """`value` in the unit of `check`."""
    if check.unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if check.unit == "s" else f"{value:,.6g} {check.unit}"


def reason(check: Check) -> str:
    """One limit in words: the value, the bound, and where the value is from."""
    quantity = check.quantity
    how = "measured" if quantity.measured else "predicted"
    value, bound = in_unit(check, quantity.value), in_unit(check, check.bound)
    text = f"{how} {value} against {check.limit} {bound}"
    if not quantity.measured:
        text += f" ({check.chance:.0%} chance to meet it)"
    return text


def relaxed(relaxation: Relaxation) -> str:
    """The value that one limit would need, and the candidate that then meets it."""
    check = relaxation.check
    how = "measured" if check.quantity.measured else "predicted"
    more = check.quantity.value / check.bound - 1
    value, bound = in_unit(check, check.quantity.value), in_unit(check, check.bound)
    return (
        f"{check.limit} {value} instead of {bound} ({more:+.0%}) "
        f"would do for {describe(relaxation.candidate.run)} ({how})"
    )


def refusals(refused: Sequence[Refused], most: int = 4) -> list[str]:
    """A line for each reason, with the combinations that it refused."""
    several_gpus = len({combination.gpu for combination in refused}) > 1
    groups: dict[str, dict[str, None]] = {}
    for combination in refused:
        gpu = combination.gpu if several_gpus else ""
        why = without_key(combination.reason, gpu) if gpu else combination.reason
        groups.setdefault(why, {})[_combination(combination, gpu)] = None
    lines = []
    for why, names in groups.items():
        shown = ", ".join(list(names)[:most])
        more = f" and {len(names) - most} more" if len(names) > most else ""
        lines.append(f"left out: {shown}{more}: {why}")
    return lines


def without_key(text: str, key: str) -> str:
    """`text` without the name of the accelerator that it is about; a10-24gb is none of 24gb."""
    return re.sub(rf"(?<![\w-]){re.escape(key)}(?![\w-])", "it", text)


def _combination(refused: Refused, gpu: str) -> str:
    words = [refused.model.rpartition("/")[2]]
    if refused.settings.get("phase") == "inference":
        words.append("inference")
    elif "method" in refused.settings:
        words.append(str(refused.settings["method"]))
    parallel = refused.settings.get("parallel")
    if isinstance(parallel, Mapping):
        words.append(on_gpus(ParallelConfig.from_dict(parallel)))
    elif refused.settings.get("gpus"):
        words.append(f"{parallel or AUTO} on {gpus_in_words(refused.settings['gpus'])}")
    if gpu:
        words.append(f"on {gpu}")
    return " ".join(words)


_STOPPED_BY = {
    "certain": "as sure as asked",
    "runs": "the budget of runs is spent",
    "device_s": "the budget of device time is spent",
    "nothing left": "no run could make it surer",
    "everything measured": "everything was measured",
    "under way": "other runs are still to come",
}


def certainty(search: Search, *, has_winner: bool) -> str:
    """How sure the answer is, why it stopped there, and what that cost."""
    claim = "no other candidate beats it" if has_winner else "nothing meets every limit"
    # a thousand posterior samples cannot tell 99 % from certainty
    sure = "over 99%" if search.confidence > 0.99 else f"{search.confidence:.0%}"
    runs = "1 run" if search.runs == 1 else f"{search.runs} runs"
    if search.stopped_by == "not measured":
        if search.runs:  # of several GPUs, whose inference is not measured: nothing is certain
            return f"{runs} measured; inference is predicted"
        return f"nothing was measured; {sure} sure that {claim}"
    return (
        f"{sure} sure that {claim}; {_STOPPED_BY[search.stopped_by]}, after {runs} "
        f"and {format_seconds(search.device_s)} on the device"
    )


def deciding(candidate: Candidate) -> str:
    """Why a candidate does not meet the limits, in one line."""
    if candidate.failure:
        return candidate.failure
    failing = [check for check in candidate.checks if check.verdict != "meets"]
    if not failing:
        return ""
    return reason(min(failing, key=lambda check: check.chance))
