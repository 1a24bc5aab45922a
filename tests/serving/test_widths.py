"""Widths of MLPs and experts that GPUs cannot share."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

SMALL, EXPERTS = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B"


def asked(engine: str, model: str, quant: str | None = None, **options: object) -> Served:
    run = RunConfig(
        model=model,
        phase="inference",
        serving=engine,
        context=4096,
        quant=quant,  # type: ignore[arg-type]
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    return resolve(load_model(model), run, find_gpu("h100-sxm-80gb")).served


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
    with pytest.raises(ConfigError) as error:
        asked(engine, model, **options)
    assert str(error.value) == message


def test_whole_experts_are_of_any_width() -> None:
    assert asked("vllm", EXPERTS, tp=2, dp=5, ep=True)
    assert asked("sglang", "deepseek-ai/DeepSeek-V3", "fp8", tp=8, ep=8)
