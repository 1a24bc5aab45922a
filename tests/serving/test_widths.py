"""Widths of MLPs and experts that GPUs cannot share."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.spec.checkpoint import scaled_together
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

SMALL, EXPERTS = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B"


def asked(
    engine: str, model: str, quant: str | None = None, release: str = "", **options: object
) -> Served:
    run = RunConfig(
        libraries=((engine, release),) if release else (),
        model=model,
        phase="inference",
        serving=engine,
        context=4096,
        quant=quant,  # type: ignore[arg-type]
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    return resolve(load_model(model), run, find_gpu("h100-sxm-80gb")).served


def refusal(engine: str, model: str, options: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as error:
        asked(engine, model, None, **options)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("engine", "model", "options", "message"),
    [
        (
            "vllm",
            SMALL,
            {"tp": 6},
            "tensor_parallel_size: the width 8960 of an MLP can't be divided by 6; use "
            "tensor_parallel_size 2 or 4, or tensor_parallel_size 1 with pipeline_parallel_size 6",
        ),
        (
            "sglang",
            SMALL,
            {"tp": 6},
            "tp_size: the width 8960 of an MLP can't be divided by 6; use tp_size 2 or 4, or "
            "tp_size 1 with pp_size 6",
        ),
        (  # all engines' GPUs share each expert
            "vllm",
            EXPERTS,
            {"tp": 2, "dp": 5},
            "tensor_parallel_size: the width 768 of each expert can't be divided by 10; use "
            "enable_expert_parallel true, or tensor_parallel_size 1 with pipeline_parallel_size 2",
        ),
    ],
)
def test_a_width_that_leaves_a_rest_is_refused(
    engine: str, model: str, options: dict[str, object], message: str
) -> None:
    assert refusal(engine, model, options) == message


@pytest.mark.parametrize(
    ("engine", "model", "options", "message"),
    [
        (
            "vllm",
            "Qwen/Qwen3-30B-A3B-FP8",
            {"tp": 8, "release": "0.10.0"},
            "tensor_parallel_size: the width 768 of each expert divided by 8 is 96, no multiple of "
            "the 128 that share a scale in fp8; use tensor_parallel_size 2, or "
            "enable_expert_parallel true, or tensor_parallel_size 1 with pipeline_parallel_size 8",
        ),
        (
            "vllm",
            "Qwen/Qwen2.5-14B-Instruct-AWQ",
            {"tp": 8},
            "tensor_parallel_size: the width 13824 of an MLP divided by 8 is 1728, no multiple of "
            "the 128 that share a scale in awq-int4; use tensor_parallel_size 2 or 4, or "
            "tensor_parallel_size 1 with pipeline_parallel_size 8",
        ),
        (  # its first layers are no experts, so that whole ones do not help
            "vllm",
            "deepseek-ai/DeepSeek-V3",
            {"tp": 32},
            "tensor_parallel_size: the width 18432 of an MLP divided by 32 is 576, no multiple of "
            "the 128 that share a scale in fp8; use tensor_parallel_size 2, 4, 8 or 16, or "
            "tensor_parallel_size 1 with pipeline_parallel_size 32",
        ),
    ],
)
def test_a_cut_through_what_shares_a_scale_is_refused(
    engine: str, model: str, options: dict[str, object], message: str
) -> None:
    assert refusal(engine, model, options) == message


@pytest.mark.parametrize(
    ("model", "quant", "options"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", None, {"tp": 8}),
        ("Qwen/Qwen2.5-72B-Instruct", "gptq-int4", {"tp": 2}),  # Qwen's copies are wider
        ("Qwen/Qwen3-30B-A3B-FP8", None, {"tp": 8, "ep": True}),
        ("Qwen/Qwen3-30B-A3B", "fp8", {"tp": 8}),  # made as it loads, with a scale of each tensor
        ("Qwen/Qwen3-30B-A3B", "awq-int4", {"tp": 8}),  # its kernel of experts halves the group
        ("RedHatAI/Qwen3-30B-A3B-FP8-dynamic", None, {"tp": 8}),  # a scale of each row
    ],
)
def test_what_shares_no_scale_is_divided(
    model: str, quant: str | None, options: dict[str, object]
) -> None:
    assert asked("vllm", model, quant, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "quant", "expected"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq-int4", 64),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq-int4", 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq-int4", 1),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8", 128),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8", 1),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["model.layers.0.mlp.down_proj"],
            },
            "fp8",
            1,
        ),
        ({}, "none", 1),
    ],
)
def test_what_shares_a_scale_is_read_of_the_config(
    stored: dict[str, object], quant: str, expected: int
) -> None:
    assert scaled_together({"quantization_config": stored}, quant, 64) == expected


def test_whole_experts_are_of_any_width() -> None:
    assert asked("vllm", EXPERTS, tp=2, dp=5, ep=True)
    assert asked("sglang", "deepseek-ai/DeepSeek-V3", "fp8", tp=8, ep=8)
