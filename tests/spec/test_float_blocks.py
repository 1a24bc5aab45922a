"""Weights as small floats in blocks: what checkpoints state, bytes, and what serves them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.memory.weights import linear_bytes, quantised_parts, weight_bytes
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.serving.vllm import start
from whichlora.serving.vllm_settings import cache_bytes
from whichlora.spec.checkpoint import (
    left_out,
    names_fp8_cache,
    scaled_together,
    stored_quant,
    with_unpacked,
)
from whichlora.spec.float_blocks import FLOAT_BLOCKS, cache_named, named_by_group, named_by_modelopt
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.units import GiB

FLOATS = {"type": "float", "num_bits": 4, "group_size": 16}
BASE = "Qwen/Qwen3-32B"
WIDE_CACHE = {"kv_cache_dtype": "bfloat16"}


def group(inputs: object = None, **weights: object) -> dict[str, object]:
    return {"targets": ["Linear"], "weights": FLOATS | weights, "input_activations": inputs}


def compressed(*groups: dict[str, object], **more: object) -> dict[str, Any]:
    numbered = {f"group_{number}": each for number, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": numbered, **more}


def of_modelopt(algorithm: str, **more: object) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def served(
    name: str, stored: dict[str, Any] | None = None, gpu: str = "b200", **settings: Any
) -> ResolvedRun:
    model = load_model(name)
    if stored is not None:
        model = replace(model, config={**model.config, "quantization_config": stored})
    asked: dict[str, Any] = {"phase": "inference", "serving": "vllm"} | settings
    return resolve(model, RunConfig(model=model.name, **asked), find_target(gpu))


@pytest.mark.parametrize(
    ("stored", "quant"),
    [
        (compressed(group(FLOATS)), "nvfp4"),
        (compressed(group()), "nvfp4a16"),
        (compressed(group({"type": "float", "num_bits": 8})), None),
        (compressed(group(FLOATS), group()), None),  # two forms in one checkpoint
        (compressed(group(num_bits=8, group_size=32)), "mxfp8"),
        (compressed(group(num_bits=8, group_size=None)), "fp8"),
        (of_modelopt("NVFP4"), "nvfp4"),
        (of_modelopt("W4A16_NVFP4"), "nvfp4a16"),
        (of_modelopt("MXFP8"), "mxfp8"),
        (of_modelopt("FP8"), "fp8"),
        (of_modelopt("MIXED_PRECISION"), None),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
    ],
)
def test_a_checkpoint_states_its_floats(stored: dict[str, Any], quant: str | None) -> None:
    assert stored_quant({"quantization_config": stored}) == quant


def test_names_of_groups_and_of_modelopt() -> None:
    assert named_by_group(group(FLOATS)) == "nvfp4"
    assert named_by_group({"weights": {"type": "int", "num_bits": 4, "group_size": 16}}) == ""
    assert named_by_modelopt({"quant_algo": "nvfp4"}) == "nvfp4"
    assert named_by_modelopt({"quant_algo": "W4A8_AWQ"}) == ""


@pytest.mark.parametrize(("quant", "bits"), [("nvfp4", 4.5), ("nvfp4a16", 4.5), ("mxfp8", 8.25)])
def test_weights_take_their_bits_and_a_byte_for_each_block(quant: str, bits: float) -> None:
    outputs, inputs = 14336, 4096
    parts = quantised_parts(inputs * outputs, quant, out_features=outputs)
    assert parts[:2] == FLOAT_BLOCKS[quant].parts(inputs * outputs)[:2]
    assert sum(parts[:2]) == inputs * outputs * bits / 8


def test_a_copy_of_nvidia_is_its_matrices_in_4_bits_and_table_and_head_in_16() -> None:
    job = served("nvidia/Qwen3-32B-NVFP4")
    assert job.run.quant == "nvfp4"
    table = 151936 * 5120
    matrices = job.model.num_params - 2 * table
    assert sum(weight_bytes(job.model, job.dtypes).values()) == pytest.approx(
        matrices * 4.5 / 8 + 4 * table, rel=1e-3
    )


def test_a_published_start_of_a_27b_in_nvfp4_on_a_5090() -> None:
    """Model loading 17.62 GiB, pool 6.67 GiB, 5.15 sequences of 32,768 tokens (vLLM 0.20.0).

    Source: log of sakamakismile/Qwen3.6-27B-Text-NVFP4-MTP, 2026-05-01, ModelOpt.
    """
    options = {
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.8,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "language_model_only": True,
    }
    job = served(
        "Qwen/Qwen3.6-27B",
        gpu="rtx-5090",
        quant="nvfp4",
        context=32768,
        libraries=(("vllm", "0.20.0"),),
        serving_options=tuple(sorted(options.items())),
    )
    wsl = replace(job.served.gpu, memory_bytes=round(31.84 * GiB))  # its total under Windows
    taken = start(replace(job.served, gpu=wsl))
    weights = sum(entry.num_bytes for entry in taken.entries if entry.part == "weights")
    assert weights / GiB == pytest.approx(17.62, abs=0.14)  # if its own config has mrope, too
    assert taken.pool.num_bytes / GiB == pytest.approx(6.67, rel=0.03)
    assert taken.pool.max_concurrency(32768) == pytest.approx(5.15, rel=0.03)


@pytest.mark.parametrize(
    "ignored",
    [
        ["re:.*self_attn.*"],
        ["*self_attn*"],
        [f"model.layers.{number}.self_attn" for number in range(64)],
        [f"model.layers.{number}.self_attn.{each}" for number in range(64) for each in "qkvo"],
    ],
)
def test_what_its_list_names_stays_in_16_bit(ignored: list[str]) -> None:
    names = [f"{each}_proj" if each[-2:-1] == "." else each for each in ignored]
    job = served(BASE, of_modelopt("NVFP4", exclude_modules=["lm_head", *names]))
    layer = next(layer for layer, _ in job.model.layers())
    wide = [
        each.name
        for each in layer.linears
        if linear_bytes(each, job.dtypes) == 2 * each.num_weights
    ]
    assert wide == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_linear_attention_is_named_by_its_own_module() -> None:
    model = load_model("RedHatAI/Qwen3.6-35B-A3B-NVFP4")
    kinds = {
        attention.kind: {each.quantisable for each in attention.linears}
        for layer, _ in with_unpacked(model).layers()
        for attention in layer.attentions
    }
    assert kinds == {"linear": {False}, "softmax": {True}}


def test_exceptions_of_both_files_of_modelopt() -> None:
    assert left_out({"quantization": {"exclude_modules": ["lm_head"]}}) == ["lm_head"]
    assert left_out({"ignore": ["a"], "modules_to_not_convert": None}) == ["a"]


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}, "fp8"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "4-bit"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quantization": {"kv_cache_quant_algo": "nvfp4"}}, "4-bit"),
        ({"kv_cache_quant_algo": "INT8"}, ""),
        ({"kv_cache_quant_algo": None}, ""),
        ({}, ""),
    ],
)
def test_a_checkpoint_may_name_a_cache(stored: dict[str, Any], named: str) -> None:
    assert cache_named(stored) == named
    assert names_fp8_cache({"quantization_config": stored}) is (named == "fp8")


@pytest.mark.parametrize(
    ("stored", "release", "options", "width"),
    [
        (of_modelopt("NVFP4", kv_cache_quant_algo="FP8"), "0.14.0", {}, 1),
        (of_modelopt("NVFP4", kv_cache_quant_algo="FP8"), "0.13.0", {}, 2),
        (of_modelopt("NVFP4", kv_cache_quant_algo="FP8"), "0.33.0", WIDE_CACHE, 2),
        (of_modelopt("NVFP4"), "0.33.0", {}, 2),
        (
            compressed(group(FLOATS), kv_cache_scheme={"type": "float", "num_bits": 8}),
            "0.14.0", {}, 2,
        ),
        (
            compressed(group(FLOATS), kv_cache_scheme={"type": "float", "num_bits": 8}),
            "0.15.0", {}, 1,
        ),
    ],
)  # fmt: skip
def test_the_cache_that_a_checkpoint_names_is_used_by_releases_that_listen(
    stored: dict[str, Any], release: str, options: dict[str, str], width: int
) -> None:
    job = served(
        BASE, stored, libraries=(("vllm", release),), serving_options=tuple(options.items())
    )
    assert cache_bytes(job.served) == width


def test_sglang_takes_the_cache_of_modelopt_alone() -> None:
    for stored, width in (
        (of_modelopt("NVFP4", kv_cache_quant_algo="FP8"), 1),
        (compressed(group(FLOATS), kv_cache_scheme={"type": "float", "num_bits": 8}), 2),
    ):
        job = served(BASE, stored, serving="sglang")
        pool = job.engine.start(job.served).pool
        assert pool.sequence_bytes(1024) == pytest.approx(1024 * 64 * 2 * 8 * 128 * width, rel=0.01)


def test_a_width_is_divided_into_whole_blocks() -> None:
    config = {"quantization_config": of_modelopt("NVFP4")}
    assert scaled_together(config, "nvfp4", 128) == 16
    assert scaled_together(config, "mxfp8", 128) == 32


def test_a_folder_of_modelopt_is_read_with_the_file_beside_its_config(tmp_path: Path) -> None:
    config = {k: v for k, v in load_model(BASE).config.items() if k != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert stored_quant(load_model(str(tmp_path)).config) == "nvfp4"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phase": "finetune", "serving": "transformers"}, r"4-bit floats \(nvfp4\), which vllm"),
        ({"serving": "transformers"}, "and nothing here trains or expands"),
        ({"quant": "awq-int4"}, "got awq-int4; name the 16-bit model"),
    ],
)
def test_what_cannot_read_it_is_refused_in_one_line(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served("nvidia/Qwen3-32B-NVFP4", **settings)


@pytest.mark.parametrize(
    ("engine", "stored", "heard", "silent"),
    [
        ("vllm", of_modelopt("NVFP4", kv_cache_quant_algo="NVFP4"), "0.33.0", "0.13.0"),
        ("sglang", of_modelopt("NVFP4", kv_cache_quant_algo="NVFP4"), "0.5.23", ""),
        ("vllm", compressed(group(FLOATS), kv_cache_scheme={"num_bits": 4}), "0.33.0", "0.14.0"),
    ],
)
def test_a_cache_in_4_bits_is_refused_unless_the_run_states_another(
    engine: str, stored: dict[str, Any], heard: str, silent: str
) -> None:
    settings: dict[str, Any] = {"serving": engine, "libraries": ((engine, heard),)}
    with pytest.raises(ConfigError, match="name a cache in 4 bits, which is not predicted; give"):
        served(BASE, stored, **settings)
    for dtype in ("bfloat16", "fp8_e4m3"):
        served(BASE, stored, serving_options=(("kv_cache_dtype", dtype),), **settings)
    if silent:
        job = served(BASE, stored, serving=engine, libraries=((engine, silent),))
        assert cache_bytes(job.served) == 2


@pytest.mark.parametrize(
    "stored",
    [
        of_modelopt("MIXED_PRECISION", quantized_layers={}),
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}},
        compressed(group(FLOATS), group(num_bits=8, group_size=None)),
        compressed(group(FLOATS), group()),
    ],
)
@pytest.mark.parametrize(
    "settings", [{}, {"quant": "none"}, {"phase": "finetune", "serving": "transformers"}]
)
def test_mixed_files_are_refused(stored: dict[str, Any], settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is stored in several forms beside each other"):
        served(BASE, stored, **settings)
    served(BASE, of_modelopt("FP8"))
    served(BASE, compressed(group(num_bits=8, group_size=None)))
