"""Measurements that no device can have made: faster than its datasheet, smaller than its weights.

A record that passes may still be wrong; that is for the fit's weights to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from whichlora.memory.weights import weight_bytes
from whichlora.predict.quantities import forward_features, step_features
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.units import format_bytes, format_seconds

# Boost clocks pass the datasheet's by up to a tenth, and autograd spares up to a tenth of the
# products that we count (`docs/time.md`); together a true run comes no nearer to the roofline.
_ROOFLINE_SLACK = 0.8
_GUESS_SLACK = 1e-3  # where the peak is a guess: what is still faster is a slipped unit
_WEIGHTS_SLACK = 0.97  # formats and tied tensors that a config does not tell
_MEMORY_SLACK = 1.02  # boards of one name differ by what their driver keeps
_MOST_GPUS = 16  # of one machine, whose buffers a log may add up
_CACHE_BYTES = 128 * 2**20  # of a device whose file does not say: no GPU's L2 is larger


def impossible(measurement: Measurement, model: ModelSpec, gpu: GpuSpec) -> str:
    """Why `gpu` can't have measured this; empty where it can.

    Raises:
        ConfigError: settings that exclude each other.
    """
    if measurement.outcome != "ok":
        return ""
    job = resolve(model, measurement.run, gpu)
    return next(_faults(job, measurement), "")


def _faults(job: ResolvedRun, measurement: Measurement) -> Iterator[str]:
    if measurement.step_s and job.run.phase != "finetune":
        yield "step_s: is of fine-tuning, the run is an inference"
    parts = weight_bytes(job.model, job.dtypes)
    # tables of positions are as long as the config says, and an alias may have fewer
    weights = sum(parts.values()) - parts["buffers"]
    if _has_quantised_experts(job):
        # whether the experts are quantised too depends on versions that a table rarely states
        weights = job.model.loaded_params * _code_bits(job.dtypes.quant) // 8
    on_cpu = job.gpu.is_cpu  # its peak is a guess, and its memory is the host's
    yield from _faults_of_log(job, measurement)
    for field in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
        size = getattr(measurement, field)
        if size is None:
            continue
        if size < _WEIGHTS_SLACK * weights:
            yield f"{field}: {format_bytes(size)} is less than the weights, {format_bytes(weights)}"
        if size > _MEMORY_SLACK * job.gpu.memory_bytes and not on_cpu:
            total = format_bytes(job.gpu.memory_bytes)
            yield f"{field}: {format_bytes(size)} is more than {job.gpu.key} has, {total}"
    slack = _ROOFLINE_SLACK
    if on_cpu or _has_quantised_experts(job) or weights < (job.gpu.l2_bytes or _CACHE_BYTES):
        slack = _GUESS_SLACK  # weights in a cache are read faster than the memory's bandwidth
    for field, seconds, floor in _times(_at_best(job), measurement):
        if seconds < slack * floor:
            yield (
                f"{field}: {format_seconds(seconds)} is faster than the datasheet of "
                f"{job.gpu.key} allows, {format_seconds(floor)}"
            )


def _faults_of_log(job: ResolvedRun, measurement: Measurement) -> Iterator[str]:
    """What no start of the engine can have printed and gone on."""
    lines = {line.states: line for line in job.engine.log.lines} if job.engine.log else {}
    has = job.gpu.memory_bytes
    for name, value in measurement.engine_log.items():
        of_bytes, line = name.endswith("_bytes"), lines.get(name)
        shown = format_bytes(value) if of_bytes else f"{value:,.6g}"
        if value < 0 and not (line and line.is_difference):
            yield f"{name}: {shown} is below 0, with which {job.engine.name} does not start"
        gpus = _MOST_GPUS if line and line.adds_up else 1
        if of_bytes and value > gpus * _MEMORY_SLACK * has and not job.gpu.is_cpu:
            cards = f"{job.gpu.key} has" if gpus == 1 else f"{gpus} of {job.gpu.key} have"
            yield f"{name}: {shown} is more than {cards}, {format_bytes(gpus * has)}"


def _has_quantised_experts(job: ResolvedRun) -> bool:
    return job.dtypes.quant != "none" and job.model.has_experts


def _code_bits(quant: str) -> int:
    return 8 if "int8" in quant else 4


def _times(job: ResolvedRun, measurement: Measurement) -> Iterator[tuple[str, float, float]]:
    """Name, shortest measured time and the datasheet's time of every quantity."""
    run = job.run
    shortest: dict[int, float] = {}
    for length, seconds in zip(measurement.step_lengths, measurement.step_s, strict=False):
        shortest[length] = min(seconds, shortest.get(length, seconds))
    for length, seconds in shortest.items():
        yield "step", seconds, _products_s(step_features(job, seq_len=length))
    if measurement.prefill_s:
        features = forward_features(job, context=run.prompt_len, decoding=False)
        yield "prefill", min(measurement.prefill_s), _products_s(features)
    if measurement.decode_s_per_token and run.max_new_tokens > 1:
        features = forward_features(job, context=run.prompt_len, decoding=True)
        yield "decode_per_token", min(measurement.decode_s_per_token), _products_s(features)


def _products_s(features: Mapping[str, float]) -> float:
    """What the matrix products take at least: their arithmetic, or reading their weights."""
    return max(features["products"], features["weights"])


def _at_best(job: ResolvedRun) -> ResolvedRun:
    """The same job at the fastest peak that its libraries could choose, whatever boards sustain."""
    peaks = job.gpu.peak_flops_per_s
    rates = [peaks[dtype] for dtype in (job.dtype, "fp32", "tf32") if dtype in peaks]
    if job.dtypes.quant == "int8" and "int8" in peaks:
        rates.append(peaks["int8"])
    fastest = {**peaks, job.dtype: max(rates)}
    gpu = replace(job.gpu, peak_flops_per_s=fastest, measured_flops_per_s={}, power_w=None)
    return replace(job, gpu=gpu)
