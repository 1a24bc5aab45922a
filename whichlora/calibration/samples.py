"""Measured runs → samples of a fit: features, the measured value, and the run they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from whichlora.memory.training import PARTS
from whichlora.predict.judgement import ALLOCATED_PARTS, allocated_bytes
from whichlora.predict.quantities import (
    features_by_length,
    forward_features,
    mean_context,
    run_moments,
    step_features,
)
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.results import Measurement
from whichlora.timing import model as timing
from whichlora.timing.model import prior_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_LEAST_GROUPS = 3
_MOST_PROMPT = 0.3  # of a generation whose parts were not timed; beyond it, nothing is learned


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation: features, the measured value, and the model it belongs to.

    Args:
        record: id of the measurement it is from.
        shape: the settings whose range bounds where the fit is valid.
        older: measured on other library versions than the current ones, or on another machine;
            `stack` names these, and who measured.
    """

    group: str
    features: Mapping[str, float]
    value: float
    record: str = ""
    shape: Mapping[str, float] = field(default_factory=dict)
    older: bool = False
    stack: str = ""


def matrix(samples: Sequence[Sample], names: Sequence[str]) -> tuple[Array, Array]:
    """Features, shape [num_samples, num_names], and the measured values."""
    import numpy as np

    rows = [[sample.features[name] for name in names] for sample in samples]
    features = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return features, np.array([sample.value for sample in samples], dtype=np.float64)


def judged(samples: Sequence[Sample]) -> list[int]:
    """The samples that tell how good a fit is: of the current versions where there are any."""
    current = [i for i, sample in enumerate(samples) if not sample.older]
    return current or list(range(len(samples)))


def groups_of(samples: Sequence[Sample]) -> list[str]:
    """Groups of a cross-validation: by software, by model, or by run: the first with three or more.

    Older runs are of software that the next prediction is not of. Where there are fewer than three
    runs, each sample is a group.
    """
    for labels in (
        [sample.stack for sample in samples],
        [sample.group for sample in samples],
        [sample.record for sample in samples],
    ):
        if len(set(labels)) >= _LEAST_GROUPS:
            return labels
    return [str(number) for number in range(len(samples))]


def time_samples(job: ResolvedRun, measurement: Measurement) -> dict[str, list[Sample]]:
    """Observations by phase in one measurement: the median of its repetitions.

    Work is that of a board set to the power that the measurement had. A step on several GPUs gives
    none: it waits for messages, which are no rate of the device.
    """
    samples: dict[str, list[Sample]] = {}
    if job.layout is not None:
        return samples
    job = replace(job, gpu=measurement.as_set(job.gpu))

    def add(phase: str, features: dict[str, float], seconds: list[float], length: int) -> None:
        sample = _sample(job, measurement, features, median(seconds), length)
        samples.setdefault(phase, []).append(sample)

    if measurement.step_s:
        by_length: dict[int, list[float]] = {}
        for length, step_s in zip(measurement.step_lengths, measurement.step_s, strict=True):
            by_length.setdefault(length, []).append(step_s)
        rows = features_by_length(lambda length: step_features(job, seq_len=length), by_length)
        for length, times in by_length.items():
            add("finetune", rows[length], times, length)
    prompt = job.run.prompt_len
    if measurement.prefill_s:
        features = forward_features(job, context=prompt, decoding=False)
        add("prefill", features, list(measurement.prefill_s), prompt)
    if measurement.decode_s_per_token:
        context = mean_context(prompt, job.run.max_new_tokens)
        features = forward_features(job, context=context, decoding=True)
        add("decode", features, list(measurement.decode_s_per_token), context)
    elif measurement.generate_s and job.run.max_new_tokens > 1 and job.model.can_generate:
        context, steps = mean_context(prompt, job.run.max_new_tokens), job.run.max_new_tokens - 1
        whole = median(measurement.generate_s)
        first = _first_token_s(job)
        if first < _MOST_PROMPT * whole:
            features = forward_features(job, context=context, decoding=True)
            add("decode", features, [(whole - first) / steps], context)
    return samples


def _first_token_s(job: ResolvedRun) -> float:
    """Seconds of the prompt pass as the datasheet and priors have it."""
    features = forward_features(job, context=job.run.prompt_len, decoding=False)
    return float(timing.seconds(prior_model(job.gpu, "prefill"), features)[0])


def _sample(
    job: ResolvedRun,
    measurement: Measurement,
    features: Mapping[str, float],
    value: float,
    length: int,
) -> Sample:
    shape = {"batch_size": job.run.batch_size, "tokens": length}
    older = bool(job.run.libraries)  # a run names its versions where they are not the current ones
    stack = stack_of(measurement) if older else ""
    return Sample(job.run.model, features, value, measurement.id, shape, older, stack)


def as_elsewhere(sample: Sample, measurement: Measurement) -> Sample:
    """`sample` of `measurement`, which is of another machine, whose host is not this one's."""
    return replace(sample, older=True, stack=stack_of(measurement))


def stack_of(measurement: Measurement) -> str:
    """The software and machine of a run: the libraries that it names, and who ran it.

    Which of exllama's kernels run is a choice on one host, as the quantisation itself is.
    """
    who = measurement.provenance.get("publisher") or measurement.environment.get("platform", "")
    libraries = (
        f"{name} {version}" for name, version in measurement.run.libraries if name != "exllama"
    )
    return ", ".join(filter(None, (str(who), *libraries)))


def memory_samples(job: ResolvedRun, measurement: Measurement) -> list[Sample]:
    """Parts of the largest moment against the measured counters, one sample each."""
    moments, _ = run_moments(job)
    if job.run.phase == "finetune":  # a profile forgets its loading
        moments.pop("loading", None)
    peak = max(moments.values(), key=allocated_bytes)
    parts = {name: float(peak[name]) for name in PARTS}
    none = dict.fromkeys(PARTS, 0.0)
    live = none | {name: parts[name] for name in ALLOCATED_PARTS}
    run = job.run
    length = run.seq_len if run.phase == "finetune" else run.prompt_len + run.max_new_tokens
    counters = (
        (measurement.peak_allocated_bytes, live),
        (measurement.peak_reserved_bytes, live | {"allocator": parts["allocator"]}),
        (measurement.device_used_bytes, parts),
    )
    return [
        _sample(job, measurement, features, float(measured), length)
        for measured, features in counters
        if measured
    ]
