"""Experts in mxfp4: bytes beside the published files, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.life import file_bytes, stored_dtypes
from whichlora.memory.mxfp4 import expanding_bytes, packed_parts, swizzling_bytes
from whichlora.memory.weights import linear_bytes
from whichlora.predict.notes import notes_on
from whichlora.predict.resolve import resolve
from whichlora.serving.form import serving_run
from whichlora.serving.segments import UNUSED_SEGMENTS
from whichlora.serving.vllm_memory import start
from whichlora.spec.checkpoint import (
    is_expanded,
    packed_experts,
    refuses_bitsandbytes,
    stored_quant,
)
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.timing.work import visited_bytes
from whichlora.units import GiB

SMALL, LARGE = "openai/gpt-oss-20b", "openai/gpt-oss-120b"
COPY = "unsloth/gpt-oss-20b-BF16"
SERVED = RunConfig(model=SMALL, phase="inference")
TRAINED = RunConfig(model=SMALL)
H100 = replace(A100, key="h100-sxm-80gb", compute_capability="9.0")
T4 = replace(A100, key="t4-16gb", compute_capability="7.5")


def quant_of(run: RunConfig, gpu: GpuSpec = H100) -> str | None:
    return resolve(load_model(run.model), run, gpu).run.quant


def test_a_block_of_32_weights_has_one_exponent() -> None:
    assert packed_parts(64) == (32, 2)
    assert packed_parts(33) == (17, 2)


def test_files_are_as_large_as_the_published_index_says() -> None:
    job = resolve(load_model(SMALL), TRAINED, H100)
    # `total_size` of the checkpoint's model.safetensors.index.json
    assert file_bytes(job.model, stored_dtypes(job.model, job.dtypes)) == 13_761_264_768


@pytest.mark.parametrize(
    ("model", "gpu", "logged_gib"),
    [
        # github.com/vllm-project/vllm, issue 23278: "Model loading took", with Marlin's kernels
        (LARGE, A100, 65.9651),
        # issue 22331, before kernels padded: those of Hopper do not
        (SMALL, H100, 12.8848),
    ],
)
def test_weights_in_vllm_are_those_of_published_logs(
    model: str, gpu: GpuSpec, logged_gib: float
) -> None:
    run = replace(SERVED, model=model, serving="vllm", context=8192)
    taken = start(resolve(load_model(model), run, gpu).served)
    allocated = sum(  # the log is of what is allocated, not reserved
        entry.num_bytes
        for entry in taken.entries
        if entry.part == "weights" and entry.fact is not UNUSED_SEGMENTS
    )
    assert allocated / GiB == pytest.approx(logged_gib, rel=0.001)


def test_an_inference_serves_the_checkpoint_as_it_ships() -> None:
    assert quant_of(SERVED) == "mxfp4"
    assert quant_of(SERVED, T4) == "mxfp4"
    assert quant_of(SERVED, replace(T4, compute_capability="7.0")) == "none"
    assert quant_of(replace(SERVED, serve="merged")) == "none"
    assert quant_of(replace(SERVED, model=COPY)) == "none"
    assert quant_of(TRAINED) == "none"
    assert quant_of(serving_run(SERVED, TRAINED, None)) == "none"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (replace(TRAINED, quant="mxfp4"), "trains no packed experts"),
        (replace(TRAINED, method="qlora"), "stored in mxfp4, beside which transformers refuses"),
        (replace(SERVED, model="Qwen/Qwen3-30B-A3B", quant="mxfp4"), "no experts of gpt-oss"),
        (replace(SERVED, precision="fp32", quant="mxfp4"), "needs 16 bit"),
    ],
)
def test_what_transformers_refuses_is_refused(run: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_model(run.model), run, H100)


def test_a_16_bit_copy_takes_bitsandbytes() -> None:
    run = replace(TRAINED, model=COPY, method="qlora")
    assert quant_of(run) == "nf4-dq"
    assert not refuses_bitsandbytes(load_model(COPY).config, "nf4")
    assert refuses_bitsandbytes(load_model(SMALL).config, "nf4")


def test_training_says_that_experts_are_expanded() -> None:
    assert any(
        "dequantize=True" in note for note in notes_on(resolve(load_model(SMALL), TRAINED, H100))
    )
    assert is_expanded(load_model(SMALL).config, "none")
    assert not is_expanded(load_model(SMALL).config, "mxfp4")


def test_loading_holds_the_largest_parameter_twice() -> None:
    job = resolve(load_model(SMALL), SERVED, H100)
    joint, down = packed_experts(job.model)[:2]
    assert swizzling_bytes(job.model, job.dtypes) == sum(packed_parts(joint.num_weights))
    assert joint.num_weights == 2 * down.num_weights
    # beside codes and exponents of both widths: indices of half of the weights, and their values
    packed = joint.num_weights // 2 + joint.num_weights // 32 * 5
    assert expanding_bytes(job.model, 2) == packed + (4 + 8 + 2) * joint.num_weights // 2


def test_a_token_reads_4_bits_of_its_experts_and_16_of_the_attention() -> None:
    job = resolve(load_model(SMALL), SERVED, H100)
    layer = job.model.groups[0].layer
    experts = sum(linear_bytes(linear, job.dtypes) for linear in packed_experts(job.model)[:2])
    others = sum(linear_bytes(linear, job.dtypes) for linear in layer.linears if linear.count == 1)
    assert visited_bytes(layer, job.dtypes, 1) == pytest.approx(others + experts * 4 / 32)


@pytest.mark.parametrize(
    ("config", "quant"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "gptq-int8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq-int4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, None),
    ],
)
def test_a_config_names_its_storage(config: dict[str, object], quant: str | None) -> None:
    assert stored_quant(config) == quant
