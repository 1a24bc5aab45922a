"""Cards that have kernels for quantised weights, by release."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refusal

from whichlora.predict.resolve import resolve
from whichlora.serving.vllm_memory import start
from whichlora.spec.run import Precision, Quant, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RUN = RunConfig(model="Qwen/Qwen2.5-1.5B", phase="inference", context=2048, precision="auto")


def quant_refusal(engine: str, release: str, quant: Quant | None, gpu: str, model: str = "") -> str:
    model = model or ("openai/gpt-oss-20b" if quant == "mxfp4" else RUN.model)
    libraries = ((engine, release),)
    return refusal(replace(RUN, model=model, serving=engine, quant=quant, libraries=libraries), gpu)


@pytest.mark.parametrize(
    ("engine", "release", "quant", "needed", "newer"),
    [
        ("vllm", "0.33.0", "mxfp4", "8.0", ""),
        ("vllm", "0.10.1", "mxfp4", "8.0", ""),
        ("vllm", "0.13.0", "fp8", "8.0", "0.14"),
        ("vllm", "0.11.2", "w4a16", "8.0", "0.12"),
        ("sglang", "0.5.23", "mxfp4", "8.0", ""),
        ("sglang", "0.5.23", "fp8", "8.0", ""),
        ("sglang", "0.4.6", "w4a16", "8.0", ""),
    ],
)
def test_a_turing_is_refused_where_kernels_need_a_newer_card(
    engine: str, release: str, quant: Quant, needed: str, newer: str
) -> None:
    instead = f"give libraries {engine}={newer} or newer, or " if newer else ""
    rest = "use gptq-int4, or weights that are not quantised"
    if quant == "mxfp4":
        rest = "openai/gpt-oss-20b is stored so: name a 16-bit copy of the model, such as one that "
        rest += "ends in -BF16"
    assert quant_refusal(engine, release, quant, "t4-16gb") == (
        f"quant: {engine} {release} has no kernels for {quant} on t4-16gb: it needs compute "
        f"capability {needed} or newer; {instead}{rest}"
    )
    assert not quant_refusal(engine, release, quant, "a100-sxm-80gb")


@pytest.mark.parametrize(
    ("engine", "release", "model", "what", "newer"),
    [
        ("vllm", "0.8.5", "Qwen/Qwen3-8B-FP8", "fp8 in blocks", "0.9"),
        ("vllm", "0.8.5", "Qwen/Qwen3-30B-A3B-FP8", "experts in fp8", "0.9"),
        ("vllm", "0.9.0", "Qwen/Qwen3-30B-A3B-FP8", "", ""),
        ("sglang", "0.5.0", "Qwen/Qwen3-8B-FP8", "fp8 in blocks", "0.5.1"),
        ("sglang", "0.5.1", "Qwen/Qwen3-8B-FP8", "", ""),
        ("sglang", "0.5.23", "Qwen/Qwen3-30B-A3B-FP8", "experts in fp8", ""),
        ("sglang", "0.3.6", RUN.model, "", ""),
        ("sglang", "0.4.9", RUN.model, "fp8", "0.5.1"),
    ],
)
def test_an_ampere_is_refused_fp8_where_only_triton_would_multiply_it(
    engine: str, release: str, model: str, what: str, newer: str
) -> None:
    said = quant_refusal(engine, release, "fp8", "a100-sxm-80gb", model)
    told = f"quant: {engine} {release} has no kernels for {what} on a100-sxm-80gb"
    assert said.startswith(told) if what else not said
    assert f"libraries {engine}={newer} or newer" in said or not newer
    assert not quant_refusal(engine, release, "fp8", "h100-sxm-80gb", model)


def test_a_copy_that_is_stored_so_is_told_to_be_replaced() -> None:
    model = "RedHatAI/Qwen3-8B-NVFP4"
    said = quant_refusal("sglang", "0.5.23", None, "h100-sxm-80gb", model)
    assert said.endswith(f"{model} is stored so: name another copy, such as one in 16 bit")
    assert not quant_refusal("sglang", "0.5.23", None, "h100-sxm-80gb", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("engine", "release", "quant", "gpu"),
    [
        ("vllm", "0.14.0", "fp8", "t4-16gb"),
        ("vllm", "0.12.0", "w4a16", "t4-16gb"),
        ("vllm", "0.33.0", "awq-int4", "t4-16gb"),
        ("vllm", "0.33.0", "gptq-int4", "t4-16gb"),
        ("vllm", "0.5.1", "fp8", "a100-sxm-80gb"),
        ("vllm", "0.16.0", "nvfp4", "t4-16gb"),
        ("vllm", "0.9.0", "nvfp4", "h100-sxm-80gb"),
        ("sglang", "0.5.13", "nvfp4", "h100-sxm-80gb"),
        ("sglang", "0.5.9", "nvfp4", "b200-180gb"),
        ("sglang", "0.5.23", "awq-int4", "t4-16gb"),
        ("sglang", "0.5.23", None, "t4-16gb"),
    ],
)
def test_cards_that_have_kernels_are_not_refused(
    engine: str, release: str, quant: Quant | None, gpu: str
) -> None:
    assert not quant_refusal(engine, release, quant, gpu)


@pytest.mark.parametrize(
    ("engine", "release", "quant", "gpu", "message"),
    [
        ("vllm", "0.8.5", "nvfp4", "h100-sxm-80gb", "capability 10.0 or newer; give libraries"),
        ("vllm", "0.7.3", "nvfp4", "h100-sxm-80gb", "0.7.3 does not read nvfp4, 0.8 or newer does"),
        ("vllm", "0.19.0", "mxfp8", "h100-sxm-80gb", "vllm=0.20 or newer"),
        ("sglang", "0.5.11", "nvfp4", "h100-sxm-80gb", "sglang=0.5.13 or newer"),
        ("sglang", "0.5.21", "nvfp4a16", "h100-sxm-80gb", "0.5.21 does not read nvfp4a16, 0.5.23"),
    ],
)
def test_floats_of_4_bits_have_releases_and_cards(
    engine: str, release: str, quant: Quant, gpu: str, message: str
) -> None:
    assert message in quant_refusal(engine, release, quant, gpu, model="Qwen/Qwen2.5-7B")


def test_sglang_has_no_fallback_for_those_of_llm_compressor() -> None:
    model = "RedHatAI/Qwen3-32B-NVFP4"
    assert "capability 10.0" in quant_refusal(
        "sglang", "0.5.23", None, "h100-sxm-80gb", model=model
    )
    assert not quant_refusal("sglang", "0.5.23", None, "b200-180gb", model=model)
    assert not quant_refusal("vllm", "0.33.0", None, "h100-sxm-80gb", model=model)


def test_the_first_fp8_kernels_are_those_of_ada() -> None:
    assert "needs compute capability 8.9" in quant_refusal("vllm", "0.5.0", "fp8", "a100-sxm-80gb")
    assert not quant_refusal("vllm", "0.5.0", "fp8", "l4-24gb")


@pytest.mark.parametrize("quant", ["none", "gptq-int4", None])
@pytest.mark.parametrize(
    ("engine", "release", "gpu"),
    [
        ("vllm", "0.33.0", "t4-16gb"),
        ("sglang", "0.5.23", "t4-16gb"),
        ("vllm", "0.19.0", "v100-sxm2-16gb"),
    ],
)
def test_a_checkpoint_in_mxfp4_is_loaded_so_whatever_is_asked_for(
    engine: str, release: str, gpu: str, quant: Quant | None
) -> None:
    told = quant_refusal(engine, release, quant, gpu, "openai/gpt-oss-20b")
    assert "has no kernels for mxfp4" in told
    assert "gptq" not in told
    assert not quant_refusal(engine, release, quant, gpu, "Qwen/Qwen2.5-1.5B")


@pytest.mark.parametrize(
    ("model", "precision", "gpu", "offered"),
    [
        ("google/gemma-3-12b-it", "fp32", "t4-16gb", "give more GPUs"),
        ("Qwen/Qwen2.5-14B", "fp16", "t4-16gb", "give quant awq-int4 or gptq-int4, more GPUs"),
        ("Qwen/Qwen2.5-14B", "fp16", "v100-sxm2-16gb", "give quant gptq-int4, more GPUs"),
        ("openai/gpt-oss-120b", "bf16", "l4-24gb", "give more GPUs"),
    ],
)
def test_a_model_too_large_is_offered_only_what_would_serve_it(
    model: str, precision: Precision, gpu: str, offered: str
) -> None:
    release = "0.19.0" if gpu.startswith("v100") else "0.33.0"
    run = replace(RUN, model=model, precision=precision, quant="none", serving="vllm")
    run = replace(run, libraries=(("vllm", release),))
    found = start(resolve(load_model(model), run, find_gpu(gpu)).served)
    assert offered in found.fault
