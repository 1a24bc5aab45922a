"""Sparse attention in vLLM: blocks as its own planner counts them, layouts and buffers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Pool, Served
from whichlora.serving.rank import rank_model
from whichlora.serving.vllm_memory import pool_blocks, start
from whichlora.serving.vllm_sparse import (
    CHOSEN,
    SCORES,
    WORKSPACE,
    buffer_entries,
    cache_dtype,
    check,
    latent_share,
)
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, MiB

DEEPSEEK = "deepseek-ai/DeepSeek-V3.2"
PLANNED = Path(__file__).parents[1] / "golden" / "vllm_sparse_blocks.jsonl"
GPU_OF_LAYOUT = {  # where a layout is the one that `kv_cache_dtype` leads to
    "auto": ("h200-sxm-141gb", "auto"),
    "fp8_ds_mla": ("h200-sxm-141gb", "fp8"),
    "fp8_e4m3": ("b200-180gb", "fp8_e4m3"),
}


def asked(
    model: str = DEEPSEEK,
    gpu: str = "h200-sxm-141gb",
    context: int = 8192,
    libraries: tuple[tuple[str, str], ...] = (),
    **options: object,
) -> Served:
    run = RunConfig(
        model=model,
        phase="inference",
        serving="vllm",
        context=context,
        quant="fp8",
        libraries=libraries,
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    return resolve(load_model(model), run, find_gpu(gpu)).served


def test_blocks_and_concurrency_are_those_of_its_own_planner() -> None:
    """vLLM 0.33.0 `kv_cache_planning` answered; `benchmarks/vllm_blocks.py --sparse` asks again."""
    cases = [json.loads(line) for line in PLANNED.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 36
    for case in cases:
        gpu, dtype = GPU_OF_LAYOUT[case["cache_dtype"]]
        served = asked(
            case["model"],
            gpu,
            kv_cache_dtype=dtype,
            block_size=case["block_size"],
        )
        cut = pool_blocks(served, rank_model(served.model, 8))
        pool = Pool(
            num_bytes=case["pool_bytes"], block_bytes=cut.block_bytes, blocks_of=cut.blocks_of
        )
        assert pool.num_blocks == case["num_blocks"], case
        assert pool.max_concurrency(case["context"]) == case["max_concurrency"], case


@pytest.mark.parametrize(
    ("model", "gpu", "kv_cache_dtype", "layout"),
    [  # models/config.py:74-101, platforms/cuda.py:83, mla_attention.py:357
        (DEEPSEEK, "h200-sxm-141gb", "auto", "auto"),
        (DEEPSEEK, "h200-sxm-141gb", "fp8", "fp8_ds_mla"),
        (DEEPSEEK, "b200-180gb", "auto", "auto"),
        (DEEPSEEK, "b200-180gb", "fp8", "fp8"),
        (DEEPSEEK, "rtx-pro-6000-blackwell-server-96gb", "auto", "fp8_ds_mla"),
        ("zai-org/GLM-5", "h200-sxm-141gb", "auto", "auto"),
        ("zai-org/GLM-5", "b200-180gb", "auto", "fp8_e4m3"),
        ("zai-org/GLM-5", "b200-180gb", "bfloat16", "auto"),
        ("deepseek-ai/DeepSeek-V3", "b200-180gb", "auto", "auto"),
    ],
)
def test_the_card_and_the_model_choose_the_layout(
    model: str, gpu: str, kv_cache_dtype: str, layout: str
) -> None:
    assert cache_dtype(asked(model, gpu, kv_cache_dtype=kv_cache_dtype)) == layout


def test_a_packed_latent_is_read_with_its_scales() -> None:
    assert latent_share(asked(kv_cache_dtype="fp8")) * 576 == pytest.approx(656)
    assert latent_share(asked()) == 1.0


def test_an_indexer_is_whole_on_every_rank_and_its_keys_are_16_bit() -> None:
    served = asked()
    whole, rank = (
        [
            linear
            for layer, _ in rank_model(served.model, size).layers()
            for attention in layer.attentions
            for linear in attention.linears
            if not linear.active
        ]
        for size in (1, 8)
    )
    assert whole == rank
    assert {linear.name for linear in rank if linear.quantisable} == {"wq_b"}


def test_workspaces_grow_with_the_context_and_are_taken_once() -> None:
    """Sizes of the comments in flashmla_sparse.py:340 and indexer.py:926: 900 and 825 MB."""
    served = asked(context=163840, kv_cache_dtype="fp8")
    rank = rank_model(served.model, 8)
    sizes = {
        entry.fact: entry.num_bytes
        for entry in buffer_entries(served, rank, tokens=8192, experts_bytes=0)
    }
    assert sizes[CHOSEN] == 64 * MiB
    assert sizes[WORKSPACE] > 5 * 163840 * 576 * 2
    plain = asked(context=163840)
    (_, workspace) = buffer_entries(plain, rank, tokens=8192, experts_bytes=0)
    assert workspace.num_bytes == 865075200 + MiB
    (_, workspace) = buffer_entries(plain, rank, tokens=8192, experts_bytes=GiB)
    assert workspace.num_bytes == GiB


def test_a_dense_model_has_none_of_it() -> None:
    served = asked("deepseek-ai/DeepSeek-V3")
    assert not buffer_entries(served, served.model, tokens=8192, experts_bytes=GiB)
    facts = {entry.fact for entry in start(replace(served)).entries}
    assert not facts & {CHOSEN, SCORES}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"libraries": (("vllm", "0.20"),)}, "vllm 0.20 is not predicted for the sparse"),
        ({"gpu": "a100-sxm-80gb"}, "no sparse attention for compute capability 8.0"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "reads no fp8_e5m2"),
        ({"block_size": 16}, "16 is no multiple of 64"),
        ({"model": "deepseek-ai/DeepSeek-V3", "kv_cache_dtype": "fp8_ds_mla"}, "is a layout of"),
    ],
)
def test_what_has_no_kernel_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(asked(**settings))  # type: ignore[arg-type]
