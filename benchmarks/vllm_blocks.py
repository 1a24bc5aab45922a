"""Ask vLLM's own planner for blocks and concurrency, and keep its answers.

    python benchmarks/vllm_blocks.py             tests/golden/vllm_blocks.jsonl
    python benchmarks/vllm_blocks.py --sparse    tests/golden/vllm_sparse_blocks.jsonl
    python benchmarks/vllm_blocks.py --stages    compare stages of pipelines, and write nothing

Needs an installed vLLM, no GPU. Its groups of layers, bytes of a block, number of blocks and
largest concurrency are those of `v1/core/kv_cache_planning.py`, for seeded settings of models with
one and with two kinds of attention; `tests/serving/test_vllm.py` compares ours with them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whichlora.predict.resolve import resolve
from whichlora.serving.block_groups import blocks, cached_layers
from whichlora.serving.stages import stages_of
from whichlora.serving.vllm_settings import STAGES, stage_layers
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
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
KEPT_SPARSE = KEPT.with_name("vllm_sparse_blocks.jsonl")
SPARSE_MODELS = ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5", "zai-org/GLM-5.2")
PACKED = "fp8_ds_mla"


def specs(model: ModelSpec, block_size: int) -> dict[str, Any]:
    """vLLM's description of the cache of every layer."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    found: dict[str, Any] = {}
    for layer in layers_in_order(model):
        for attention in layer.attentions:
            shape = {
                "block_size": block_size,
                "num_kv_heads": attention.num_key_value_heads,
                "head_size": attention.head_dim,
                "dtype": torch.bfloat16,
            }
            window = attention.sliding_window
            found[f"layer.{len(found)}"] = (
                FullAttentionSpec(**shape)
                if window is None
                else SlidingWindowSpec(sliding_window=window, dcp_sharded=False, **shape)
            )
    return found


def sparse_specs(model: ModelSpec, block_size: int, cache_dtype: str) -> dict[str, Any]:
    """The cache of every layer with sparse attention, and of every indexer.

    As `MLAAttention.get_kv_cache_spec` and `DeepseekV32IndexerCache.get_kv_cache_spec` state them,
    blocks aligned to rows by the sparse backends.
    """
    import torch
    from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    found: dict[str, Any] = {}
    shared = {"block_size": block_size, "num_kv_heads": 1, "max_tp_shards": 1}
    for number, layer in enumerate(layers_in_order(model)):
        for attention in layer.attentions:
            sparse = attention.sparse
            assert sparse is not None
            has_indexer = sparse.num_heads > 0
            latent = MLAAttentionSpec(
                **shared,
                head_size=attention.cache_elements - sparse.head_dim * has_indexer,
                dtype=torch.bfloat16 if cache_dtype == "auto" else torch.uint8,
                cache_dtype_str=cache_dtype,
                state_content_bytes=656 if cache_dtype == PACKED else None,
                topk_buffer_width=sparse.top_k,
                is_index_group_leader=has_indexer,
            )
            found[f"layer.{number}"] = align_blocks_to_rows(latent)
            if has_indexer:
                found[f"layer.{number}.indexer"] = MLAAttentionSpec(
                    **shared,
                    head_size=sparse.head_dim + sparse.head_dim // 128 * 4,
                    dtype=torch.uint8,
                    cache_role=SparseCacheRole.INDEXER,
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


def planner() -> Any:
    """vLLM's module that counts blocks."""
    from vllm.v1.core import kv_cache_planning as planning

    # neither a sparse cache nor strides, which need backends, change how many blocks there are
    planning.get_hisparse_kv_cache_groups = lambda *_: None
    planning.compute_layout_strides = lambda *_, **__: (0, 0, 0, 0, 0)
    return planning


def answers() -> Iterator[dict[str, Any]]:
    """Seeded settings with what the planner says of them."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    planning = planner()
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


def sparse_answers() -> Iterator[dict[str, Any]]:
    """As `answers`, of models with sparse attention in the three layouts of its cache."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    planning, draw = planner(), random.Random(7)
    for name in SPARSE_MODELS:
        model = load_model(name)
        for _ in range(CASES):
            case = {
                "model": name,
                "cache_dtype": draw.choice(("auto", "fp8_e4m3", PACKED)),
                "block_size": draw.choice((64, 128)),
                "context": draw.randint(100, 131072),
                "pool_bytes": draw.randint(1, 80) * GiB + draw.randint(0, GiB // 2),
            }
            asked = config(case["context"], 8192)
            layers = sparse_specs(model, case["block_size"], case["cache_dtype"])
            groups = planning.get_kv_cache_groups(asked, layers)
            planned = planning.get_kv_cache_config_from_groups(asked, groups, case["pool_bytes"])
            concurrency = get_max_concurrency_for_kv_cache_config(asked, planned)
            yield case | {"num_blocks": planned.num_blocks, "max_concurrency": concurrency}


def staged() -> Iterator[bool]:
    """Of seeded pipelines, whether layers and bytes of a block of every stage are vLLM's."""
    from vllm.distributed.utils import get_pp_indices

    planning, draw = planner(), random.Random(3)
    for name in MODELS:
        model = load_model(name)
        run = RunConfig(model=name, phase="inference", serving="vllm")
        served = resolve(model, run, find_gpu("b200-180gb")).served
        for _ in range(CASES):
            stages, block_size = draw.choice((2, 3, 4, 5, 6)), draw.choice((16, 32, 64))
            asked, whole = config(4096, 8192), specs(model, block_size)
            groups = planning.get_kv_cache_groups(asked, whole)
            places = [get_pp_indices(len(whole), stage, stages) for stage in range(stages)]
            theirs = []
            for begin, end in places:
                own = {f"layer.{place}": whole[f"layer.{place}"] for place in range(begin, end)}
                projected = planning._project_kv_cache_groups_to_worker(groups, own)
                theirs.append(planning._pool_bytes_per_block(asked, projected))
            options = {**served.options, STAGES: stages}
            layers = stage_layers(replace(served, options=options))
            ours = [
                blocks(
                    cached_layers(model),
                    block_size=block_size,
                    element_bytes=2,
                    tokens_in_flight=8192,
                    part=cached_layers(stage.part),
                ).block_bytes
                for stage in stages_of(model, layers)
            ]
            yield (list(layers), ours) == ([end - begin for begin, end in places], theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    asked = parser.parse_args()
    if asked.stages:
        right = list(staged())
        print(f"{sum(right)} of {len(right)} pipelines have vLLM's layers and blocks")
        return
    kept, found = (KEPT_SPARSE, sparse_answers()) if asked.sparse else (KEPT, answers())
    lines = [json.dumps(answer) for answer in found]
    kept.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{kept}: {len(lines)} answers")


if __name__ == "__main__":
    main()
