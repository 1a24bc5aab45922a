"""What vLLM takes for images beside the text, against what its logs state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.vllm_memory import start
from whichlora.serving.vllm_towers import (
    TOWER_INPUTS,
    TOWER_PASS,
    TOWER_VECTORS,
    block_width,
    profiled,
    tower_entries,
)
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB

QWEN = "Qwen/Qwen3.5-9B"
QWEN3_VL = "Qwen/Qwen3-VL-30B-A3B-Instruct"


def served(
    model: str, version: str = "0.19.0", context: int = 8192, gpu: str = "", **options: object
) -> Served:
    card: GpuSpec = find_gpu(gpu or "l40s-48gb")
    run = RunConfig(
        model=model,
        phase="inference",
        serving="vllm",
        context=context,
        libraries=(("vllm", version),),
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    return resolve(load_model(model), run, card).served


@pytest.mark.parametrize(
    ("model", "version", "context", "tokens", "count", "medium", "of_each"),
    [
        (QWEN, "0.18.1", 262_144, 2048, 1, "image", 16_384),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "0.23.0", 128_000, 2048, 1, "video", 114_688),
        (QWEN3_VL, "0.11.0", 65_536, 2048, 1, "video", 153_600),
        (QWEN3_VL, "0.13.0", 65_536, 2048, 1, "image", 16_384),
        ("google/gemma-4-E4B", "0.22.1", 32_768, 2048, 1, "video", 2496),
        ("google/gemma-4-31B", "0.26.0", 16_384, 8192, 3, "video", 2496),
        ("llava-hf/llava-v1.6-mistral-7b-hf", "0.10.2", 4096, 16_384, 5, "image", 2928),
    ],
)
def test_the_budget_of_the_encoder_is_that_of_published_logs(
    model: str, version: str, context: int, tokens: int, count: int, medium: str, of_each: int
) -> None:
    """Lines "Encoder cache will be initialized with a budget of …" of these releases."""
    gpu = "b200-180gb" if "31B" in model else "h100-sxm-80gb"
    found = profiled(served(model, version, context, gpu, max_num_batched_tokens=tokens))
    assert found is not None
    item = found[1]
    assert (found[0], item.medium, item.tokens) == (count, medium, of_each)


def test_vectors_of_a_video_are_spread_over_the_budget_of_the_encoder() -> None:
    """4 vectors of 2,048 numbers for each of its tokens, and what the tower gave before."""

    def spread(version: str) -> int:
        held, _, _ = tower_entries(served(QWEN3_VL, version, 65_536, max_num_batched_tokens=2048))
        return sum(entry.num_bytes for entry in held if entry.fact == TOWER_VECTORS)

    assert spread("0.11.0") == (153_600 + 12_288) * 4 * 2048 * 2
    assert spread("0.13.0") == 16_384 * 4 * 2048 * 2


def test_a_qwen_video_is_as_long_as_the_context() -> None:
    found = profiled(served("Qwen/Qwen2.5-VL-7B-Instruct", context=32_768))
    assert found is not None
    assert found[1].tokens == 2 * 16_384


def test_a_limit_of_no_video_leaves_the_largest_image() -> None:
    asked = served(
        "Qwen/Qwen2.5-VL-7B-Instruct", context=65_536, limit_mm_per_prompt='{"video": 0}'
    )
    found = profiled(asked)
    assert found is not None
    assert (found[1].medium, found[1].tokens) == ("image", 16_384)


def test_the_tower_of_qwen35_is_counted_as_published() -> None:
    """0.19.0 on an L40S: weights of 17.66 GiB, and a pool of 20.27."""
    card = replace(find_gpu("l40s-48gb"), memory_bytes=round(44.4 * GiB))
    options = (("enable_prefix_caching", False), ("max_num_batched_tokens", 8192))
    run = RunConfig(
        model=QWEN,
        phase="inference",
        serving="vllm",
        context=262_144,
        libraries=(("vllm", "0.19.0"),),
        serving_options=options,
    )
    taken = start(resolve(load_model(QWEN), run, card).served)
    weights = sum(entry.num_bytes for entry in taken.entries if entry.part == "weights")
    assert weights == pytest.approx(17.66 * GiB, rel=0.01)
    assert taken.pool.num_bytes == pytest.approx(20.27 * GiB, rel=0.02)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (QWEN, {"language_model_only": True}),
        (QWEN, {"limit_mm_per_prompt": '{"image": 0, "video": 0}'}),
        ("google/gemma-3-4b-pt", {"limit_mm_per_prompt": '{"image": 0}'}),
    ],
)
def test_a_model_that_is_asked_for_texts_alone_has_no_tower(
    model: str, options: dict[str, object]
) -> None:
    asked = served(model, **options)
    assert asked.model.started_tower is None
    assert asked.model.unloaded_params
    assert tower_entries(asked) == ([], [], [])


def test_a_tower_that_is_not_profiled_is_loaded() -> None:
    asked = served(QWEN, skip_mm_profiling=True)
    held, running, always = tower_entries(asked)
    assert not held
    assert not running
    assert [entry.fact for entry in always] == [TOWER_INPUTS]
    assert asked.model.started_tower is not None


def test_ranks_share_the_matrices_of_a_tower() -> None:
    whole, half = (
        sum(
            entry.num_bytes
            for entry in start(served(QWEN, tensor_parallel_size=ranks)).entries
            if entry.fact.what == "other weights"
        )
        for ranks in (1, 2)
    )
    assert half == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize("quant", ["fp8", "awq-int4", "gptq-int4"])
def test_quantised_files_have_the_tower_in_16_bit(quant: Quant) -> None:
    def other(quant: Quant) -> int:
        run = RunConfig(model=QWEN, phase="inference", serving="vllm", context=8192, quant=quant)
        asked = resolve(load_model(QWEN), run, find_gpu("l40s-48gb")).served
        entries = start(asked).entries
        return sum(entry.num_bytes for entry in entries if entry.fact.what == "other weights")

    assert other(quant) == other("none")


def test_a_tower_beside_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="language_model_only=true"):
        served(QWEN, pipeline_parallel_size=2)
    assert served(QWEN, pipeline_parallel_size=2, language_model_only=True)


def test_limits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit_mm_per_prompt: 'none' is not read"):
        served(QWEN, limit_mm_per_prompt="none")


def test_blocks_of_a_gated_tower_hold_more_than_plain_ones() -> None:
    """Qwen2.5-VL: two states, and four of its MLP's width; Qwen3.5: its attention, positions."""
    gated = load_model("Qwen/Qwen2.5-VL-7B-Instruct").tower
    plain = load_model(QWEN).tower
    assert gated is not None
    assert plain is not None
    assert block_width(gated) == 2 * 1280 + 4 * 3420
    held, projected, rotated = 3, 3, 4  # input, norm's result and output; queries and keys twice
    assert block_width(plain) == (held + projected + rotated + 1 + 1) * 1152
    summed = 1  # of all GPUs, each of which has half of the heads
    divided = (projected + rotated + 1) // 2
    assert block_width(plain, 2) == (held + divided + summed + 1) * 1152
    assert TOWER_PASS.kind == "estimate"


def tower_bytes(asked: Served) -> int:
    return sum(entry.num_bytes for entry in tower_entries(asked)[1] if entry.fact == TOWER_PASS)


def test_gemma_4_sees_one_frame_at_a_time_before_0_22() -> None:
    """0.19.2 on an RTX 5090: all that is not weights takes 2.2 GiB, 3 videos among it."""

    def of(version: str, gpu: str = "rtx-5090-32gb", tokens: int = 8192) -> int:
        asked = {"max_num_batched_tokens": tokens, "max_num_seqs": 8}
        return tower_bytes(served("google/gemma-4-31B", version, gpu=gpu, **asked))

    assert of("0.20.0") == of("0.20.0", tokens=16_384) < 0.3 * GiB
    assert of("0.20.0") < of("0.22.0") < of("0.22.0", "b200-180gb")


def test_experts_in_fp4_by_vllms_kernels_take_what_a_log_states() -> None:
    """0.19.2 on an RTX 5090: a pool of 9.08 GiB beside weights of 15.77."""
    model = "RedHatAI/gemma-4-26B-A4B-it-NVFP4"
    card = replace(find_gpu("rtx-5090-32gb"), memory_bytes=round(31.84 * GiB))

    def pool_bytes(**options: object) -> int:
        asked = {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 8192, "max_num_seqs": 2}
        run = RunConfig(
            model=model,
            phase="inference",
            serving="vllm",
            quant="nvfp4",
            context=98_304,
            libraries=(("vllm", "0.19.2"),),
            serving_options=tuple(sorted((asked | options).items())),  # type: ignore[arg-type]
        )
        return start(resolve(load_model(model), run, card).served).pool.num_bytes

    by_cutlass = pool_bytes(moe_backend="cutlass")
    assert by_cutlass == pytest.approx(9.08 * GiB, rel=0.035)
    assert pool_bytes() - by_cutlass > GiB
    assert pool_bytes(moe_backend="flashinfer_cutlass") == pool_bytes()
