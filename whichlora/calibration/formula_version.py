"""A name for the formulas behind coefficients, so that what was fitted to others is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

from whichlora import families
from whichlora.predict.parts import part_bytes
from whichlora.predict.predict import (
    forward_features,
    ledger,
    mean_context,
    step_features,
)
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Real
from whichlora.spec.run import RunConfig

_DIGITS = 6  # that no compiler's rounding reaches
_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
_MODELS = {
    "llama": _SIZES | {"num_key_value_heads": 4},
    "gemma2": _SIZES | {"num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128},
    "gpt_neox": _SIZES,
    "mixtral": _SIZES
    | {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
}
_DEVICE = GpuSpec(
    key="any",
    name="any",
    kind="cuda",
    memory_bytes=2**36,
    bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 1e14, "fp16": 1e14, "fp32": 1e13},
    num_multiprocessors=108,
    compute_capability="8.0",
)
_RUNS = (
    RunConfig(model="", method="lora", seq_len=512),
    RunConfig(model="", method="qdora", seq_len=384, batch_size=3, lora_dropout=0.1),
    RunConfig(model="", method="full", precision="fp32", attn="eager", seq_len=96),
    RunConfig(model="", method="qlora", precision="fp16", padding="padded", loss_head="liger"),
    RunConfig(model="", phase="inference", batch_size=2),
    RunConfig(model="", phase="inference", quant="nf4", attn="eager", prompt_len=64),
    RunConfig(model="", phase="inference", kv_cache="static", precision="fp32"),
    RunConfig(model="", phase="inference", method="qdora", serve="as-trained", prompt_len=64),
)


@cache
def formulas_digest() -> str:
    """Names what the formulas make of a few runs of several families; changes when they do."""
    return hashlib.sha256("\n".join(_answers()).encode()).hexdigest()[:16]


def _answers() -> Iterator[str]:
    for model_type, config in _MODELS.items():
        model = families.build({"model_type": model_type, **config}, name=model_type)
        for run in _RUNS:
            job = resolve(model, run, _DEVICE)
            counted = ledger(job)
            yield from _lines(part_bytes(job, counted, counted.peak_moment))
            if job.run.phase == "finetune":
                yield from _lines(step_features(job))
                continue
            yield from _lines(forward_features(job, context=run.prompt_len, decoding=False))
            yield from _lines(
                forward_features(
                    job, context=mean_context(run.prompt_len, run.max_new_tokens), decoding=True
                )
            )


def _lines(values: Mapping[str, Real]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name} {float(value):.{_DIGITS}g}"
