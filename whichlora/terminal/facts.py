"""What the HTML report needs beside the table: limits, bytes by part, intervals, provenance."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from whichlora import __version__
from whichlora.predict.words import describe
from whichlora.search.feasibility import Candidate, Quantity, judge
from whichlora.spec.plan import Limits, Plan
from whichlora.terminal.answer import explanation, start_command
from whichlora.terminal.rows import candidate_row
from whichlora.terminal.words import times, variant

if TYPE_CHECKING:
    from whichlora.workflow.answer import Answer, Compared

LIBRARIES = (
    *("torch", "transformers", "peft", "bitsandbytes", "accelerate"),
    *("numpy", "scipy", "scikit-learn"),
)


def detailed_row(candidate: Candidate, plan: Plan | None = None) -> dict[str, Any]:
    """One candidate as `answer.json` holds it: the row of the table, and details."""
    prediction = candidate.prediction
    return candidate_row(candidate) | {
        "gpu": prediction.gpu,
        "name": describe(candidate.run),
        "variant": variant(candidate.run, plan),
        "num_trainable_params": prediction.num_trainable_params,
        "usable_bytes": prediction.usable_bytes,
        "predicted_peak_bytes": prediction.memory.device_used_bytes,
        "moment": prediction.memory.moment,
        "breakdown": {part: size for part, size in prediction.memory.breakdown.items() if size},
        "chance": candidate.chance,
        "chance_of_both_stages": candidate.chance_of_both_stages,
        **({} if prediction.serving is None else {"engine": prediction.serving.to_dict()}),
    }


def answer_facts(answer: Answer) -> dict[str, Any]:
    """What `answer.json` holds for the report, beside the candidates."""
    gpu, calibration = answer.gpu, answer.calibration
    limits = answer.plan.limits_on(gpu.key)
    facts: dict[str, Any] = {
        "explanation": explanation(answer),
        "limits": {
            "device_bytes": gpu.memory_bytes,
            "inference_bytes": limits.inference_bytes,
            "finetune_bytes": limits.finetune_bytes,
            "time_per_token_s": limits.time_per_token_s,
            "total_time_s": limits.total_time_s,
            "ttft_s": limits.ttft_s,
            "tpot_s": limits.tpot_s,
            "requests_per_s": limits.requests_per_s,
        },
        "dataset": dict(answer.dataset),
        "besides_training": None if answer.besides is None else answer.besides.to_dict(),
        "comparison": [
            row for compared in answer.compared for row in compared_quantities(compared)
        ],
        "side_by_side": [detailed_row(candidate) for candidate in answer.side_by_side],
        "provenance": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "whichlora": __version__,
            "python": platform.python_version(),
            "libraries": _installed(),
            "profile": answer.plan.profile,
            "device": {
                "key": gpu.key,
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes,
                "unverified": list(gpu.unverified),
            },
            "environments": _environments(answer.compared),
            "notes": _notes(answer),
        },
    }
    if answer.winner is not None and "job" in answer.files:
        facts["start"] = start_command(answer, python="python")
    if calibration is not None:
        facts["provenance"]["calibration"] = {
            "gpu": calibration.gpu,
            "num_records": calibration.num_records,
            "memory_runs": calibration.memory.num_runs,
            "time_runs": {phase: model.num_runs for phase, model in calibration.time.items()},
            "digest": calibration.digest,
        }
    return facts


def _notes(answer: Answer) -> list[str]:
    of_candidates = (
        note for candidate in _all_candidates(answer) for note in candidate.prediction.notes
    )
    return list(dict.fromkeys((*answer.plan.notes, *of_candidates)))


def compared_quantities(compared: Compared) -> list[dict[str, Any]]:
    """Peak and time per token of a measured run beside its predictions and their intervals.

    The measured peak is the counter closest to the device, which the limits are judged by. A
    training step is compared at its longest batch, which the prediction describes.
    """
    measured = judge(compared.after, Limits(), measurement=compared.measurement)
    if measured.failure:
        return []
    quantities = {
        "memory_bytes": measured.memory_bytes,
        "time_per_token_s": measured.time_per_token_s,
    }
    for name, step_s, at_longest_s in times(compared.after, compared.measurement):
        if name == "step":
            value = at_longest_s * compared.after.time.time_per_token_s / step_s
            quantities["time_per_token_s"] = Quantity(
                value=value, low=value, high=value, measured=True
            )
    stages = {"cold": compared.cold, "before": compared.before, "after": compared.after}
    judged = {stage: judge(prediction, Limits()) for stage, prediction in stages.items()}
    return [
        {
            "name": describe(compared.after.run),
            "model": compared.after.run.model,
            "phase": compared.after.run.phase,
            "quantity": name,
            "measured": quantity.value,
        }
        | {stage: _interval(getattr(candidate, name)) for stage, candidate in judged.items()}
        for name, quantity in quantities.items()
        if quantity.measured
    ]


def _interval(quantity: Quantity) -> dict[str, float]:
    return {
        "value": quantity.value,
        "low": quantity.low,
        "high": quantity.high,
        "confidence": quantity.confidence,
    }


def _all_candidates(answer: Answer) -> list[Candidate]:
    return [*answer.inference, *answer.finetune]


def _installed() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _environments(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Where the measurements of this run were made, each environment once."""
    environments: list[dict[str, Any]] = []
    for run in compared:
        environment = dict(run.measurement.environment)
        if environment and environment not in environments:
            environments.append(environment)
    return environments
