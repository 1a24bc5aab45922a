"""Runs become `Prediction`s: the ledger, the work and a calibration, joined."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora import timing, work
from whichlora.architecture import ModelSpec
from whichlora.calibration import Calibration, MemoryModel
from whichlora.errors import ConfigError
from whichlora.families.experts import with_expert_modules
from whichlora.memory import allocator
from whichlora.memory.generation import inference_ledger
from whichlora.memory.ledger import PARTS, Ledger, trained_params, training_ledger
from whichlora.memory.quantised_cache import check_quantisable
from whichlora.methods import Method, get_method, with_defaults
from whichlora.numeric import TWO_SIDED_Z, Count, largest
from whichlora.results import MemoryPrediction, Prediction, TimePrediction, TracedPeak, Verdict
from whichlora.specs import ALL_LINEAR, BNB_QUANTS, FP32_PRECISIONS, GpuSpec, RunConfig
from whichlora.stack import Stack, resolve_stack
from whichlora.targets import all_linears, check_saved_modules, resolve_targets

MEMORY_CONFIDENCE = 0.95
TIME_CONFIDENCE = 0.90
FLASH_CAPABILITY = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run with every default resolved against its model, method and device."""

    model: ModelSpec
    run: RunConfig
    gpu: GpuSpec
    method: Method
    stack: Stack
    targets: tuple[str, ...]

    @property
    def peft_targets(self) -> str | tuple[str, ...]:
        """What PEFT is told: its own word for all linears, which also finds experts, or names."""
        return ALL_LINEAR if self.run.target_modules == (ALL_LINEAR,) else self.targets

    @property
    def dtype(self) -> str:
        """Dtype of the matrix products, as the datasheet names it."""
        return self.run.precision[:4]


def resolve(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Job:
    """Fill in what the method, the model and the device decide.

    Raises:
        ConfigError: settings that exclude each other.
    """
    method = get_method(run.method)
    run = with_defaults(run)
    quant = run.quant
    if run.phase == "finetune" and method.trains_base and quant != "none":
        raise ConfigError(
            f"quant: {quant!r} weights cannot be trained; use method qlora or qdora, "
            "or quant none for full fine-tuning"
        )
    if method.trains_base:  # it trains every module
        run = replace(run, modules_to_save=(), bias="none")
    if run.use_reentrant is None:
        run = replace(run, use_reentrant=run.versions.checkpoints_reentrant)
    if run.versions.experts_are_modules:
        model = with_expert_modules(model)
    if run.attn == "flash_attention_2":
        capability = float(gpu.compute_capability or 0) if gpu.kind == "cuda" else 0.0
        if gpu.kind in ("cpu", "cuda") and capability < FLASH_CAPABILITY:
            raise ConfigError(
                f"attn: flash_attention_2 does not run on {gpu.key} (it needs compute capability "
                "8.0 or newer); use sdpa"
            )
        if not all(one.flash for layer, _ in model.layers() for one in layer.attentions):
            raise ConfigError(
                f"attn: flash_attention_2 is not in the {model.model_type} of transformers, which "
                "has sdpa or eager; use sdpa, which takes what there is"
            )
        if run.precision in FP32_PRECISIONS:
            raise ConfigError(
                f"attn: flash_attention_2 needs 16-bit precision; use sdpa with {run.precision}"
            )
    if run.precision == "tf32" and (gpu.kind != "cuda" or "tf32" not in gpu.peak_flops_per_s):
        raise ConfigError(f"precision: tf32 has no units on {gpu.key}; use fp32 or bf16")
    if not {run.precision[:4], "fp32"} & set(gpu.peak_flops_per_s):
        known = ", ".join(gpu.peak_flops_per_s)
        raise ConfigError(
            f"precision: {run.precision} has no known rate on {gpu.key}; use one of {known}"
        )
    if run.expandable_segments and gpu.kind != "cuda":
        raise ConfigError(
            f"expandable_segments: is of the CUDA allocator, {gpu.key} has none; leave it out"
        )
    if quant in BNB_QUANTS and gpu.kind not in ("cuda", "cpu", "rocm"):
        raise ConfigError(f"quant: {quant!r} needs bitsandbytes, which has no {gpu.kind} backend")
    if run.phase == "inference" and run.cache_format is not None:
        check_quantisable(model, run.cache_format)
    targets: tuple[str, ...] = ()
    if run.phase == "finetune" and not method.trains_base:
        targets = resolve_targets(model, run.target_modules)
        check_saved_modules(model, run.modules_to_save)
    stack = resolve_stack(
        run,
        trains_base=run.phase == "finetune" and method.trains_base,
        device_kind=gpu.kind,
    )
    transposed = model.config.get("model_type") == "gpt2"  # Conv1D
    if method.name == "dora" and transposed and run.lora_dropout and run.has_master_weights:
        raise ConfigError(
            "lora_dropout: PEFT's DoRA makes gradients of float32 Conv1D weights under dropout, "
            f"which is not modelled, got {run.lora_dropout}; use 0, or base_dtype auto"
        )
    if run.modules_to_save and run.precision == "fp16" and stack.embedding_bytes == 2:
        raise ConfigError(
            "modules_to_save: copies of fp16 modules can't be trained, the gradient scaler refuses "
            "fp16 gradients; use precision bf16"
        )
    if run.bias != "none" and run.phase == "finetune":
        if run.precision == "fp16" and stack.base_bytes == 2:
            raise ConfigError(
                "bias: fp16 biases can't be trained, the gradient scaler refuses fp16 gradients; "
                "use precision bf16"
            )
        if model.task != "causal-lm":
            raise ConfigError(f"bias: {run.bias} is modelled for decoders only; use none")
    return Job(model=model, run=run, gpu=gpu, method=method, stack=stack, targets=targets)


def ledger(job: Job) -> Ledger:
    """The moments of `job`."""
    run = job.run
    if run.phase == "inference":
        return inference_ledger(
            job.model,
            run,
            job.stack,
            job.gpu,
            batch_size=run.batch_size,
            prompt_len=run.prompt_len,
            max_new_tokens=run.max_new_tokens,
        )
    return training_ledger(
        job.model,
        run,
        job.stack,
        job.method,
        job.gpu,
        job.targets,
        batch_size=run.batch_size,
        seq_len=run.seq_len,
        r=run.r,
    )


def part_bytes(job: Job, found: Ledger, moment: str) -> dict[str, Count]:
    """Bytes of every part at `moment`, before any calibration; adds up to the card's use."""
    parts: dict[str, Count] = dict.fromkeys(PARTS, 0)
    for entry in found.moments[moment]:
        parts[entry.part] = parts[entry.part] + entry.num_bytes
    parts["temporary"] = parts["temporary"] + found.workspace_bytes
    parts["allocator"] = found.idle_bytes
    parts["context"] = allocator.context_bytes(job.gpu)
    return parts


ALLOCATED_PARTS = tuple(part for part in PARTS if part not in ("allocator", "context"))


def _spread(model: MemoryModel, parts: Mapping[str, float], names: tuple[str, ...]) -> float:
    """Standard deviation in bytes of the sum of `names`."""
    index = {part: i for i, part in enumerate(PARTS)}
    variance = sum(
        parts[a] * parts[b] * model.covariance[index[a]][index[b]]
        for a in names
        for b in names
        if parts[a] and parts[b]
    )
    total = sum(parts[name] * model.mean[name] for name in names)
    return math.sqrt(max(0.0, variance) + (model.noise * total) ** 2)


def predict_memory(job: Job, calibration: Calibration) -> tuple[MemoryPrediction, int]:
    """Peak memory of `job`, and the least it can be at the stated confidence.

    The second value is a bound of live tensors and context alone: when a request fails, the
    allocator drops its idle cache first, so only live tensors make a run fail.
    """
    model = calibration.memory
    found = ledger(job)
    by_moment = {moment: part_bytes(job, found, moment) for moment in found.moments}

    def corrected(parts: Mapping[str, Count], names: tuple[str, ...]) -> float:
        return sum(float(parts[name]) * model.mean[name] for name in names)

    moment = max(by_moment, key=lambda name: corrected(by_moment[name], ALLOCATED_PARTS))
    parts = by_moment[moment]
    breakdown = {name: round(float(parts[name]) * model.mean[name]) for name in PARTS}
    pool = allocator.pool_bytes(job.gpu, job.run.kv_cache) if job.run.phase == "inference" else 0
    allocated = sum(breakdown[name] for name in ALLOCATED_PARTS)
    if pool:
        breakdown["allocator"] = max(0, pool - allocated - breakdown["context"])
    else:  # idle segments are given back before a request fails
        room = job.gpu.memory_bytes - allocated - breakdown["context"]
        breakdown["allocator"] = max(0, min(breakdown["allocator"], room))
    reserved = allocated + breakdown["allocator"]
    used = reserved + breakdown["context"]
    z = TWO_SIDED_Z[MEMORY_CONFIDENCE]
    live = (*ALLOCATED_PARTS, "context")
    least = sum(breakdown[name] for name in live) - z * _spread(model, parts, live)
    live_width = z * _spread(model, parts, ALLOCATED_PARTS)
    fixed = pool and allocated + breakdown["context"] <= pool  # a pool is as large as it is
    reserve_width = 0.0 if fixed else z * _spread(model, parts, (*ALLOCATED_PARTS, "allocator"))
    width = 0.0 if fixed else z * _spread(model, parts, PARTS)
    low = float(used) if pool else max(least, used - width)
    return (
        MemoryPrediction(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            device_used_bytes=used,
            interval_bytes=(round(min(low, used)), round(used + width)),
            allocated_interval_bytes=(round(allocated - live_width), round(allocated + live_width)),
            reserved_interval_bytes=(
                round(reserved if pool else max(allocated - live_width, reserved - reserve_width)),
                round(reserved + reserve_width),
            ),
            breakdown=breakdown,
            moment=moment,
            confidence=MEMORY_CONFIDENCE,
        ),
        round(least),
    )


def judge(memory: MemoryPrediction, least: int, gpu: GpuSpec) -> Verdict:
    """Whether `memory` is within what `gpu` has, `least` being its lower bound of live tensors."""
    if memory.interval_bytes[1] <= gpu.memory_bytes:
        return "fits"
    return "fails" if least > gpu.memory_bytes else "undecided"


def step_features(job: Job, *, seq_len: int | None = None) -> dict[str, float]:
    """Time features of one optimizer step of `job`, at `seq_len` where it is not the run's own."""
    run = job.run
    done = work.training_work(
        job.model,
        run,
        job.stack,
        job.method,
        job.targets,
        batch_size=run.batch_size,
        seq_len=seq_len or run.seq_len,
        r=run.r,
        num_trained=trained_params(
            job.model,
            job.targets,
            job.method,
            run.r,
            modules_to_save=run.modules_to_save,
            bias=run.bias,
        ),
    )
    return timing.features(done, job.gpu, dtype=job.dtype)


def forward_features(job: Job, *, context: int, decoding: bool) -> dict[str, float]:
    """Time features of one forward: the prompt pass, or one decoding step."""
    done = work.inference_work(
        job.model,
        job.run,
        job.stack,
        batch_size=job.run.batch_size,
        context=context,
        decoding=decoding,
    )
    return timing.features(done, job.gpu, dtype=job.dtype)


def mean_context(prompt_len: Count, max_new_tokens: Count) -> Count:
    """Tokens that the average decoding step sees."""
    return prompt_len + largest(1, (max_new_tokens - 1) // 2)


def time_interval(total: float, deviation: float) -> tuple[float, float]:
    """Bounds of `total` seconds at `TIME_CONFIDENCE`, its log having that `deviation`."""
    factor = math.exp(TWO_SIDED_Z[TIME_CONFIDENCE] * deviation)
    return total / factor, total * factor


def predict_step(
    job: Job, calibration: Calibration, *, seq_len: int | None = None
) -> TimePrediction:
    """Time of one optimizer step."""
    run = job.run
    model = calibration.time["finetune"]
    found = step_features(job, seq_len=seq_len)
    step_s, parts = timing.seconds(model, found)
    low, high = time_interval(step_s, timing.log_deviation(model, found, step_s))
    tokens = run.batch_size * (seq_len or run.seq_len) * run.gradient_accumulation_steps
    return TimePrediction(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        prefill_s=None,
        decode_s_per_token=None,
        time_per_token_s=step_s / tokens,
        interval_s=(low, high),
        breakdown=parts,
        confidence=TIME_CONFIDENCE,
    )


def predict_generation(job: Job, calibration: Calibration) -> TimePrediction:
    """Time of one generation: the prompt pass gives the first token, decoding the others.

    An encoder without a head generates nothing: its one forward is the answer.
    """
    run = job.run
    prefill_model, decode_model = calibration.time["prefill"], calibration.time["decode"]
    prefill = forward_features(job, context=run.prompt_len, decoding=False)
    prefill_s, prefill_parts = timing.seconds(prefill_model, prefill)
    deviation = timing.log_deviation(prefill_model, prefill, prefill_s)
    if job.model.task == "encoder":
        tokens = run.batch_size * run.prompt_len
        low, high = time_interval(prefill_s, deviation)
        return TimePrediction(
            step_s=None,
            tokens_per_s=tokens / prefill_s,
            prefill_s=prefill_s,
            decode_s_per_token=None,
            time_per_token_s=prefill_s / tokens,
            interval_s=(low / tokens, high / tokens),
            breakdown=prefill_parts,
            confidence=TIME_CONFIDENCE,
        )
    steps = run.max_new_tokens - 1
    decode = forward_features(
        job, context=mean_context(run.prompt_len, run.max_new_tokens), decoding=True
    )
    decode_s, decode_parts = timing.seconds(decode_model, decode)
    decode_deviation = timing.log_deviation(decode_model, decode, decode_s)
    total = prefill_s + steps * decode_s
    # one run's errors in both phases come from one host and one device: they add up
    deviation = (prefill_s * deviation + steps * decode_s * decode_deviation) / total
    generated = run.batch_size * run.max_new_tokens
    low, high = time_interval(total, deviation)
    return TimePrediction(
        step_s=None,
        tokens_per_s=generated / total,
        prefill_s=prefill_s,
        decode_s_per_token=decode_s,
        time_per_token_s=total / generated,
        interval_s=(low / generated, high / generated),
        breakdown={name: prefill_parts[name] + steps * decode_parts[name] for name in decode_parts},
        confidence=TIME_CONFIDENCE,
    )


def with_trace(job: Job, memory: MemoryPrediction, traced: TracedPeak) -> MemoryPrediction:
    """`memory` with the peaks of a trace; the card's part and the width of the interval stay.

    The trace does not see the libraries' workspaces, which lie in the allocator's pool.
    """
    workspace = allocator.workspace_bytes(job.gpu, training=job.run.phase == "finetune")
    context = memory.breakdown["context"]
    allocated = traced.peak_allocated_bytes + workspace
    reserved = min(
        traced.peak_reserved_bytes + workspace,
        max(allocated, job.gpu.memory_bytes - context),  # idle segments are given back in time
    )
    used = reserved + context
    parts = dict(traced.parts) | {"temporary": workspace}
    parts["traced"] = allocated - sum(size for name, size in parts.items() if name != "traced")

    def shifted(interval: tuple[int, int], by: int) -> tuple[int, int]:
        return max(0, interval[0] + by), interval[1] + by

    by_trace = allocated - memory.peak_allocated_bytes
    reserved_by_trace = reserved - memory.peak_reserved_bytes
    return replace(
        memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used_bytes=used,
        interval_bytes=shifted(memory.interval_bytes, used - memory.device_used_bytes),
        allocated_interval_bytes=shifted(memory.allocated_interval_bytes, by_trace),
        reserved_interval_bytes=shifted(memory.reserved_interval_bytes, reserved_by_trace),
        breakdown=parts | {"allocator": reserved - allocated, "context": context},
        moment=traced.moment,
    )


def predict(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    *,
    traced: TracedPeak | None = None,
) -> Prediction:
    """Judge one run on one device.

    Args:
        traced: peaks of a trace of the same run, which then stand for the ledger's.

    Raises:
        ConfigError: settings that exclude each other.
    """
    job = resolve(model, run, gpu)
    memory, least = predict_memory(job, calibration)
    traced_basis = ""
    if traced is not None:
        by_ledger = memory.peak_allocated_bytes
        memory = with_trace(job, memory, traced)
        least += memory.peak_allocated_bytes - by_ledger
        traced_basis = f"memory traced on the real code, {traced.note}; "
    training = job.run.phase == "finetune"
    if training:
        time = predict_step(job, calibration)
        time_runs = calibration.time["finetune"].num_runs
    else:
        time = predict_generation(job, calibration)
        time_runs = calibration.time["decode"].num_runs
    verdict = judge(memory, least, gpu)
    num_params = model.num_params
    trained = 0
    if training:
        trained = trained_params(
            model,
            job.targets,
            job.method,
            job.run.r,
            modules_to_save=job.run.modules_to_save,
            bias=job.run.bias,
        )
    if traced is not None:
        num_params, trained = traced.num_params, traced.num_trainable_params
    return Prediction(
        run=job.run,
        gpu=gpu.key,
        num_params=num_params,
        num_trainable_params=int(trained),
        memory=memory,
        time=time,
        usable_bytes=gpu.memory_bytes,
        fits=verdict == "fits",
        verdict=verdict,
        basis=traced_basis
        + calibration.basis(memory_runs=calibration.memory.num_runs, time_runs=time_runs),
        notes=notes(job),
    )


def notes(job: Job) -> tuple[str, ...]:
    """What a reader must know about this prediction."""
    found = list(job.model.notes)
    run, gpu = job.run, job.gpu
    limit = job.model.max_position_embeddings
    length = run.seq_len if run.phase == "finetune" else run.prompt_len + run.max_new_tokens
    if limit and length > limit:
        found.append(f"{length} tokens exceed the model's {limit} positions")
    if job.dtype in ("bf16", "fp16") and job.dtype not in gpu.peak_flops_per_s:
        found.append(f"{gpu.key} has no {job.dtype} units: time is taken from its fp32 rate")
    if gpu.unverified:
        found.append(f"datasheet facts of {gpu.key} not verified: {', '.join(gpu.unverified)}")
    bare = any(
        not one.is_module
        for layer, _ in job.model.layers()
        if layer.moe is not None
        for one in layer.moe.expert.linears
    )
    if bare and job.stack.quant in BNB_QUANTS:
        found.append(
            "experts are 3-D parameters in transformers 5: bitsandbytes leaves them 16-bit"
        )
    adapted_experts = any(
        one.rank_multiple and not one.is_module and one.name in job.targets
        for one in all_linears(job.model)
    )
    if adapted_experts and (run.method in ("dora", "qdora") or run.lora_dropout):
        found.append(
            "PEFT 0.21 refuses DoRA and dropout on experts; leave them out with "
            "target_modules attention"
        )
    if run.phase == "finetune" and (run.use_rslora or run.loraplus_lr_ratio != 1):
        found.append("rsLoRA and LoRA+ take the bytes and the time of plain LoRA")
    if job.model.task == "seq2seq-lm" and run.phase == "finetune":
        found.append("encoder and decoder are both taken at seq_len tokens")
    return tuple(found)
