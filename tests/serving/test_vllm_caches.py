"""Caches in 8 bits under vLLM, by card, model and release."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refusal

from whichlora.spec.run import RunConfig

RUN = RunConfig(model="", phase="inference", serving="vllm", context=2048, precision="auto")
QWEN, PHI = "Qwen/Qwen2.5-1.5B", "microsoft/Phi-3-mini-4k-instruct"  # heads of 128 and of 96
SINKS, LATENTS = "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite"


def cache_refusal(model: str, gpu: str, release: str, dtype: str = "fp8") -> str:
    options, libraries = (("kv_cache_dtype", dtype),), (("vllm", release),)
    return refusal(replace(RUN, model=model, libraries=libraries, serving_options=options), gpu)


@pytest.mark.parametrize(
    ("model", "gpu", "release", "needed"),
    [
        (QWEN, "t4-16gb", "0.33.0", 8.0),
        (QWEN, "t4-16gb", "0.24.0", 8.0),
        (SINKS, "a100-sxm-80gb", "0.33.0", 8.9),
        (LATENTS, "a100-sxm-80gb", "0.33.0", 8.9),
        (PHI, "rtx-3090-24gb", "0.33.0", 8.9),
        (QWEN, "a100-sxm-80gb", "0.11.0", 8.9),  # Triton is chosen on all but Hopper
        (QWEN, "v100-sxm2-16gb", "0.19.0", 7.5),
    ],
)
def test_a_cache_that_no_attention_reads_on_the_card_is_refused(
    model: str, gpu: str, release: str, needed: float
) -> None:
    assert cache_refusal(model, gpu, release) == (
        f"kv_cache_dtype: vllm {release} has no attention that reads fp8 on {gpu} for {model}: it "
        f"needs compute capability {needed} or newer; give auto"
    )


@pytest.mark.parametrize(
    ("model", "gpu", "release"),
    [
        (QWEN, "a100-sxm-80gb", "0.33.0"),  # FlashInfer's
        (QWEN, "t4-16gb", "0.23.0"),
        (QWEN, "t4-16gb", "0.10.2"),  # the first engine's
        (PHI, "rtx-3090-24gb", "0.8.5"),
        (PHI, "l4-24gb", "0.33.0"),  # Triton's
        (SINKS, "h100-sxm-80gb", "0.33.0"),
        (LATENTS, "h100-sxm-80gb", "0.33.0"),
    ],
)
def test_a_cache_that_some_attention_reads_is_accepted(model: str, gpu: str, release: str) -> None:
    assert not cache_refusal(model, gpu, release)
    assert not cache_refusal(model, gpu, release, "auto")


def test_a_turing_has_no_cache_in_bf16() -> None:
    assert "reads bfloat16 on t4-16gb" in cache_refusal(QWEN, "t4-16gb", "0.33.0", "bfloat16")
    assert not cache_refusal(QWEN, "a100-sxm-80gb", "0.33.0", "bfloat16")
