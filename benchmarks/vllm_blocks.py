"""Ask vLLM's own planner for blocks and concurrency, and keep its answers.

    python benchmarks/vllm_blocks.py    tests/golden/vllm_blocks.jsonl

Needs an installed vLLM, no GPU. Its groups of layers, bytes of a block, number of blocks and
largest concurrency are those of `v1/core/kv_cache_planning.py`, for seeded settings of models with
one and with two kinds of attention; `tests/serving/test_vllm.py` compares ours with them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whichlora.spec.architecture import ModelSpec
from whichlora.store.hub import load_model
from whichlora.units import GiB

KEPT = Path(__file__).parent.parent / "tests" / "golden" / "vllm_blocks.jsonl"
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mistral-7B-v0.1",
    "google/gemma-2-9b",
    "google/gemma-3-1b-pt",
    "google/gemma-3-4b-pt",
    "google/gemma-3-12b-pt",
    "google/gemma-3-27b-pt",
    "openai/gpt-oss-20b",
)
CASES = 12  # of each model


def specs(model: ModelSpec, block_size: int) -> dict[str, Any]:
    """vLLM's description of the cache of every layer."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    found: dict[str, Any] = {}
    for layer, count in model.layers():
        for attention in layer.attentions:
            shape = {
                "block_size": block_size,
                "num_kv_heads": attention.num_key_value_heads,
                "head_size": attention.head_dim,
                "dtype": torch.bfloat16,
            }
            for _ in range(count):
                window = attention.sliding_window
                found[f"layer.{len(found)}"] = (
                    FullAttentionSpec(**shape)
                    if window is None
                    else SlidingWindowSpec(sliding_window=window, dcp_sharded=False, **shape)
                )
    return found


def config(context: int, tokens_in_flight: int) -> Any:
    """What the planner reads of vLLM's configuration."""
    layout = SimpleNamespace(
        name="LBHNC", is_block_outermost=False, is_block_compact=True, is_layer_compact=True
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=context),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=tokens_in_flight,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
    )


def answers() -> Iterator[dict[str, Any]]:
    """Seeded settings with what the planner says of them."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    # neither a sparse cache nor strides, which need backends, change how many blocks there are
    planning.get_hisparse_kv_cache_groups = lambda *_: None
    planning.compute_layout_strides = lambda *_, **__: (0, 0, 0, 0, 0)
    draw = random.Random(1)
    for name in MODELS:
        model = load_model(name)
        for _ in range(CASES):
            case = {
                "model": name,
                "block_size": draw.choice((16, 32, 64)),
                "context": draw.randint(100, 131072),
                "tokens_in_flight": draw.choice((2048, 8192, 16384)),
                "pool_bytes": draw.randint(1, 80) * GiB + draw.randint(0, GiB // 2),
            }
            asked = config(case["context"], case["tokens_in_flight"])
            groups = planning.get_kv_cache_groups(asked, specs(model, case["block_size"]))
            planned = planning.get_kv_cache_config_from_groups(asked, groups, case["pool_bytes"])
            concurrency = get_max_concurrency_for_kv_cache_config(asked, planned)
            yield case | {"num_blocks": planned.num_blocks, "max_concurrency": concurrency}


def main() -> None:
    lines = [json.dumps(answer) for answer in answers()]
    KEPT.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{KEPT}: {len(lines)} answers")


if __name__ == "__main__":
    main()
