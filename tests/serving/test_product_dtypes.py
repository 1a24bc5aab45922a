"""Dtypes that a release multiplies in: of models that float16 breaks, and of quantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.defaults import with_precision
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.spec.run import Precision, Quant, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RUN = RunConfig(
    model="google/gemma-2-2b", phase="inference", serving="vllm", context=2048, precision="auto"
)


def served(run: RunConfig, gpu: str, release: str = "") -> Served:
    libraries = ((run.serving, release),) if release else ()
    return resolve(load_model(run.model), replace(run, libraries=libraries), find_gpu(gpu)).served


@pytest.mark.parametrize(
    ("model", "model_type", "release"),
    [
        ("google/gemma-2-2b", "gemma2", "0.33.0"),
        ("google/gemma-2-2b", "gemma2", "0.9.1"),
        ("google/gemma-3-4b-pt", "gemma3", "0.33.0"),
        ("google/gemma-3-1b-pt", "gemma3_text", "0.10.2"),
        ("zai-org/GLM-4-9B-0414", "glm4", "0.33.0"),
    ],
)
def test_vllm_refuses_float16_of_models_that_it_breaks(
    model: str, model_type: str, release: str
) -> None:
    run = replace(RUN, model=model)
    with pytest.raises(ConfigError) as error:
        served(run, "t4-16gb", release)
    assert str(error.value) == (
        f"precision: vllm {release} does not serve {model_type} in float16, and t4-16gb has no "
        "bf16; give precision fp32 and quant none, or a GPU of compute capability 8.0 or newer"
    )
    with pytest.raises(ConfigError, match=r"in float16; give precision bf16$"):
        served(replace(run, precision="fp16"), "l4-24gb", release)
    assert served(run, "l4-24gb", release)


@pytest.mark.parametrize(
    ("model", "release"),
    [
        ("google/gemma-2-2b", "0.9.0"),
        ("google/gemma-3-1b-pt", "0.10.1"),  # whose table has the tower's type alone
        ("Qwen/Qwen2.5-1.5B", "0.33.0"),
        ("google/gemma-2b", "0.33.0"),
    ],
)
def test_other_models_and_releases_take_float16(model: str, release: str) -> None:
    assert served(replace(RUN, model=model), "t4-16gb", release)


def test_what_vllm_takes_in_place_of_float16_starts() -> None:
    assert served(replace(RUN, precision="fp32"), "t4-16gb").dtypes.compute_bytes == 4
    assert served(replace(RUN, serving="sglang"), "t4-16gb").run.precision == "fp16"


@pytest.mark.parametrize(
    ("engine", "quant", "precision", "release", "accepted"),
    [
        ("vllm", "awq-int4", "fp32", "0.33.0", "bf16 or fp16"),
        ("vllm", "gptq-int4", "fp32", "0.33.0", "bf16 or fp16"),
        ("vllm", "fp8", "fp32", "0.33.0", "bf16 or fp16"),
        ("vllm", "awq-int4", "bf16", "0.5.2", "fp16"),
        ("vllm", "awq-int4", "bf16", "0.5.3", None),
        ("vllm", "awq-int4", "fp16", "0.5.2", None),
        ("vllm", "gptq-int4", "bf16", "0.4.2", "fp16"),
        ("vllm", "gptq-int4", "bf16", "0.4.3", None),
        ("vllm", "w4a16", "fp32", "0.33.0", None),  # whose config accepts it
        ("sglang", "awq-int4", "fp32", "0.5.23", "bf16 or fp16"),
        ("sglang", "awq-int4", "bf16", "0.5.23", None),
        ("sglang", "fp8", "fp16", "0.5.23", None),
    ],
)
def test_quantised_weights_are_multiplied_in_dtypes_that_have_kernels(
    engine: str, quant: Quant, precision: str, release: str, accepted: str | None
) -> None:
    run = replace(RUN, model="Qwen/Qwen2-7B", serving=engine, quant=quant, precision=precision)
    if accepted is None:
        assert served(run, "a100-sxm-80gb", release)
        return
    with pytest.raises(ConfigError) as error:
        served(run, "a100-sxm-80gb", release)
    assert str(error.value).startswith(f"precision: {engine} {release} multiplies {quant} in ")
    assert str(error.value).endswith(f"; give precision {accepted}, or another quant")


@pytest.mark.parametrize(
    ("engine", "precision", "accepted"),
    [("vllm", "bf16", "fp16 or fp32"), ("sglang", "bf16", "fp16"), ("sglang", "fp32", "fp16")],
)
def test_a_card_without_bf16_serves_in_other_dtypes(
    engine: str, precision: str, accepted: str
) -> None:
    run = replace(RUN, model="Qwen/Qwen2.5-1.5B", serving=engine, precision=precision)
    with pytest.raises(ConfigError, match=rf"which has no bf16; give precision {accepted}$"):
        served(run, "t4-16gb")
    assert served(run, "l4-24gb")
    assert served(replace(run, precision="fp16"), "t4-16gb")


def test_vllm_multiplies_mxfp4_in_bf16_alone() -> None:
    run = replace(RUN, model="openai/gpt-oss-20b", precision="fp16")
    with pytest.raises(ConfigError, match="multiplies mxfp4 in bfloat16, got float16; give prec"):
        served(run, "h100-sxm-80gb")
    assert served(replace(run, precision="bf16"), "h100-sxm-80gb")
    assert served(replace(run, serving="sglang"), "h100-sxm-80gb")


def test_a_run_without_precision_takes_the_one_that_a_release_multiplies_in() -> None:
    config = dict(load_model("meta-llama/Llama-2-7b-hf").config)
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    model = build(config, name="local/awq")

    def precision(asked: Precision, release: str) -> str:
        run = replace(RUN, model=model.name, precision=asked, libraries=(("vllm", release),))
        gpu = find_gpu("a100-sxm-80gb")
        return resolve(model, with_precision(run, gpu), gpu).run.precision

    assert precision("auto", "0.4.2") == "fp16"
    assert precision("auto", "0.5.3") == "bf16"
    with pytest.raises(ConfigError, match="got bfloat16; give precision fp16"):
        precision("bf16", "0.4.2")
