"""What a config says of the storage of a checkpoint: packed 4-bit integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.memory.weights import linear_bytes, quantised_parts, weight_bytes
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.serving.rank import rank_model
from whichlora.serving.vllm_latents import absorbed_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import (
    has_fp8_blocks,
    stored_group,
    stored_quant,
    with_unpacked,
)
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

KIMI, LLAMA_COPY = "moonshotai/Kimi-K2.5", "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16"
H200 = find_gpu("h200-sxm-141gb")


def served(model: ModelSpec, **settings: Any) -> ResolvedRun:
    asked: dict[str, Any] = {"phase": "inference", "serving": "vllm"} | settings
    return resolve(model, RunConfig(model=model.name, **asked), H200)


def group(**weights: object) -> dict[str, object]:
    usual = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}
    return {"targets": ["Linear"], "weights": usual | {"group_size": 32} | weights}


def config(*groups: dict[str, object], **more: object) -> dict[str, Any]:
    numbered = {f"group_{number}": each for number, each in enumerate(groups)}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": numbered,
            **more,
        }
    }


@pytest.mark.parametrize(
    ("stated", "quant"),
    [
        (config(group()), "w4a16"),
        ({"text_config": config(group())}, "w4a16"),
        (config(group(), group()), "w4a16"),
        (config(group(num_bits=8)), None),
        (config(group(symmetric=False)), None),
        (config(group(strategy="channel")), None),
        (config(group(), group(type="float", num_bits=8)), None),
        (config({**group(), "input_activations": {"num_bits": 8}}), None),
        (config(), None),
    ],
)
def test_symmetric_4_bit_integers_of_groups_are_a_storage(
    stated: dict[str, Any], quant: str | None
) -> None:
    assert stored_quant(stated) == quant
    assert stored_group(stated) == (32 if quant else None)


def test_a_matrix_takes_codes_and_scales_of_groups() -> None:
    """vLLM 0.33.0 compressed_tensors_wNa16.py: int32 [out, in / 8], 16 bit [out, in / group]."""
    inputs, outputs, size = 4096, 14336, 128
    packed, scales = 4 * outputs * (inputs // 8), 2 * outputs * (inputs // size)
    assert quantised_parts(inputs * outputs, "w4a16", out_features=outputs, group_size=size) == (
        packed,
        scales,
    )


def test_a_copy_of_llama_is_as_large_as_its_file() -> None:
    """Matrices of blocks in 4 bits, the table and the head in 16."""
    job = served(load_model(LLAMA_COPY))
    assert (job.run.quant, job.run.quant_group_size) == ("w4a16", 128)
    blocks, table = 6_979_321_856, 128256 * 4096
    stored = blocks * (4 / 8 + 2 / 128) + 2 * 2 * table
    assert sum(weight_bytes(job.model, job.dtypes).values()) == pytest.approx(stored, rel=1e-3)


def test_kimi_packs_the_routed_experts_alone() -> None:
    """Its list: lm_head, self_attn, shared_experts, and the MLP of the first layer."""
    job = served(load_model(KIMI), serving_options=(("tensor_parallel_size", 8),))
    assert (job.run.quant, job.run.quant_group_size) == ("w4a16", 32)
    packed = {
        linear.name
        for layer, _ in job.model.layers()
        for linear in layer.linears
        if is_quantised(linear, job.dtypes)
    }
    moe = next(layer.moe for layer, _ in job.model.layers() if layer.moe is not None)
    assert packed == {linear.name for linear in moe.expert.linears}
    routed = 60 * 384 * 3 * 7168 * 2048
    others = job.model.num_params - job.model.unloaded_params - routed
    stored = routed * (4 / 8 + 2 / 32) + 2 * others
    assert sum(weight_bytes(job.model, job.dtypes).values()) == pytest.approx(stored, rel=2e-3)
    # what expands latents is not quantised, so that it is a view
    assert absorbed_bytes(job.served, rank_model(job.model, 8)) == 0


def test_lists_name_matrices_or_patterns() -> None:
    base = load_model("Qwen/Qwen3-30B-A3B")

    def wide(*ignored: str) -> set[str]:
        stated = base.config | config(group(), ignore=list(ignored))
        layer = next(layer for layer, _ in with_unpacked(replace(base, config=stated)).layers())
        return {linear.name for linear in layer.linears if not linear.quantisable}

    router = wide()
    assert len(router) == 1
    assert wide("re:.*self_attn.*") == router | {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert wide("model.layers.0.self_attn.o_proj") == router | {"o_proj"}
    assert len(wide("re:.*experts.*down_proj")) == 2
    assert wide("lm_head") == router


def test_experts_in_16_bit_take_16_bit() -> None:
    base = load_model("Qwen/Qwen3-30B-A3B")
    stated = base.config | config(group(), ignore=["re:.*mlp.experts.*"])
    job = served(replace(base, config=stated))
    moe = next(layer.moe for layer, _ in job.model.layers() if layer.moe is not None)
    for linear in moe.expert.linears:
        assert linear_bytes(linear, job.dtypes) == 2 * linear.num_weights


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (KIMI, {"phase": "finetune", "serving": "transformers"}, "and nothing here trains"),
        (LLAMA_COPY, {"phase": "finetune", "serving": "transformers"}, "and nothing here trains"),
        (LLAMA_COPY, {"serving": "transformers"}, "which vllm and sglang serve"),
        (LLAMA_COPY, {"quant": "fp8"}, "got fp8"),
        ("Qwen/Qwen3-8B", {"quant": "w4a16", "serving": "transformers"}, "is how vllm or sglang"),
    ],
)
def test_what_cannot_read_it_is_refused_in_one_line(
    name: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        served(load_model(name), **settings)


def test_fp8_may_have_blocks_of_128() -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert has_fp8_blocks({"quantization_config": blocks})
    assert not has_fp8_blocks({"quantization_config": {"quant_method": "fp8"}})
    assert not has_fp8_blocks({})
