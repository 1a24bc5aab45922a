"""Runs that others measured and published, as our settings: each cell of a table here becomes an
`Observation` to compare a prediction with, or `LeftOut` with the reason.

What a source means by its columns is in `README.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from published.cells import MEMORY, Found, LeftOut, Line, Observation, Quantity
from published.fine_tuning import fine_tuning
from published.models import model_of
from published.sources import (
    bitsandbytes,
    fitcheck,
    fms,
    fsdp_qlora,
    generation_pages,
    glm4,
    neusight,
    not_ours,
    optimum,
    peft_comparison,
    qwen1_finetune,
    qwen1_inference,
    qwen_speed,
    torchtune,
    unsloth_notebooks,
)
from whichlora.store.gpus import find_gpu

gpu_of = cache(find_gpu)

FOLDER = Path(__file__).parent

SOURCES: dict[str, Callable[[Line], Iterator[Found]]] = {
    "autoawq_readme": not_ours("AutoAWQ's fused modules and preallocated cache"),
    "axolotl_examples": not_ours("counter and GPU not stated, printed as approximate"),
    "bitsandbytes_readme": bitsandbytes,
    "chatglm2_readme": not_ours("counter not stated, remote code"),
    "chatglm_finetuning_readme": not_ours("counter not stated, rounded to whole G, DeepSpeed"),
    "fitcheck_t4": fitcheck,
    "fms_acceleration_bench": fms,
    "fsdp_qlora": fsdp_qlora,
    "github_issues": not_ours("targets and quantisation not stated, or a loss kernel alone"),
    "glm4": glm4,
    "inference_pages": generation_pages,
    "jenga_reproduction": fine_tuning,
    "lambda_benchmark": fine_tuning,
    "litgpt_config_hub": fine_tuning,
    "litgpt_resource_tables": fine_tuning,
    "misc_docs": not_ours("compiled static-cache decode, lengths not stated"),
    "ms_swift_benchmark": not_ours("lengths mixed up to a limit: neither mean nor order is stated"),
    "neusight_labels": neusight,
    "nntile_overhead": fine_tuning,
    "optimum_benchmark": optimum,
    "peft_method_comparison": peft_comparison,
    "qwen15_hf_infer": qwen_speed,
    "qwen1_inference": qwen1_inference,
    "qwen25_speed": qwen_speed,
    "qwen2_speed": qwen_speed,
    "qwen3_speed": generation_pages,
    "qwen_readme_finetune": qwen1_finetune,
    "torchtune_docs": torchtune,
    "torchtune_readme": fine_tuning,
    "training_pages": fine_tuning,
    "transformers_docs": fine_tuning,
    "transformers_sdpa": fine_tuning,
    "transformers_sdpa_generate": generation_pages,
    "trl_notebooks": fine_tuning,
    "universal_llm_trainer": fine_tuning,
    "unsloth_notebooks": unsloth_notebooks,
}


def read(source: str) -> Iterator[Found]:
    """Every cell of one file."""
    with (FOLDER / f"{source}.csv").open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            yield from SOURCES[source](Line(source, number, row))


@cache
def read_all() -> tuple[Found, ...]:
    """Every cell of every file, in the order of the files."""
    return tuple(found for source in SOURCES for found in read(source))


__all__ = [
    "FOLDER",
    "MEMORY",
    "SOURCES",
    "Found",
    "LeftOut",
    "Observation",
    "Quantity",
    "gpu_of",
    "model_of",
    "read",
    "read_all",
]
