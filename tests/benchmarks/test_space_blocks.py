"""Spaces judged block by block: nothing is lost, and only a lower bound rules a run out."""

from __future__ import annotations

import itertools
import os
import tracemalloc

import numpy as np
import pytest
from devices import CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from space_blocks import ParetoFront, blocks, judge_blocks

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import count_block
from whichlora.predict.judged import judge_block
from whichlora.predict.predict import predict
from whichlora.search.pareto import pareto
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

A100 = find_gpu("a100-sxm-80gb")
SMALL = find_gpu("rtx-3070-8gb")
MODELS = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B")
BASE = RunConfig(model=MODELS[0])


def test_a_space_is_every_combination_once() -> None:
    lists = {
        "model": MODELS[:2],
        "method": ("lora", "full"),
        "batch_size": (1, 2, 3),
        "seq_len": (64, 128),
        "r": (8, 16),
    }
    found = [
        block.run(position)
        for block in blocks(BASE, lists, [A100], load_model, block_runs=4)
        for position in range(int(np.prod(block.shape)))
    ]
    assert len(found) == len(set(found)) == 2 * 3 * 2 * (2 + 1)  # a full fine-tuning has no rank
    wanted = set(itertools.product(MODELS[:2], (1, 2, 3), (64, 128), (8, 16)))
    assert {(r.model, r.batch_size, r.seq_len, r.r) for r in found if r.method == "lora"} == wanted


def test_what_excludes_itself_is_no_candidate() -> None:
    lists = {"attn": ("sdpa", "flash_attention_2"), "precision": ("bf16", "fp32")}
    found = list(blocks(BASE, lists, [A100, find_gpu("rtx-2080-ti-11gb")], load_model))
    assert len(found) == 5
    flash = [block for block in found if block.job.run.attn == "flash_attention_2"]
    assert [(block.job.gpu.key, block.job.run.precision) for block in flash] == [(A100.key, "bf16")]


# Small spaces, so that brute force can ask about every run of many of them.
SMALL_SPACES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS).map(lambda name: (name,)),
        "method": st.sampled_from(("lora", "qlora", "dora", "full")).map(lambda name: (name,)),
        "gradient_checkpointing": st.sampled_from(((True,), (False,))),
        "attn": st.sampled_from((("sdpa",), ("eager",), ("flash_attention_2",))),
        "batch_size": st.lists(st.integers(1, 64), min_size=1, max_size=2, unique=True),
        "seq_len": st.lists(st.integers(16, 4096), min_size=1, max_size=2, unique=True),
        "r": st.lists(st.sampled_from((4, 16, 64)), min_size=1, max_size=2, unique=True),
    }
)


# WHICHLORA_SPACES=10000 for the long version
@settings(max_examples=int(os.environ.get("WHICHLORA_SPACES", "60")))
@given(
    lists=SMALL_SPACES,
    gpu=st.sampled_from((CPU, A100, SMALL)),
    num_bytes=st.none() | st.floats(1e9, 4e10),
    luck=st.floats(-1, 1),
)
def test_pruning_drops_no_run_whose_true_memory_is_within_the_limit(
    lists: dict[str, list[object]],
    gpu: GpuSpec,
    num_bytes: float | None,
    luck: float,
) -> None:
    """Brute force asks the scalar prediction of every run; truth lies anywhere in its interval."""
    calibration = prior_calibration(gpu)
    found = blocks(BASE, lists, [gpu], load_model, block_runs=8)
    for judged in judge_blocks(found, lambda _: calibration, limit_bytes=num_bytes):
        for position in sorted(set(range(judged.size)) - set(judged.possible.tolist())):
            run = judged.block.run(position)
            one = predict(load_model(run.model), run, gpu, calibration)
            low, high = one.memory.interval_bytes
            used = low + (high - low) * (luck + 1) / 2
            assert used > min(gpu.memory_bytes, num_bytes or gpu.memory_bytes)


@pytest.mark.slow
def test_a_large_space_needs_the_memory_of_one_block() -> None:
    lists = {"batch_size": range(1, 257), "seq_len": range(16, 528), "r": (8, 16)}
    found = judge_blocks(
        blocks(BASE, lists, [A100], load_model, block_runs=1 << 12),
        lambda _: prior_calibration(A100),
    )
    next(found)
    tracemalloc.start()
    num_runs = sum(judged.size for judged in found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_runs > 250_000
    assert peak < 16 * 2**20


def test_the_front_over_blocks_is_the_front_of_all_runs() -> None:
    lists = {"method": ("lora", "qlora"), "batch_size": (1, 2, 4, 8), "seq_len": (128, 512)}
    calibration = prior_calibration(A100)
    front = ParetoFront()
    points = []
    for judged in judge_blocks(
        blocks(BASE, lists, [A100], load_model, block_runs=3), lambda _: calibration
    ):
        front.add(judged)
        points += list(
            zip(judged.time_per_token_s.tolist(), judged.memory_bytes.tolist(), strict=True)
        )
    time_s, memory = (np.array(column) for column in zip(*points, strict=True))
    assert sorted(front.time_s) == sorted(time_s[pareto(time_s, memory)].tolist())
    run, gpu = front.runs[0]
    job_block = next(iter(blocks(run, {}, [A100], load_model)))
    again = judge_block(count_block(job_block.job, job_block.mesh), calibration)
    assert gpu == A100.key
    assert again.device_used_bytes.item() == front.memory_bytes[0]
    assert job_block.run(0) == run


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp"])
def test_an_engine_is_judged_as_run_by_run(engine: str) -> None:
    """Its time is that of a steady state, without the waits of those that begin at once."""
    calibration = prior_calibration(SMALL)
    base = RunConfig(model="Qwen/Qwen2.5-0.5B", phase="inference", serving=engine)
    lists = {"batch_size": (1, 8), "prompt_len": (200, 2000), "max_new_tokens": (300,)}
    for judged in judge_blocks(blocks(base, lists, [SMALL], load_model), lambda _: calibration):
        found = dict(zip(judged.possible.tolist(), judged.time_per_token_s, strict=True))
        for position in range(judged.size):
            one = predict(
                load_model(base.model), judged.block.run(position), SMALL, calibration
            ).serving
            assert one is not None
            assert one.starts == (position in found)
            if one.time is not None:
                assert found[position] == pytest.approx(1 / one.time.output_tokens_per_s, rel=0.06)
