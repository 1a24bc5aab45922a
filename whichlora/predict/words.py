"""Runs in words."""

from __future__ import annotations

from whichlora.methods import get_method
from whichlora.serving import get_engine
from whichlora.serving.form import form_in_words
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction, TrainingTotal
from whichlora.spec.run import RunConfig
from whichlora.tasks import task_of
from whichlora.units import counted, format_bytes, format_count, rows_are

VERDICTS = {"fits": "yes", "fails": "no", "undecided": "maybe"}
FITS = {"fits": "fits", "fails": "does not fit", "undecided": "may fit"}  # in a sentence


def kind(run: RunConfig) -> str:
    """Method or serving form of a run."""
    if run.phase == "finetune":
        return method_in_words(run)
    if run.has_engine:
        return f"{_engine(run)}, {form_in_words(run)}"
    task = task_of(run)
    if task is not None:
        return f"{task.name}, {form_in_words(run)}"
    stored = run.cache_format
    cache = run.kv_cache if stored is None else f"{stored.nbits}-bit {stored.backend}"
    return f"inference, {form_in_words(run)}, {cache} cache"


def _engine(run: RunConfig) -> str:
    return f"{run.serving}{on_serving_gpus(run)}"


def on_serving_gpus(run: RunConfig) -> str:
    """How many GPUs an engine divides the model over; empty on one."""
    number = get_engine(run.serving).num_gpus(run)
    return f" on {gpus_in_words(number)}" if number > 1 else ""


def method_in_words(run: RunConfig) -> str:
    """The method, and its rank if it has one."""
    return run.method if "r" in get_method(run.method).ignores else f"{run.method} r={run.r}"


def describe(run: RunConfig) -> str:
    """One line that names a candidate."""
    name = run.model.split("/")[-1]
    if run.phase == "inference" and run.has_engine:
        return (
            f"{name} served by {_engine(run)}, {form_in_words(run)}, {run.batch_size} at once, "
            f"context {run.longest_sequence}"
        )
    if run.phase == "inference":
        return (
            f"{name} inference, {form_in_words(run)}, batch {run.batch_size}, prompt "
            f"{run.prompt_len}, {run.max_new_tokens} new tokens"
        )
    text = f"{name} {method_in_words(run)}, batch {run.batch_size}, {run.lengths} tokens"
    return f"{text}, {on_gpus(run.parallel)}" if not run.parallel.is_one_device else text


def amount_in_words(total: TrainingTotal) -> str:
    """How much is learned."""
    passes = "1 epoch" if total.epochs == 1 else f"{total.epochs:g} epochs"
    words = [
        f"{counted(total.num_sequences, 'row')}, {format_count(total.num_tokens)} tokens an epoch, "
        f"the longest {total.longest:,}; {passes}"
    ]
    if total.num_truncated:
        words.append(rows_are(total.num_truncated, "cut"))
    return ", ".join(words)


def on_gpus(config: ParallelConfig) -> str:
    """The strategy and its number of GPUs."""
    return f"{config.in_words} on {gpus_in_words(config.gpus)}"


def gpus_in_words(count: int) -> str:
    """The number with its noun."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def not_started(prediction: Prediction) -> list[str]:
    """Why an engine does not start, or may not; [] where it does, or none is asked."""
    serving = prediction.serving
    if serving is None or serving.starts:
        return []
    return [serving.refusal(serving.engine, f" on {prediction.gpu}")]


def headline(prediction: Prediction) -> str:
    """What one run needs of its device, and whether it fits; of its evaluation if that decides."""
    evaluation = prediction.evaluation
    most = prediction.memory if evaluation is None else evaluation
    low, high = (format_bytes(bound) for bound in most.interval_bytes)
    when = (
        "" if evaluation is None else f" in evaluations of {counted(evaluation.batch_size, 'row')}"
    )
    return (
        f"{describe(prediction.run)} on {prediction.gpu}: {format_bytes(most.device_used_bytes)} "
        f"({low} to {high}) of {format_bytes(prediction.usable_bytes)}{when}, "
        f"{FITS[prediction.verdict]}"
    )
