"""Published times beside ours: cold, and by fits to the other groups.

No fit sees the group that it predicts, nor does the scale of its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

import published
from published import MEMORY, Observation, Quantity, gpu_of, records
from whichlora.calibration.fit_time import fit_phases, sharpened
from whichlora.calibration.load import model_of
from whichlora.calibration.regression import conformal_scale
from whichlora.calibration.samples import Sample, time_samples
from whichlora.predict.coefficients import TIME_PHASES
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.quantities import forward_features, step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.results import Measurement
from whichlora.spec.run import TRANSFORMERS
from whichlora.timing import model as timing
from whichlora.timing.model import TimeModel

MOST_DEVICE = 0.6
DECODED: tuple[Quantity, ...] = ("generate_s", "token_s")  # a whole generation, one of its steps
Timed = tuple[str, dict[str, float], int]  # phase, features, how often it runs


def timed_parts(one: Observation, gpu: GpuSpec | None = None) -> list[Timed]:
    """The phases whose seconds add up to what was measured, on `gpu` instead of its own."""
    gpu = gpu or gpu_of(one.gpu)
    if one.quantity in ("step_s", "forward_backward_s"):
        step = step_features(resolve(one.model, one.run, gpu))
        if one.quantity == "forward_backward_s":
            step["optimizer"] = 0.0
        return [("finetune", step, 1)]
    run = one.run
    if one.quantity == "forward_s":
        run = replace(run, phase="inference", prompt_len=run.seq_len, max_new_tokens=1)
    job = resolve(one.model, run, gpu)
    prefill = ("prefill", forward_features(job, context=run.prompt_len, decoding=False), 1)
    steps = run.max_new_tokens - 1
    if one.quantity not in DECODED or not steps:
        return [prefill]
    context = run.prompt_len + max(1, steps // 2)
    step = forward_features(job, context=context, decoding=True)
    if one.quantity == "token_s":
        return [("decode", step, 1)]
    return [prefill, ("decode", step, steps)]


@dataclass(frozen=True, slots=True)
class Cold:
    """A published run beside datasheet and priors; error and stated deviation as logs.

    Args:
        phase: the last part, which takes nearly all of the time.
        deviation: as the priors state it; no published run scaled it.
    """

    observation: Observation
    phase: str
    error: float
    deviation: float


@cache
def cold_runs() -> tuple[Cold, ...]:
    """Every published time beside what is predicted without any run."""
    found = []
    for one in timed_observations():
        total = spread = 0.0
        phase = ""
        for phase, features, times in timed_parts(one):
            model = timing.prior_model(gpu_of(one.gpu), phase)
            seconds = times * float(timing.seconds(model, features)[0])
            spread += seconds * timing.log_deviation(model, features, seconds / times)
            total += seconds
        found.append(Cold(one, phase, math.log(total / one.value), spread / total))
    return tuple(found)


def kernel_seconds() -> dict[tuple[str, str], list[float]]:
    """Seconds per launch of decoding steps in which the host decides, by source and GPU.

    Unquantised ones, whose kernels are the traced ones; the device as the priors have it takes at
    most `MOST_DEVICE` of the host's time.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for one in timed_observations():
        if one.quantity not in DECODED or one.run.kv_cache == "vllm" or one.run.quant != "none":
            continue
        gpu = gpu_of(one.gpu)
        phase, features, times = timed_parts(one)[-1]
        model = timing.prior_model(gpu, phase)
        host_s = model.mean["launch"] * features["launch"]
        alone = timing.seconds(model, features | {"launch": 0.0})[0]
        if phase == "decode" and float(alone) < MOST_DEVICE * host_s:
            by_source = found.setdefault((one.source, one.gpu), [])
            by_source.append(one.value / times / features["launch"])
    return found


def _scale(errors: Sequence[float], deviations: Sequence[float]) -> float:
    found = conformal_scale(np.array(errors), np.array(deviations), TIME_CONFIDENCE)
    assert found is not None, "too few errors"
    return found


def is_inside(one: Cold) -> bool:
    """Whether the interval that the priors state holds `one`."""
    return abs(one.error) <= TWO_SIDED_Z[TIME_CONFIDENCE] * one.deviation


@dataclass(frozen=True, slots=True)
class TimeSample:
    observation: Observation
    group: str
    sample: Sample

    @property
    def teaches(self) -> bool:
        """Whether a fit learns from it, as the shipped ones do."""
        untaught = (*records.ONE_SHAPE, *records.UNDATED)
        return not self.observation.waits and self.observation.source not in untaught


def samples_of(
    observations: Iterable[Observation], phase: str, group: Callable[[Observation], str]
) -> list[TimeSample]:
    """One sample per observation; the prompt pass of a generation, a few per cent, is inside."""
    return [
        TimeSample(one, group(one), Sample(one.model.name, features, one.value / times))
        for one in observations
        for found, features, times in timed_parts(one)
        if found == phase
    ]


Fit = Callable[[Sequence[TimeSample], str, GpuSpec], TimeModel]


def _shipped_form(kept: Sequence[TimeSample], phase: str, gpu: GpuSpec) -> TimeModel:
    return fit_phases({phase: [one.sample for one in kept]}, gpu)[phase]


def _errors(model: TimeModel, held: Sequence[TimeSample]) -> list[tuple[float, float]]:
    """Log errors of `held` and the deviations stated for them, before any scale."""
    model = replace(model, interval_scale=1.0)
    found = []
    for one in held:
        seconds = float(timing.seconds(model, one.sample.features)[0])
        deviation = timing.log_deviation(model, one.sample.features, seconds)
        found.append((math.log(seconds / one.sample.value), deviation))
    return found


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Errors of one group that no fit saw, and the intervals stated for it, both as logs."""

    group: str
    errors: tuple[float, ...]
    half_widths: tuple[float, ...]


def leave_one_out(
    samples: Sequence[TimeSample], phase: str, fit: Fit = _shipped_form
) -> Iterator[HeldOut]:
    """Each group predicted from all others; its interval from how they predict each other."""
    groups = sorted({one.group for one in samples})

    @cache
    def without(left_out: frozenset[str], gpu_key: str) -> TimeModel:
        kept = [one for one in samples if one.group not in left_out and one.teaches]
        return fit(kept, phase, gpu_of(gpu_key))

    held = {group: [one for one in samples if one.group == group] for group in groups}
    for group in groups:
        gpu_key = held[group][0].observation.gpu
        inner = [
            pair
            for other in groups
            if other != group
            for pair in _errors(without(frozenset({group, other}), gpu_key), held[other])
        ]
        reach = TWO_SIDED_Z[TIME_CONFIDENCE] * _scale(*zip(*inner, strict=True))
        model = without(frozenset({group}), gpu_key)
        errors, deviations = zip(*_errors(model, held[group]), strict=True)
        yield HeldOut(group, errors, tuple(reach * one for one in deviations))


def _short(one: Observation) -> str:
    return one.model.name.rpartition("/")[2]


def _gpu(one: Observation) -> str:
    return one.gpu


HELD_OUT: dict[str, tuple[tuple[Quantity, ...], str, str, Callable[[Observation], str]]] = {
    "Training step on A100, a model never measured": (("step_s",), "a100", "finetune", _short),
    "Prompt pass on A100, a model never measured": (("prefill_s",), "a100", "prefill", _short),
    "Decoding with transformers on A100, a model never measured": (
        DECODED,
        "a100",
        "decode",
        _short,
    ),
    "Forward and backward, a GPU never measured": (
        ("forward_backward_s",),
        "",
        "finetune",
        _gpu,
    ),
    "Forward in fp32, a GPU never measured": (("forward_s",), "", "prefill", _gpu),
}


def timed_observations() -> list[Observation]:
    return [
        one
        for one in published.read_all()
        if isinstance(one, Observation) and one.quantity not in MEMORY
    ]


def time_rows(title: str) -> list[TimeSample]:
    """What one table of `HELD_OUT` is about."""
    quantities, gpu, phase, group = HELD_OUT[title]
    chosen = [
        one
        for one in timed_observations()
        if one.quantity in quantities and one.gpu.startswith(gpu) and one.run.kv_cache != "vllm"
    ]
    return samples_of(chosen, phase, group)


@cache
def held_out(title: str) -> tuple[HeldOut, ...]:
    """The rows of one table of `HELD_OUT`."""
    return tuple(leave_one_out(time_rows(title), HELD_OUT[title][2]))


@dataclass(frozen=True, slots=True)
class Regime:
    """A published run beside a fit to all other sources: log error, half width of its interval.

    Args:
        name: what decides its time, and how much work it is.
        cold: log error of datasheet and priors.
    """

    observation: Observation
    phase: str
    name: str
    cold: float
    error: float
    half_width: float

    @property
    def is_inside(self) -> bool:
        return abs(self.error) <= self.half_width


SHORT_TOKENS = 4096  # of a batch, below which products are small


def regime_of(one: Observation) -> str:
    """The first of these that holds: bound by launches, quantised, few tokens, many."""
    phase, features, _ = timed_parts(one)[-1]
    if timing.deciding(timing.prior_model(gpu_of(one.gpu), phase), features)["launch"] > 0:
        return "launch-bound"
    if one.run.quant not in ("none", None):
        return "quantised"
    if phase == "decode":
        return "16 or 32 bit"
    reads = phase == "prefill" and one.quantity != "forward_s"
    tokens = one.run.batch_size * (one.run.prompt_len if reads else one.run.seq_len)
    return f"{'below' if tokens < SHORT_TOKENS else 'from'} {SHORT_TOKENS} tokens"


def _whole(one: Observation, models: Mapping[str, TimeModel]) -> tuple[float, float]:
    """Log error of the whole of `one`, and its stated deviation."""
    total = spread = 0.0
    for phase, features, times in timed_parts(one):
        seconds, _, deviation = timing.pass_time(models[phase], features)
        total += times * float(seconds)
        spread += times * float(seconds) * float(deviation)
    return math.log(total / one.value), spread / total


@cache
def sources_left_out(key: str = "a100-sxm-80gb") -> tuple[Regime, ...]:
    """Every published time under transformers on one GPU, by the runs of all other sources."""
    gpu = gpu_of(key)
    rows = []
    for one in timed_observations():
        if gpu_of(one.gpu).key == key and one.run.engine == TRANSFORMERS:
            phase, features, times = timed_parts(one)[-1]
            libraries = [each for each in one.run.libraries if each[0] != "exllama"]
            stack = f"{one.source} {libraries}"
            name = f"{one.source}:{one.line}"
            sample = Sample(one.model.name, features, one.value / times, name, {}, True, stack)
            rows.append((one, phase, sample))
    priors = {phase: timing.prior_model(gpu, phase) for phase in TIME_PHASES}
    found = []
    for source in sorted({one.source for one, _, _ in rows}):
        kept: dict[str, list[Sample]] = {phase: [] for phase in TIME_PHASES}
        for one, phase, sample in rows:
            if one.source != source and not one.waits:
                kept[phase].append(sample)
        models = {
            phase: sharpened(model, kept, gpu, phase)[0] if len(kept[phase]) >= 3 else model
            for phase, model in fit_phases(kept, gpu).items()
        }
        for one, phase, _ in rows:
            if one.source == source:
                cold, _ = _whole(one, priors)
                error, deviation = _whole(one, models)
                half_width = TWO_SIDED_Z[TIME_CONFIDENCE] * deviation
                found.append(Regime(one, phase, regime_of(one), cold, error, half_width))
    return tuple(found)


def _versions(measurement: Measurement) -> str:
    return f"{measurement.provenance['table']} {measurement.config['libraries']}"


SHIPPED: dict[str, Callable[[Measurement], str]] = {
    "model": lambda measurement: str(measurement.config["model"]),
    "library versions": _versions,
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One published run: log errors of datasheet and calibration, and the latter's half width."""

    gpu: str
    phase: str
    cold: float
    calibrated: float
    half_width: float


@cache
def shipped_samples() -> tuple[tuple[Measurement, str, Sample], ...]:
    """What each record of the shipped databases tells of one phase."""
    return tuple(
        (one, phase, sample)
        for key, measured in records.records()[0].items()
        for one in measured
        for phase, samples in time_samples(
            resolve(model_of(one), one.run, gpu_of(key)), one
        ).items()
        for sample in samples
    )


def shipped(group: Callable[[Measurement], str]) -> Iterator[Judged]:
    """Each record of the shipped databases, predicted by a calibration to the other groups."""
    grouped = [(one.gpu, phase, group(one), sample) for one, phase, sample in shipped_samples()]
    for key, phase, name in sorted({row[:3] for row in grouped}):
        here = [row for row in grouped if row[:2] == (key, phase)]
        cold = timing.prior_model(gpu_of(key), phase)
        kept = [sample for _, _, other, sample in here if other != name]
        model = fit_phases({phase: kept}, gpu_of(key))[phase]
        if len(kept) >= 3:  # noise and interval scale of left-out runs
            model = sharpened(model, {phase: kept}, gpu_of(key), phase)[0]
        for sample in (sample for _, _, other, sample in here if other == name):
            seconds = float(timing.seconds(model, sample.features)[0])
            alone = float(timing.seconds(cold, sample.features)[0])
            deviation = timing.log_deviation(model, sample.features, seconds)
            yield Judged(
                key,
                phase,
                math.log(alone / sample.value),
                math.log(seconds / sample.value),
                TWO_SIDED_Z[TIME_CONFIDENCE] * deviation,
            )
