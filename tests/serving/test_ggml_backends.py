"""What llama.cpp needs on Macs, AMD's and Intel's GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.serving.ggml_backends import (
    BACKENDS,
    CUDA,
    METAL,
    FusedAttention,
    ggml_backend,
    metal_attention_bytes,
    metal_experts_bytes,
)
from whichlora.spec.options import OptionValue
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

LLAMA = "meta-llama/Llama-3.1-8B"
RUN = RunConfig(model=LLAMA, phase="inference", serving="llama-cpp", context=8192)
ONE = FusedAttention(
    tokens=512,
    cells=8192,
    streams=1,
    heads=32,
    key_heads=8,
    value_dim=128,
    key_row_bytes=2048,
    value_row_bytes=2048,
)


def predicted(gpu: str, run: RunConfig = RUN, **options: OptionValue) -> Prediction:
    options = {"file_type": "Q4_K_M", **options}
    asked = replace(run, serving_options=tuple(sorted(options.items())))
    device = find_target(gpu)
    return predict(load_model(run.model), asked, device, load_calibration(device))


def parts_of(prediction: Prediction) -> dict[str, int]:
    return dict(prediction.memory.breakdown)


def test_metal_reserves_the_last_cells_masked_blocks_and_parts_of_results() -> None:
    last_cells = 64 * (8 * (2048 + 2048) + 2 * 512)
    masked = (8192 // 64) * (512 // 8)
    parts = 4 * 32 * 32 * 32 * (128 + 2)
    assert metal_attention_bytes(ONE) == last_cells + masked + parts


def test_few_tokens_have_a_mask_of_narrow_blocks() -> None:
    last_cells = 64 * (8 * 4096 + 2 * 4)
    masked = (8192 // 32) * 4
    assert metal_attention_bytes(replace(ONE, tokens=4)) == (
        last_cells + masked + 4 * 32 * 4 * 32 * 130
    )


def test_experts_on_metal_have_a_row_of_numbers_each() -> None:
    assert metal_experts_bytes(128, 512) == 4 * 128 * 513 + 1032


def test_a_mac_has_no_context_and_a_copy_of_one_layers_cache() -> None:
    mac, cuda = parts_of(predicted("m4-max-128gb")), parts_of(predicted("rtx-4090-24gb"))
    assert mac["context"] == 0 < cuda["context"]
    assert mac["kv_cache"] == cuda["kv_cache"]
    longer = replace(RUN, context=131072)
    long_mac = parts_of(predicted("m4-max-128gb", longer))["activations"]
    long_cuda = parts_of(predicted("rtx-pro-6000-blackwell-workstation-96gb", longer))
    copy = 131072 * (1024 + 1024) * 2
    assert 0.8 < (long_mac - long_cuda["activations"]) / copy < 1


def test_a_rocm_buffer_is_as_large_as_cudas_and_its_context_is_said_to_be_unknown() -> None:
    amd, nvidia = predicted("rx-7900-xtx-24gb"), predicted("rtx-4090-24gb")
    assert parts_of(amd)["activations"] == parts_of(nvidia)["activations"]
    assert any("ROCm takes beside its buffers is not known: 500.0 MiB" in n for n in amd.notes)
    assert not any("is not known" in note for note in nvidia.notes)


def test_a_mac_fits_what_macos_lets_its_gpu_use() -> None:
    prediction = predicted("m1-16gb", file_type="F16")
    assert any("the GPU holds 23 of 33 layers" in note for note in prediction.notes)
    assert any("iogpu.wired_limit_mb" in note for note in prediction.notes)
    assert any("macOS lets the GPU use 11.84 GiB" in note for note in prediction.notes)
    assert not any("torch" in note for note in prediction.notes)


def test_intels_gpus_have_memory_and_no_times() -> None:
    prediction = predicted("arc-b580-12gb")
    assert prediction.serving is not None
    assert prediction.serving.starts
    assert prediction.serving.time is None
    assert any("no time: published speeds of one of Intel's GPUs" in n for n in prediction.notes)


@pytest.mark.parametrize(
    ("gpu", "model", "file_type", "published"),
    [
        # llama.cpp's discussions 15396 and 16578 as transcribed, lhl/strix-halo-testing issue 33
        ("m4-max-36gb", "openai/gpt-oss-20b", "MXFP4_MOE", 92.36),
        ("m2-ultra-192gb", "openai/gpt-oss-120b", "MXFP4_MOE", 85.6),
        ("strix-halo-128gb", "openai/gpt-oss-120b", "MXFP4_MOE", 47.41),
        ("rx-7900-xtx-24gb", LLAMA, "Q4_K_M", 105.81),
    ],
)
def test_a_published_speed_lies_inside_the_interval(
    gpu: str, model: str, file_type: str, published: float
) -> None:
    run = replace(RUN, model=model, prompt_len=32, max_new_tokens=64)
    prediction = predicted(gpu, run, file_type=file_type)
    assert prediction.serving is not None
    assert prediction.serving.time is not None
    least, most = prediction.serving.time.interval_tpot_s
    assert least < 1 / published < most


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        (
            "m4-pro-24gb",
            {"cache_type_k": "iq4_nl", "cache_type_v": "iq4_nl"},
            "cache_type_k: iq4_nl and cache_type_v iq4_nl have no fused attention on Metal",
        ),
        (
            "m4-pro-24gb",
            {"cache_type_v": "q8_0"},
            "cache_type_k: f16 and cache_type_v q8_0 have no fused attention on Metal",
        ),
        ("m4-pro-24gb", {"devices": 2}, "devices: m4-pro-24gb is one GPU, got 2; use 1"),
    ],
)
def test_what_a_backend_lacks_is_refused_in_one_line(
    gpu: str, options: dict[str, OptionValue], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        predicted(gpu, **options)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_heads_without_fused_attention_have_no_narrow_caches() -> None:
    run = replace(RUN, model="stabilityai/stablelm-2-12b", context=2048)
    with pytest.raises(ConfigError, match=r"give both f16$"):
        predicted("m4-max-128gb", run, cache_type_k="q8_0", cache_type_v="q8_0")
    with pytest.raises(ConfigError, match=r"leave flash_attn out$"):
        predicted("m4-max-128gb", run, flash_attn="on")
    assert predicted("m4-max-128gb", run).serving is not None


def test_values_that_are_a_part_of_the_keys_have_their_type() -> None:
    latents = replace(RUN, model="deepseek-ai/DeepSeek-V2-Lite")
    keys = parts_of(predicted("m4-max-128gb", latents, cache_type_k="q8_0"))
    both = predicted("m4-max-128gb", latents, cache_type_k="q8_0", cache_type_v="q8_0")
    assert keys == parts_of(both)


def test_caches_of_two_types_leave_fused_attention_where_nobody_asks_for_it() -> None:
    prediction = predicted("m4-pro-24gb", cache_type_k="q8_0")
    assert any("Metal has no fused attention for these" in note for note in prediction.notes)
    fused = predicted("m4-pro-24gb")
    assert parts_of(prediction)["activations"] > parts_of(fused)["activations"]


@pytest.mark.parametrize(
    ("serving", "gpu", "words"),
    [
        ("vllm", "mi300x-192gb", "vllm is predicted for NVIDIA's GPUs, not mi300x-192gb; use ll"),
        ("sglang", "m4-max-128gb", "sglang is predicted for NVIDIA's GPUs, not m4-max-128gb; us"),
        ("llama-cpp", "gaudi2-96gb", "llama-cpp is predicted for NVIDIA's GPUs, AMD's GPUs, Macs"),
    ],
)
def test_an_engine_that_is_not_predicted_names_one_that_is(
    serving: str, gpu: str, words: str
) -> None:
    run = RunConfig(model=LLAMA, phase="inference", serving=serving, context=8192)
    device = find_target(gpu)
    with pytest.raises(ConfigError) as error:
        predict(load_model(LLAMA), run, device, load_calibration(device))
    assert str(error.value).startswith(f"serving: {words}")


def test_the_command_names_devices_as_the_backend_does() -> None:
    prediction = predicted("rx-7900-xtx-24gb", devices=2)
    assert prediction.serving is not None
    assert "--device ROCm0,ROCm1" in prediction.serving.command


def test_every_backend_is_that_of_a_kind_of_device() -> None:
    assert ggml_backend(find_target("cpu")) is BACKENDS["cpu"]
    assert CUDA.has_flash(frozenset({300}), "q8_0", "f16")
    assert not METAL.has_flash(frozenset({300}), "f16", "f16")
