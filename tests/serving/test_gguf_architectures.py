"""Architectures of llama.cpp beside checkpoints, and files that are published.

What llama.cpp plans of 55 models is in tests/benchmarks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.gguf import Tensor, tensors, unknown_matrices
from whichlora.serving.gguf_architectures import (
    ARCHITECTURES,
    MODEL_TYPES,
    architecture_of,
    known_architecture,
)
from whichlora.serving.llama_cpp_memory import cache_bytes, cache_types, cells_kept, placement
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.store.models import list_models
from whichlora.units import GiB

RUN = RunConfig(model="", phase="inference", serving="llama-cpp", context=8192)


def file_of(name: str, file_type: str) -> list[Tensor]:
    model = load_model(name)
    return tensors(model, file_type, architecture_of(model))


def served(name: str, **options: object) -> Served:
    run = replace(RUN, model=name, serving_options=tuple(sorted(options.items())))
    return resolve(load_model(name), run, A100).served


def cache_of(name: str, context: int) -> int:
    asked = served(name)
    return sum(cache_bytes(asked, cells_kept(asked, context, 1)))


def known_models() -> list[ModelSpec]:
    models = (load_model(record.hub_id) for record in list_models())
    return [each for each in models if each.task == "causal-lm" and known_architecture(each)]


def test_a_file_has_every_parameter_of_the_text_of_its_checkpoint() -> None:
    models = known_models()
    assert len(models) > 150
    for model in models:
        architecture = architecture_of(model)
        assert unknown_matrices(model, architecture) == []
        # a bias that experts are chosen with is a buffer of transformers
        elements = sum(
            tensor.row * tensor.num_rows
            for tensor in tensors(model, "F16", architecture)
            if tensor.name != "exp_probs_b"
        )
        assert elements == model.num_params - model.other_params, model.name


def test_each_architecture_has_a_model_that_shows_it() -> None:
    shown = {architecture_of(model).name for model in known_models()}
    assert {each.name for each in ARCHITECTURES} - shown == {"exaone4", "ernie4_5"}
    for model_type in ("exaone4", "ernie4_5"):
        model = build({"model_type": model_type}, name=model_type)
        architecture = architecture_of(model)
        elements = sum(each.row * each.num_rows for each in tensors(model, "F16", architecture))
        assert elements == model.num_params


def test_the_docs_name_every_type_of_models() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = text.split("by the `model_type` of a config:")[1].split("Of 55 models")[0]
    assert tuple(listed.replace(",", " ").split()) == MODEL_TYPES


def test_a_type_of_models_is_stated_once_or_by_what_differs() -> None:
    for model in known_models():
        fitting = [
            each
            for each in ARCHITECTURES
            if model.model_type in each.model_types and each.serves(model)
        ]
        assert len(fitting) == 1
    assert "granitemoehybrid" in MODEL_TYPES


@pytest.mark.parametrize(
    ("name", "file_type", "published_gib"),
    [  # as llama-bench prints them: llama.cpp pull requests 16991 and 19922
        ("openai/gpt-oss-20b", "MXFP4_MOE", 11.27),
        ("openai/gpt-oss-120b", "MXFP4_MOE", 59.02),
    ],
)
def test_files_have_the_published_sizes(name: str, file_type: str, published_gib: float) -> None:
    found = sum(tensor.num_bytes for tensor in file_of(name, file_type))
    assert found / GiB == pytest.approx(published_gib, abs=0.0051)


def test_experts_of_gpt_oss_are_in_four_bits_and_all_else_in_eight() -> None:
    found = file_of("openai/gpt-oss-20b", "MXFP4_MOE")
    types = {tensor.type for tensor in found if tensor.is_expert and tensor.suffix == ".weight"}
    assert types == {"MXFP4"}
    assert {tensor.type for tensor in found if not tensor.is_expert} == {"Q8_0", "F32"}
    assert sum(tensor.name == "attn_sinks" for tensor in found) == 24


def test_a_checkpoint_in_four_bits_is_converted_as_it_is() -> None:
    assert served("openai/gpt-oss-20b").options["file_type"] == "MXFP4_MOE"
    assert served("openai/gpt-oss-20b", file_type="BF16").options["file_type"] == "BF16"
    assert served("unsloth/gpt-oss-20b-BF16").options["file_type"] is None


def test_latents_are_cached_once_and_not_for_every_head() -> None:
    assert cache_of("deepseek-ai/DeepSeek-V3", 8192) == 61 * 8192 * (512 + 64) * 2
    names = {tensor.name for tensor in file_of("deepseek-ai/DeepSeek-V3", "F16")}
    assert {"attn_k_b", "attn_v_b"} <= names


def test_values_of_latents_have_the_type_of_the_keys_that_they_are_a_part_of() -> None:
    name = "deepseek-ai/DeepSeek-V2-Lite"
    both = served(name, cache_type_k="q8_0", cache_type_v="q8_0")
    assert cache_types(served(name, cache_type_k="q8_0")) == cache_types(both) == ("Q8_0", "Q8_0")
    assert cache_types(served(name, cache_type_v="q8_0")) == ("F16", "F16")
    with pytest.raises(ConfigError, match="cache_type_v: q8_0 needs flash attention"):
        served(name, cache_type_k="q8_0", flash_attn="off")


@pytest.mark.parametrize(
    ("name", "attending"),
    [
        ("Qwen/Qwen3.5-9B", 8),
        ("ibm-granite/granite-4.0-h-tiny", 4),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6),
        ("LiquidAI/LFM2-1.2B", 6),
    ],
)
def test_only_layers_that_attend_cache_more_of_a_longer_context(name: str, attending: int) -> None:
    short, long = cache_of(name, 4096), cache_of(name, 8192)
    widths = {
        2 * each.k_width
        for layer in layers_in_order(load_model(name))
        for each in layer.attentions
        if each.kind == "softmax"
    }
    assert long - short == 4096 * 2 * attending * widths.pop()
    assert short > long - short  # and states lie beside it


def test_chunks_of_llama_4_are_kept_as_windows_are() -> None:
    asked = served("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert dict(cells_kept(asked, 32768, 1).cells) == {None: 32768, 8192: 8704}


def test_experts_of_one_layer_stay_on_a_gpu_that_cannot_hold_the_rest() -> None:
    asked = served("zai-org/GLM-4.5-Air", file_type="Q4_K_M", batch_size=1, ubatch_size=1)
    card = replace(A100, memory_bytes=6000 * 1024**2, context_bytes=0)
    placed = placement(replace(asked, gpu=card))
    # llama-fit-params leaves 30 layers, and the experts of 29 of them on the host
    assert placed.layers == 30
    assert [each.layer for each in placed.moved] == list(range(18, 46))


def test_falcon_has_mixes_of_its_own() -> None:
    falcon = file_of("tiiuae/falcon-7b", "Q3_K_L")
    down = {tensor.type for tensor in falcon if tensor.name == "ffn_down"}
    assert down == {"Q4_K"}  # five bits elsewhere
    assert falcon[0].type == "Q8_0"  # six bits elsewhere, where the table is the head
