"""A run against its model, method and device: what is filled in, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100, CPU

from whichlora.errors import ConfigError
from whichlora.predict.defaults import with_precision
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

LLAMA = "HuggingFaceTB/SmolLM2-135M"
BERT = "google-bert/bert-base-uncased"
T4 = replace(A100, key="t4", compute_capability="7.5")
GAUDI = replace(A100, key="gaudi", kind="hpu", compute_capability=None)
HALF_ONLY = replace(A100, key="half", peak_flops_per_s={"bf16": 1e14})


def job(gpu: GpuSpec = A100, model: str = LLAMA, **settings: Any) -> ResolvedRun:
    return resolve(load_model(model), RunConfig(model=model, **settings), gpu)


@pytest.mark.parametrize(("model", "on"), [(LLAMA, True), ("albert/albert-base-v2", False)])
def test_checkpointing_of_which_nothing_is_said_is_on_where_the_model_has_it(
    model: str, on: bool
) -> None:
    assert job(model=model, gradient_checkpointing=None).run.gradient_checkpointing is on


def test_checkpointing_that_is_asked_for_is_refused_where_the_model_has_none() -> None:
    with pytest.raises(ConfigError, match="the albert of transformers has none"):
        job(model="albert/albert-base-v2", gradient_checkpointing=True)


def test_the_method_and_the_libraries_fill_in_what_is_open() -> None:
    found = job(method="qlora")
    assert (found.run.quant, found.run.prepare_kbit) == ("nf4-dq", True)
    assert found.run.use_reentrant is False
    assert "q_proj" in found.targets


def test_full_fine_tuning_has_no_targets_and_no_modules_of_its_own() -> None:
    found = job(method="full", bias="all", modules_to_save=("embed_tokens",))
    assert found.targets == ()
    assert (found.run.bias, found.run.modules_to_save) == ("none", ())


def test_peft_is_told_its_own_word_for_all_linears() -> None:
    assert job().peft_targets == "all-linear"
    assert job(target_modules=("v_proj", "q_proj")).peft_targets == ("q_proj", "v_proj")


def test_inference_adapts_nothing() -> None:
    assert job(phase="inference", method="full").targets == ()
    assert not job(phase="inference", method="full").dtypes.trains_base


FLASH = {"attn": "flash_attention_2"}
REFUSED: dict[str, tuple[GpuSpec, str, dict[str, Any], str]] = {
    "training 4-bit weights": (
        A100, LLAMA, {"method": "full", "quant": "nf4"}, r"quant: 'nf4' .*use method qlora",
    ),
    "flash attention on an old GPU": (T4, LLAMA, FLASH, r"attn: .* on t4 .*use sdpa"),
    "flash attention on a CPU": (CPU, LLAMA, FLASH | {"precision": "fp32"}, r"attn: .* on cpu"),
    "flash attention without code": (
        A100, "bigscience/bloom-560m", FLASH,
        r"attn: .* is not in the bloom of transformers",
    ),
    "flash attention in fp32": (
        A100, LLAMA, FLASH | {"precision": "fp32"}, r"attn: .* needs 16-bit precision",
    ),
    "tf32 without its units": (A100, LLAMA, {"precision": "tf32"}, r"precision: tf32 has no units"),
    "a dtype without a rate": (
        HALF_ONLY, LLAMA, {"precision": "fp16"}, r"precision: fp16 has no known rate.*bf16",
    ),
    "segments of another allocator": (
        CPU, LLAMA, {"expandable_segments": True},
        r"expandable_segments: torch's allocator of cpu has none.*leave it out",
    ),
    "a format that bitsandbytes lacks there": (
        GAUDI, LLAMA, {"method": "qlora", "quant": "fp4"},
        r"quant: 'fp4' is not among what bitsandbytes has for hpu, int8, nf4, nf4-dq; use one",
    ),
    "copies in fp16": (
        A100, LLAMA, {"precision": "fp16", "modules_to_save": ("embed_tokens",)},
        r"modules_to_save: .*use precision bf16",
    ),
    "biases in fp16": (
        A100, LLAMA, {"precision": "fp16", "bias": "all"}, r"bias: fp16 .*use precision bf16",
    ),
    "biases of an encoder": (A100, BERT, {"bias": "all"}, r"bias: all is modelled for decoders"),
    "a module that is not there": (
        A100, LLAMA, {"modules_to_save": ("wte",)}, r"wte.*accepted are embed_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "model", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_exclude_each_other_are_refused(
    gpu: GpuSpec, model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(gpu, model, **settings)


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("t4-16gb", "fp16"),
        ("v100-sxm2-16gb", "fp16"),
        ("p40-24gb", "fp16"),
        ("a100-sxm-80gb", "bf16"),
        ("mi300x-192gb", "bf16"),
        ("gaudi2-96gb", "bf16"),
        ("cpu", "bf16"),
    ],
)
def test_a_run_without_a_precision_takes_the_16_bit_that_the_device_has(
    gpu: str, precision: str
) -> None:
    device = find_gpu(gpu)
    assert device.has_bf16 == (precision == "bf16")
    assert with_precision(RunConfig(model="any", precision="auto"), device).precision == precision
    assert with_precision(RunConfig(model="any", precision="fp32"), device).precision == "fp32"


def test_what_bf16_alone_can_do_is_refused_where_auto_means_fp16() -> None:
    run = RunConfig(model="Qwen/Qwen2.5-0.5B", precision="auto", adapter_dtype="bfloat16")
    model = load_model(run.model)
    assert resolve(model, run, A100).run.precision == "bf16"
    with pytest.raises(ConfigError, match="adapter_dtype: bfloat16 adapters need a bf16"):
        resolve(model, run, find_gpu("t4-16gb"))
