"""What is refused because a device has no units, kernels or library for it."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY, FLASH_CAPABILITY
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.kernels import NO_KERNELS
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.run import BNB_QUANTS, FP32_PRECISIONS, RunConfig
from whichlora.symbolic.kernels import runs_efficient

# Setting, value, what computes it, and the least compute capability that has kernels for.
# Source: installation pages of bitsandbytes 0.50 and vLLM; README of Triton, the language of
# Liger's and unsloth's kernels.
_TRITON = 7.0
MXFP4_CAPABILITY = 7.5  # transformers 5.23 `Mxfp4HfQuantizer.validate_environment`
_LEAST_CAPABILITY = (
    ("quant", "int8", "bitsandbytes' LLM.int8()", 7.5, "nf4"),
    ("quant", "mxfp4", "transformers' Mxfp4GptOssExperts", MXFP4_CAPABILITY, "none"),
    ("loss_head", "liger", "Triton", _TRITON, "hf"),
    ("loss_head", "unsloth", "Triton", _TRITON, "hf"),
    ("kv_cache", "vllm", "vLLM", 7.0, "dynamic"),
)


def check_attention(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse FlashAttention where the device, the architecture or the precision has none."""
    if run.attn != "flash_attention_2":
        return
    capability = float(gpu.compute_capability or 0) if gpu.kind == "cuda" else 0.0
    if gpu.is_timed and gpu.kind in ("cpu", "cuda") and capability < FLASH_CAPABILITY:
        raise ConfigError(
            f"attn: flash_attention_2 does not run on {gpu.key} (it needs compute capability "
            "8.0 or newer); use sdpa"
        )
    if not all(attention.flash for layer, _ in model.layers() for attention in layer.attentions):
        raise ConfigError(
            f"attn: flash_attention_2 is not in the {model.model_type} of transformers, which "
            "has sdpa or eager; use sdpa, which takes what there is"
        )
    if run.precision in FP32_PRECISIONS:
        raise ConfigError(
            f"attn: flash_attention_2 needs 16-bit precision; use sdpa with {run.precision}"
        )


def check_efficient(model: ModelSpec, run: RunConfig, gpu: GpuSpec, dtypes: Dtypes) -> None:
    """Refuse SDPA's memory-efficient kernel where the device or the architecture has none."""
    if run.attn != "sdpa-efficient":
        return
    attentions = [
        attention
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.kind == "softmax"
    ]
    if not all(attention.sdpa == "fused" for attention in attentions):
        raise ConfigError(
            f"attn: sdpa-efficient is not in the {model.model_type} of transformers, whose "
            "attention is written out; use sdpa, which takes what there is"
        )
    if not all(runs_efficient(attention, dtypes) for attention in attentions):
        raise ConfigError(
            f"attn: sdpa-efficient has no kernel on {gpu.key} for these heads in {run.precision}; "
            "use sdpa, or another precision"
        )


def check_device(run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse settings that the device has no units, no allocator or no library for."""
    if not gpu.is_timed:  # any card of so much memory
        return
    backend = gpu.backend
    if run.precision == "tf32" and not (backend.has_tf32 and "tf32" in gpu.peak_flops_per_s):
        usable = [name for name in ("fp32", "bf16", "fp16") if name in gpu.peak_flops_per_s]
        raise ConfigError(f"precision: tf32 has no units on {gpu.key}; use {' or '.join(usable)}")
    if not {run.precision[:4], "fp32"} & set(gpu.peak_flops_per_s):
        rated = ", ".join(gpu.peak_flops_per_s)
        raise ConfigError(
            f"precision: {run.precision} has no known rate on {gpu.key}; use one of {rated}"
        )
    since = backend.expandable_since
    if run.expandable_segments and not run.versions.reaches("torch", since):
        of_torch = f"torch's allocator of {backend.kind} has them since {since}"
        raise ConfigError(
            "expandable_segments: "
            + (of_torch if since else f"torch's allocator of {backend.kind} has none")
            + f", which {gpu.key} uses; leave it out"
        )
    if run.quant in BNB_QUANTS - backend.quants:
        raise ConfigError(
            f"quant: {run.quant!r} is not among what bitsandbytes has for {backend.kind}, "
            f"{', '.join(sorted(backend.quants))}; use one of these, or quant none"
        )
    for lack in backend.lacks:
        if getattr(run, lack.setting) in lack.values:
            value = getattr(run, lack.setting)
            raise ConfigError(f"{lack.setting}: {value} {lack.why}; {lack.instead}")
    if run.parallel.gpus > 1 and backend.lacks_groups:
        raise ConfigError(f"gpus: {backend.lacks_groups}")
    if gpu.kind != "cuda" or gpu.compute_capability is None:
        return
    for setting, value, library, least, instead in _LEAST_CAPABILITY:
        if getattr(run, setting) == value and float(gpu.compute_capability) < least:
            raise ConfigError(
                f"{setting}: {value} does not run on {gpu.key} ({library} needs compute capability "
                f"{least} or newer); use {instead}"
            )


def check_kernels(run: RunConfig, dtypes: Dtypes, gpu: GpuSpec) -> None:
    """Refuse fused kernels where Triton, their language, does not run."""
    lacks = gpu.backend.lacks_kernels
    if lacks and (dtypes.kernels != NO_KERNELS or LOSS_HEADS[run.loss_head].in_triton):
        raise ConfigError(
            f"use_liger_kernel, trainer, loss_head: fused kernels do not run on {gpu.key}: "
            f"{lacks}; leave them out"
        )
    if dtypes.kernels == NO_KERNELS or not gpu.is_timed or gpu.kind != "cuda":
        return
    if float(gpu.compute_capability or ASSUMED_CAPABILITY) < _TRITON:
        raise ConfigError(
            f"use_liger_kernel, trainer: its kernels do not run on {gpu.key} (Triton needs compute "
            f"capability {_TRITON} or newer); leave them out"
        )
