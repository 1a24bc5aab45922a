"""vLLM's pool: beside what its logs state, term by term, and by its own rules."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from devices import A100
from hypothesis import given
from hypothesis import strategies as st

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory import allocator
from whichlora.memory.entries import Fact
from whichlora.memory.weights import linear_bytes
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Pool, Served, Start
from whichlora.serving.block_groups import CachedLayers, blocks, cached_layers
from whichlora.serving.profile_pass import (
    ATTENTION_PASS,
    EXPERTS_PASS,
    MASK_BUFFER,
    SAMPLER_PASS,
    mask_buffer_entries,
)
from whichlora.serving.rank import rank_model, rotary_bytes, slot_tensors
from whichlora.serving.vllm import SCRIPTED_TYPE_S, WRAPPED_PRODUCT_S, command, notes, stepping
from whichlora.serving.vllm_compiled import TRIED_TABLE, held_entries, trial_entries
from whichlora.serving.vllm_entries import HOST, STATE_KERNELS, WORKSPACE
from whichlora.serving.vllm_latents import absorbed_bytes
from whichlora.serving.vllm_memory import (
    STATES_GRAPH_BYTES,
    captured_sizes,
    expanded_bytes,
    graph_bytes,
    load_of_start,
    pool_blocks,
    start,
)
from whichlora.serving.vllm_settings import max_num_batched_tokens, max_num_seqs
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import Quant, RunConfig, Serve
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, MiB

LLAMA = "meta-llama/Llama-3.1-8B"
PLANNED = Path(__file__).parents[1] / "golden" / "vllm_blocks.jsonl"
RUN = RunConfig(model=LLAMA, phase="inference", serving="vllm", context=8192)


def served(run: RunConfig = RUN, gpu: GpuSpec = A100, **options: object) -> Served:
    run = replace(run, serving_options=tuple(sorted(options.items())))
    return resolve(load_model(run.model), run, gpu).served


def started(run: RunConfig = RUN, gpu: GpuSpec = A100, **options: object) -> Start:
    return start(served(run, gpu, **options))


def slot_bytes(model: ModelSpec, size: int, rank: int, *, has_tables: bool) -> int:
    return sum(slot_tensors(model, size, rank, tables=int(has_tables)))


def part_bytes(taken: Start, *parts: str) -> int:
    return sum(entry.num_bytes for entry in taken.entries if entry.part in parts)


@pytest.mark.parametrize(
    ("model", "version", "workspace_mib", "ranks", "weights_gib", "peak_gib"),
    [  # "model weights take" and "PyTorch activation peak memory takes" of published logs
        ("meta-llama/Meta-Llama-3-8B", "0.6.6", 32, 1, 14.96, 1.26),  # an H100
        ("Qwen/Qwen3-8B", "0.8.5", 8.125, 4, 3.85, 1.45),  # one of four cards of 22 GB
    ],
)
def test_weights_and_the_sampler_are_those_of_published_logs(
    model: str, version: str, workspace_mib: float, ranks: int, weights_gib: float, peak_gib: float
) -> None:
    taken = started(
        replace(RUN, model=model, libraries=(("vllm", version),)),
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        tensor_parallel_size=ranks,
    )
    peak = part_bytes(taken, "logits_and_loss") + workspace_mib * MiB
    assert part_bytes(taken, "weights") / GiB == pytest.approx(weights_gib, abs=0.035)
    assert peak / GiB == pytest.approx(peak_gib, abs=0.005)


@pytest.mark.parametrize("quant", ["gptq-int4", "awq-int4", "gptq-int8"])
@pytest.mark.parametrize("serving", ["vllm", "sglang"])
def test_experts_of_a_checkpoint_are_loaded_in_its_codes(serving: str, quant: str) -> None:
    run = replace(RUN, model="mistralai/Mixtral-8x7B-v0.1", serving=serving)
    sixteen, few = (
        sum(layer_bytes(resolve(load_model(run.model), stored, A100).served))
        for stored in (run, replace(run, quant=quant))  # type: ignore[arg-type]
    )
    bits = 8 if quant == "gptq-int8" else 4
    assert bits / 16 < few / sixteen < 1.1 * bits / 16


def layer_bytes(asked: Served) -> list[int]:
    return [
        count * linear_bytes(linear, asked.dtypes)
        for layer, count in asked.model.layers()
        for linear in layer.linears
    ]


@pytest.mark.parametrize(
    ("model", "capability", "version", "loaded_gib"),
    [  # "Model loading took" of published logs
        ("openai/gpt-oss-20b", "9.0", "0.11.0", 13.47),  # Triton's kernels on an H100
        ("openai/gpt-oss-120b", "9.0", "0.14.1", 64.38),
        ("openai/gpt-oss-120b", "8.0", "0.10.1", 65.97),  # Marlin's
    ],
)
def test_experts_in_mxfp4_are_stored_as_their_kernels_read_them(
    model: str, capability: str, version: str, loaded_gib: float
) -> None:
    run = replace(RUN, model=model, quant="mxfp4", libraries=(("vllm", version),))
    taken = started(run, replace(find_gpu("h100-sxm-80gb"), compute_capability=capability))
    assert part_bytes(taken, "weights") / GiB == pytest.approx(loaded_gib, abs=0.06)


@pytest.mark.parametrize(("version", "is_marlin"), [("0.11.1", True), ("0.12.0", False)])
def test_without_triton_kernels_marlin_pads_experts_before_0_12(
    version: str, is_marlin: bool
) -> None:
    """github.com/vllm-project/vllm/issues/27508: 1.71 GiB of a pool, not the 3.5 of Triton's."""
    model, gpu = "openai/gpt-oss-120b", find_gpu("h100-sxm-80gb")
    lacking = (("vllm", version), ("triton_kernels", "0"))
    run = replace(RUN, model=model, quant="mxfp4", libraries=lacking)
    taken = part_bytes(started(run, gpu), "weights") / GiB
    assert taken == pytest.approx(65.97 if is_marlin else 64.38, abs=0.06)


def test_what_a_first_graph_of_states_loads_counts_twice_since_0_18() -> None:
    def kernels(version: str, gpu: str = "rtx-5090-32gb", **options: object) -> int:
        run = replace(RUN, model="Qwen/Qwen3.5-9B", libraries=(("vllm", version),))
        return sum(
            entry.num_bytes
            for entry in started(run, find_gpu(gpu), **options).entries
            if entry.fact is STATE_KERNELS
        )

    assert kernels("0.18.0") == kernels("0.20.0") == STATES_GRAPH_BYTES
    assert kernels("0.17.0") == kernels("0.20.0", enforce_eager=True) == kernels("0.29.0") == 0
    assert kernels("0.20.0", "l40s-48gb") == 0


def test_exponents_of_the_file_are_not_kept_since_0_25() -> None:
    kept, freed = (
        part_bytes(
            started(
                replace(
                    RUN,
                    model="openai/gpt-oss-20b",
                    quant="mxfp4",
                    libraries=(("vllm", version),),
                ),
                find_gpu("h100-sxm-80gb"),
            ),
            "weights",
        )
        for version in ("0.24.0", "0.25.0")
    )
    assert kept - freed == 24 * 32 * (5760 + 2880) * 2880 // 32


@pytest.mark.parametrize(("tokens", "peak_gib"), [(20000, 2.07), (29000, 2.99)])
def test_without_chunked_prefill_the_mlp_over_the_whole_length_is_the_peak(
    tokens: int, peak_gib: float
) -> None:
    run = replace(RUN, libraries=(("vllm", "0.6.4"),))
    taken = started(run, max_num_batched_tokens=tokens, max_num_seqs=256)
    peak = part_bytes(taken, "activations", "logits_and_loss") + 8.125 * MiB
    assert peak / GiB == pytest.approx(peak_gib, abs=0.01)


def test_the_pool_is_what_is_left_of_a_share_of_the_gpu() -> None:
    taken = started()
    held = sum(entry.num_bytes for entry in taken.entries if entry.part != "kv_cache")
    assert taken.pool.num_bytes == taken.budget_bytes - held
    assert taken.pool.block_bytes == 2 * MiB  # 32 layers, 2 x 8 heads x 128 x 16 tokens x 2 bytes
    more = started(gpu_memory_utilization=0.95)
    share = more.budget_bytes - taken.budget_bytes
    assert more.pool.num_bytes - taken.pool.num_bytes == share
    assert share == pytest.approx(0.03 * A100.memory_bytes, abs=2)


def test_fp8_keys_and_values_double_the_tokens() -> None:
    whole, narrow = started().pool, started(kv_cache_dtype="fp8").pool
    assert narrow.block_bytes * 2 == whole.block_bytes
    assert narrow.num_blocks in (2 * whole.num_blocks, 2 * whole.num_blocks + 1)


def test_older_releases_take_less_and_leave_graphs_outside() -> None:
    taken = started(replace(RUN, libraries=(("vllm", "0.11.0"),)))
    assert taken.budget_bytes == -(-9 * A100.memory_bytes // 10)
    assert taken.outside_bytes > 0
    assert started().outside_bytes == 0
    run = replace(RUN, model="Qwen/Qwen2.5-7B", libraries=(("vllm", "0.22.0"),))
    eager, captured = started(run, enforce_eager=True), started(run, restarted=True)
    graphs = graph_bytes(served(run), load_model(run.model))
    assert eager.pool.num_bytes - captured.pool.num_bytes == graphs


@pytest.mark.parametrize(("version", "reserves"), [("0.23.0", True), ("0.28.0", False)])
def test_the_newer_runner_reserves_no_graphs_before_029(version: str, reserves: bool) -> None:
    taken = started(replace(RUN, libraries=(("vllm", version),)))
    assert (taken.outside_bytes == 0) is reserves
    assert started().outside_bytes == 0


def test_a_first_start_alone_keeps_room_for_trials_of_the_compiler() -> None:
    def facts(run: RunConfig = RUN, **options: object) -> set[Fact]:
        return {entry.fact for entry in started(run, **options).entries}

    assert TRIED_TABLE in facts()
    assert TRIED_TABLE not in facts(enforce_eager=True)
    assert TRIED_TABLE not in facts(restarted=True)
    assert TRIED_TABLE not in facts(replace(RUN, libraries=(("vllm", "0.16.0"),)))
    assert "restarted" not in command(served(restarted=True))


@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "logged_gib"),
    [
        ("Qwen/Qwen2.5-3B", "rtx-3090-24gb", 2048, 0.59),
        ("Qwen/Qwen2.5-0.5B", "rtx-4090-24gb", 2048, 0.25),
        ("Qwen/Qwen2.5-0.5B", "rtx-4090-24gb", 8192, 0.31),
    ],
)
def test_trials_take_what_logs_of_first_starts_state(
    model: str, gpu: str, tokens: int, logged_gib: float
) -> None:
    run = replace(RUN, model=model, libraries=(("vllm", "0.27.1"),))
    trials = trial_entries(
        served(run, find_gpu(gpu), max_num_batched_tokens=tokens), load_model(model)
    )
    assert max(part[0].num_bytes for part in trials) / GiB == pytest.approx(logged_gib, abs=0.005)


def test_the_tried_table_stays_where_states_are_smaller_than_cublas_workspace() -> None:
    def held(model: str, version: str = "0.27.1", **options: object) -> int:
        run = replace(RUN, model=model, libraries=(("vllm", version),))
        return sum(e.num_bytes for e in held_entries(served(run, **options), load_model(model)))

    assert held("Qwen/Qwen2.5-0.5B") / GiB == pytest.approx(0.25, abs=0.005)
    assert not held("Qwen/Qwen2.5-0.5B", max_num_batched_tokens=8192)
    assert not held("Qwen/Qwen2.5-0.5B", version="0.26.0")
    assert not held(LLAMA)


@pytest.mark.parametrize(
    ("model", "options", "logged_gib"),
    [
        ("Qwen/Qwen2.5-7B", {"max_num_seqs": 128, "max_cudagraph_capture_size": 256}, 0.37),
        ("Qwen/Qwen2.5-7B", {}, 0.53),
        ("Qwen/Qwen3.5-9B", {}, 0.78),
    ],
)
def test_graphs_are_about_what_logs_estimate(
    model: str, options: dict[str, int], logged_gib: float
) -> None:
    """Logs of 0.22.0, 0.24.0 and 0.19.0; 35 sizes, and 19 as a whole, in the first."""
    run = replace(RUN, model=model, libraries=(("vllm", "0.22.0"),))
    taken = graph_bytes(served(run, find_gpu("l40s-48gb"), **options), load_model(model))
    assert taken == pytest.approx(logged_gib * GiB, rel=0.08)


@pytest.mark.parametrize(("most", "step", "sizes"), [(512, 8, 67), (512, 16, 51), (16, 16, 5)])
def test_sizes_that_are_captured_are_those_of_published_logs(
    most: int, step: int, sizes: int
) -> None:
    assert captured_sizes(most, step_beyond=step) == sizes


def test_a_slot_of_an_8b_has_84_mb_at_rank_16_beside_embeddings_and_head() -> None:
    model = load_model(LLAMA)
    outside = 2 * (model.vocab_size + model.hidden_size) * 16 * 2
    assert slot_bytes(model, 1, 16, has_tables=False) == 83_886_080
    slot = slot_bytes(model, 1, 16, has_tables=True)
    assert slot == 83_886_080 + outside
    eager = {"enforce_eager": True}  # graphs are captured twice, with adapters and without
    with_slots = started(enable_lora=True, max_loras=4, max_lora_rank=16, **eager)
    less = started(**eager).pool.num_bytes - with_slots.pool.num_bytes
    assert 4 * slot <= less < 4 * slot + 20 * MiB  # in whole segments


@pytest.mark.parametrize(("version", "sees"), [("0.6.4", True), ("0.7.2", False), ("0.8.0", True)])
def test_the_profile_of_some_releases_does_not_see_slots(version: str, sees: bool) -> None:
    run = replace(RUN, libraries=(("vllm", version),))
    without, with_slots = started(run), started(run, enable_lora=True, max_loras=8)
    slots = part_bytes(with_slots, "adapters")
    less = without.pool.num_bytes - with_slots.pool.num_bytes
    assert slots <= less < slots + 2 * MiB if sees else less == 0
    assert with_slots.outside_bytes - without.outside_bytes == (0 if sees else slots)


@pytest.mark.parametrize(
    ("model", "ranks", "slots", "rank", "matrices", "with_tables"),
    [  # bytes that `create_lora_weights` of vLLM 0.33.0's own layers allocates on meta tensors
        (LLAMA, 1, 4, 64, 1_342_177_280, 1_477_705_728),
        (LLAMA, 2, 2, 8, 56_623_104, 65_093_632),
        ("Qwen/Qwen3-8B", 2, 2, 8, 60_162_048, 70_148_096),
        ("Qwen/Qwen2.5-7B", 1, 1, 16, 80_740_352, 90_701_824),
        ("meta-llama/Llama-3.2-1B", 1, 1, 16, 22_544_384, 30_883_840),
        ("Qwen/Qwen3-0.6B", 2, 2, 8, 13_303_808, 23_093_248),
    ],
)
def test_slots_are_those_that_its_own_layers_allocate(
    model: str, ranks: int, slots: int, rank: int, matrices: int, with_tables: int
) -> None:
    spec = load_model(model)
    assert slots * slot_bytes(spec, ranks, rank, has_tables=False) == matrices
    assert slots * slot_bytes(spec, ranks, rank, has_tables=True) == with_tables


@pytest.mark.parametrize(
    ("model", "version", "has_tables"),
    [
        ("Qwen/Qwen2.5-7B", "0.33.0", False),
        ("Qwen/Qwen3-8B", "0.15.1", False),
        ("Qwen/Qwen3-8B", "0.16.0", True),
        ("mistralai/Mistral-7B-v0.3", "0.6.6", True),
    ],
)
def test_embeddings_and_head_have_slots_where_the_class_of_that_release_lists_them(
    model: str, version: str, has_tables: bool
) -> None:
    run = replace(RUN, model=model, context=4096, libraries=(("vllm", version),))
    slots = part_bytes(started(run, enable_lora=True, max_lora_rank=64), "adapters")
    assert slots == slot_bytes(load_model(model), 1, 64, has_tables=has_tables)


@pytest.mark.parametrize(("slots", "loaded_gib"), [(1, 7.63), (16, 8.78), (64, 12.49)])
def test_slots_take_whole_segments_and_a_shared_table_twice(slots: int, loaded_gib: float) -> None:
    """Qwen3-4B under 0.27.1: "Model loading took" of three published logs."""
    run = replace(RUN, model="Qwen/Qwen3-4B", libraries=(("vllm", "0.27.1"),))
    taken = started(run, enable_lora=True, max_loras=slots)
    assert part_bytes(taken, "weights", "adapters") / GiB == pytest.approx(loaded_gib, abs=0.012)


def test_a_head_of_its_own_has_no_slots_of_a_table() -> None:
    def slots_of(version: str, model: str = "Qwen/Qwen3-4B") -> int:
        run = replace(RUN, model=model, libraries=(("vllm", version),))
        return part_bytes(started(run, enable_lora=True), "adapters")

    table = (load_model("Qwen/Qwen3-4B").vocab_size + 2560) * 16 * 2
    assert slots_of("0.27.0") - slots_of("0.28.0") == table
    assert slots_of("0.28.0") - slots_of("0.15.1") == 2 * table
    assert slots_of("0.27.0", "Qwen/Qwen3-8B") == slots_of("0.28.0", "Qwen/Qwen3-8B")


def test_graphs_are_captured_with_adapters_and_without() -> None:
    asked, rank = served(), load_model(LLAMA)
    with_slots = served(enable_lora=True)
    one = graph_bytes(asked, rank)
    shared = one - 33 * 51 * 300 * 1024 - 35 * MiB  # whole steps of up to 256 sequences
    assert graph_bytes(with_slots, rank) == 2 * (one - shared) + shared
    older = replace(RUN, libraries=(("vllm", "0.11.0"),))
    assert graph_bytes(served(older, enable_lora=True), rank) == graph_bytes(served(older), rank)


def test_an_unmerged_adapter_has_a_slot_of_the_next_rank() -> None:
    run = replace(RUN, method="lora", serve="as-trained", r=24)
    slot = slot_bytes(load_model(LLAMA), 1, 32, has_tables=True)
    assert part_bytes(started(run), "adapters") == slot


def test_a_common_prefix_is_kept_once() -> None:
    long = replace(RUN, prompt_len=8000, max_new_tokens=192)
    pool = started(long).pool
    whole, blocks_of_one = pool.num_sequences(8192), pool.blocks_of(8192)
    assert whole == pool.num_blocks // blocks_of_one
    shared = started(long).pool
    half = served(replace(long, shared_prompt_fraction=0.5)).shared_tokens
    assert shared.shared_of(half) == 4000 // 16
    own = blocks_of_one - 250
    assert shared.num_sequences(8192, half) == (pool.num_blocks - 250) // own > 1.9 * whole
    # the last token of a prompt is computed for each: of 500 blocks the last is not shared
    whole_prompt = served(replace(long, shared_prompt_fraction=1.0)).shared_tokens
    assert shared.shared_of(whole_prompt) == 499
    for off in (
        started(long, enable_prefix_caching=False),
        started(replace(long, libraries=(("vllm", "0.6.6"),))),
    ):
        assert off.pool.shared_of(half) == 0


@given(num_blocks=st.integers(0, 500), of_one=st.integers(1, 50), shared=st.integers(0, 50))
def test_sequences_with_a_common_prefix_are_counted_by_their_blocks(
    num_blocks: int, of_one: int, shared: int
) -> None:
    shared = min(shared, of_one - 1)
    pool = Pool(
        num_bytes=num_blocks,
        block_bytes=1,
        blocks_of=lambda _: of_one,
        shared_of=lambda tokens: tokens,
    )
    number = pool.num_sequences(1, shared)
    assert number == 0 or shared + number * (of_one - shared) <= num_blocks
    assert shared + (number + 1) * (of_one - shared) > num_blocks


def test_a_window_shares_no_prefix() -> None:
    kinds = [CachedLayers(token_elements=2048, window=w, num_layers=8) for w in (None, 1024)]
    cut = blocks(kinds, block_size=16, element_bytes=2, tokens_in_flight=8192)
    assert cut.shared_of(100) == 6
    alone = blocks(kinds[1:], block_size=16, element_bytes=2, tokens_in_flight=8192)
    assert alone.shared_of(100) == 0


def test_rotary_tables_are_shared_by_all_layers() -> None:
    assert rotary_bytes(load_model(LLAMA), 2) == 131072 * 128 * 2


@pytest.mark.parametrize(
    ("model", "quant", "logged_gib"),
    [
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "nvfp4", 21.86),  # tables of four times the positions
        ("meta-llama/Llama-3.1-8B", "none", 14.99),
    ],
)
def test_weights_are_what_logs_state(model: str, quant: Quant, logged_gib: float) -> None:
    run = replace(RUN, model=model, quant=quant, libraries=(("vllm", "0.20.0"),))
    taken = start(served(run, find_gpu("rtx-5090-32gb")))
    assert part_bytes(taken, "weights") / GiB == pytest.approx(logged_gib, abs=0.015)


def test_scales_of_8_bit_floats_are_of_rows_or_of_blocks() -> None:
    in_blocks = served(replace(RUN, model="Qwen/Qwen3-30B-A3B-FP8", quant="fp8"))
    assert in_blocks.dtypes.scale_block == 128
    assert served(replace(RUN, quant="fp8")).dtypes.scale_block == 0


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (8, 1), (16, 1)])
def test_heads_of_keys_are_repeated_where_there_are_fewer_than_ranks(
    ranks: int, heads: int
) -> None:
    rank = rank_model(load_model(LLAMA), ranks)
    attention = rank.groups[0].layer.attentions[0]
    assert attention.num_key_value_heads == heads
    assert attention.cache_elements == 2 * heads * 128
    assert attention.num_attention_heads == 32 // ranks
    assert attention.linears[1].out_features == heads * 128


@pytest.mark.parametrize("ranks", [1, 8])
def test_every_rank_caches_the_latent_of_all_heads(ranks: int) -> None:
    rank = rank_model(load_model("deepseek-ai/DeepSeek-V3"), ranks)
    attention = rank.groups[0].layer.attentions[0]
    widths = {
        linear.name: (linear.in_features, linear.out_features) for linear in attention.linears
    }
    heads = 128 // ranks
    assert attention.cache_elements == 512 + 64
    assert widths["kv_a_proj_with_mqa"] == (7168, 512 + 64)
    assert widths["q_a_proj"] == (7168, 1536)
    assert widths["kv_b_proj"] == (512, heads * (128 + 128))
    assert widths["q_b_proj"] == (1536, heads * (128 + 64))
    assert widths["o_proj"] == (heads * 128, 7168)


def test_weights_of_deepseek_v3_on_32_cards_are_those_of_a_published_log() -> None:
    # github.com/vllm-project/vllm/issues/12258: 21.4118 GiB on each GPU of the second stage
    run = replace(RUN, model="deepseek-ai/DeepSeek-V3", quant="fp8", libraries=(("vllm", "0.6.6"),))
    taken = started(run, find_gpu("l20-48gb"), tensor_parallel_size=16, pipeline_parallel_size=2)
    assert taken.stage == 2
    assert part_bytes(taken, "weights") / GiB == pytest.approx(21.4118, rel=5e-4)


@pytest.mark.parametrize(
    ("quant", "version", "gib"),
    [
        ("fp8", "0.7.2", 84.11),  # published: github.com/vllm-project/vllm/pull/12639
        ("fp8", "0.8.0", 79.41 + 61 * 16 * 256 * 512 * 2 / GiB),
        ("fp8", "0.6.6", 79.41),  # github.com/HabanaAI/vllm-fork/issues/809, of whose own build
    ],
)
def test_matrices_between_heads_and_latents_are_held_as_the_release_has_them(
    quant: str, version: str, gib: float
) -> None:
    run = replace(RUN, model="deepseek-ai/DeepSeek-V3", quant=quant, libraries=(("vllm", version),))
    taken = started(run, find_gpu("h200-sxm-141gb"), tensor_parallel_size=8)
    assert part_bytes(taken, "weights") / GiB == pytest.approx(gib, rel=1e-3)


def test_unquantised_matrices_between_heads_and_latents_are_views() -> None:
    asked = served(replace(RUN, model="deepseek-ai/DeepSeek-V2-Lite"))
    assert absorbed_bytes(asked, asked.model) == 0


@pytest.mark.parametrize(
    ("model", "version", "elements"),
    [
        (load_model("deepseek-ai/DeepSeek-V2-Lite"), "0.7.1", 512 + 64),
        (load_model("moonshotai/Kimi-K2.5"), "0.33.0", 512 + 64),  # by the type of its text
        (load_model("deepseek-ai/DeepSeek-V2-Lite"), "0.7.0", 2 * 16 * 256),  # padded
        (build({"model_type": "minicpm3"}, name="minicpm3"), "0.33.0", 2 * 40 * 96),
    ],
)
def test_keys_and_values_are_expanded_where_the_class_caches_no_latent(
    model: ModelSpec, version: str, elements: int
) -> None:
    run = replace(RUN, model=model.name, libraries=(("vllm", version),))
    pool = start(resolve(model, run, A100).served).pool
    assert pool.block_bytes == 16 * 2 * elements * model.num_hidden_layers


@pytest.mark.parametrize(
    ("version", "kept_layers", "has_buffers"),
    [("0.2.4", 0, False), ("0.2.5", 32, True), ("0.2.6", 0, True)],
)
def test_results_of_all_reduces_are_kept_in_one_release_alone(
    version: str, kept_layers: int, has_buffers: bool
) -> None:
    run = replace(RUN, context=4096, libraries=(("vllm", version),))
    held = {
        entry.fact.what: entry.num_bytes for entry in started(run, tensor_parallel_size=2).entries
    }
    kept = (2 * kept_layers + 1) * 4096 * 4096 * 2 if kept_layers else 0
    assert held.get("profile pass: results of all-reduces", 0) == kept
    assert ("buffers of NCCL" in held) == has_buffers


def test_the_context_of_the_process_is_counted_from_0_2_5_to_0_6_4() -> None:
    pools = [
        started(replace(RUN, libraries=(("vllm", version),))).pool.num_bytes
        for version in ("0.2.4", "0.2.5", "0.6.4", "0.6.5")
    ]
    assert pools[0] > pools[1]
    assert pools[3] > pools[2]


def test_experts_are_divided_by_their_width() -> None:
    whole = load_model("Qwen/Qwen3-30B-A3B")
    rank = rank_model(whole, 4)
    before, after = whole.groups[0].layer.moe, rank.groups[0].layer.moe
    assert before
    assert after
    assert after.expert.num_params * 4 == before.expert.num_params
    assert after.router == before.router


def test_a_window_takes_blocks_for_what_is_in_flight_and_one_more() -> None:
    kinds = [CachedLayers(token_elements=1024, window=512, num_layers=4)]
    cut = blocks(kinds, block_size=16, element_bytes=2, tokens_in_flight=2048)
    assert cut.block_bytes == 4 * 1024 * 16 * 2
    assert cut.blocks_of(100) == 7 + 1
    assert cut.blocks_of(100_000) == (511 + 2048 + 15) // 16 + 1


@pytest.mark.parametrize(
    ("model", "ranks", "element_bytes", "states_kept", "block", "num_blocks", "context", "logged"),
    [
        # github.com/vllm-project/vllm/issues/40691: 290,864 tokens of four groups of 784
        ("Qwen/Qwen3.5-27B", 1, 2, 1, 784, 1487, 32_768, 33.04),
        # github.com/mitchross/talos-argocd-proxmox/pull/1995: two GPUs with 4.99 GiB each
        ("Qwen/Qwen3.5-27B", 2, 1, 2, 1568, 208, 131_072, 2.31),
        # github.com/noonghunna/club-3090/issues/612 and 652: 5.98 and 6.01 GiB
        ("Qwen/Qwen3.5-35B-A3B", 1, 1, 2, 2096, 299, 131_072, 4.33),
        ("Qwen/Qwen3.5-35B-A3B", 1, 1, 2, 2096, 300, 131_072, 4.35),
    ],
)
def test_a_state_takes_a_block_that_attention_fills_with_tokens(
    model: str,
    ranks: int,
    element_bytes: int,
    states_kept: int,
    block: int,
    num_blocks: int,
    context: int,
    logged: float,
) -> None:
    rank = rank_model(load_model(model), ranks)
    cut = blocks(
        cached_layers(rank),
        block_size=16,
        element_bytes=element_bytes,
        tokens_in_flight=1,
        states_kept=states_kept,
    )
    attention = next(kind for kind in cached_layers(rank) if kind.token_elements)
    tokens = attention.token_elements * attention.num_layers * element_bytes
    assert cut.block_bytes == block * tokens
    assert round(num_blocks / cut.blocks_of(context), 2) == logged


def test_ranks_share_the_heads_of_a_recurrent_layer() -> None:
    model = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    (whole,), (half,) = (
        {
            attention
            for layer, _ in each.layers()
            for attention in layer.attentions
            if attention.kind == "linear"
        }
        for each in (model, rank_model(model, 2))
    )
    for one, all_of_them in zip(half.linears, whole.linears, strict=True):
        assert 2 * one.num_weights == all_of_them.num_weights
    assert 2 * half.conv_channels == whole.conv_channels
    assert 2 * half.recurrent_elements == whole.recurrent_elements


@pytest.mark.parametrize(
    ("full", "sliding", "layers", "groups"),
    [(8, 40, 8, 6), (5, 21, 5, 6), (12, 13, 13, 2)],  # the last: hardly more of one kind
)
def test_layers_of_two_kinds_share_blocks_in_groups(
    full: int, sliding: int, layers: int, groups: int
) -> None:
    kinds = [
        CachedLayers(token_elements=1024, window=window, num_layers=number)
        for window, number in ((None, full), (1024, sliding))
    ]
    cut = blocks(kinds, block_size=16, element_bytes=2, tokens_in_flight=0)
    assert cut.block_bytes == layers * 1024 * 16 * 2
    of_window = 1023 // 16 + 1 + 1
    of_full = 32768 // 16
    num_full = -(-full // layers)
    assert cut.blocks_of(32768) == num_full * of_full + (groups - num_full) * of_window


def test_gemma_has_two_kinds_of_layers() -> None:
    kinds = cached_layers(load_model("google/gemma-3-12b-pt"))
    assert sorted((kind.window or 0, kind.num_layers) for kind in kinds) == [(0, 8), (1024, 40)]


@given(
    num_blocks=st.integers(0, 5000),
    context=st.integers(1, 100_000),
    window=st.sampled_from([None, 512, 4096]),
)
def test_a_sequence_of_the_longest_context_fits_and_one_token_more_does_not(
    num_blocks: int, context: int, window: int | None
) -> None:
    kinds = [CachedLayers(token_elements=8, window=window, num_layers=1)]
    cut = blocks(kinds, block_size=16, element_bytes=2, tokens_in_flight=64)
    pool = Pool(
        num_bytes=num_blocks * cut.block_bytes,
        block_bytes=cut.block_bytes,
        blocks_of=cut.blocks_of,
    )
    longest = pool.max_context(context)
    assert longest == 0 or pool.max_concurrency(longest) >= 1
    assert longest == context or pool.max_concurrency(longest + 1) < 1


# --- starts -----------------------------------------------------------------------------------


def test_it_starts_where_one_sequence_fits_the_pool() -> None:
    gpu = replace(A100, memory_bytes=24 * GiB)
    longest = started(gpu=gpu).pool.max_context(131072)
    assert started(gpu=gpu).fault_at(longest) == ""
    fault = started(gpu=gpu).fault_at(longest + 16)
    assert fault.startswith(f"one sequence of {longest + 16} tokens takes ")
    assert fault.endswith(f"the longest context is {longest}")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_longest_context_of_a_release_that_reads_whole_prompts_starts(method: str) -> None:
    """The profile pass is as long as the context; without adapters only up to 32,768 tokens."""
    serve: Serve = "as-trained" if method == "lora" else "merged"
    older = replace(RUN, method=method, serve=serve, libraries=(("vllm", "0.6.3"),))

    def at(context: int) -> Start:
        asked = replace(older, context=context)
        return started(asked, gpu=find_gpu("l4-24gb"), max_num_seqs=16)

    most = at(4096).max_context(131072)
    assert most == at(16384).max_context(131072)
    assert (most > 32768) == (method == "full")
    assert not at(most).fault_at(most)
    assert at(most + 16).fault_at(most + 16)
    if method == "lora":
        assert most < at(4096).pool.max_context(131072)
        assert at(60_000).fault_at(60_000).endswith(f"; a context up to {most} starts")


def test_a_plan_of_contexts_starts_anew_for_each_of_an_older_release() -> None:
    older = replace(RUN, libraries=(("vllm", "0.6.3"),))
    loads = {load_of_start(served(replace(older, context=each))) for each in (4096, 8192)}
    assert loads == {4096, 8192}
    assert load_of_start(served(RUN)) == 0
    assert load_of_start(served(older, max_num_batched_tokens=8192)) == 0


@pytest.mark.parametrize(
    ("memory_gib", "share", "fault"),
    [
        (16, 0.92, "gpu_memory_utilization 0.92 of 16.00 GiB is 14.72 GiB, and weights, profile"),
        (
            15,
            0.92,
            "weights alone take 14.99 GiB, and 14.51 GiB of the GPU are free; give quant awq-int4 "
            "or gptq-int4, more GPUs, or a smaller model",
        ),
        (24, 0.99, "gpu_memory_utilization 0.99 of 24.00 GiB is 23.76 GiB, more than the 23.51"),
    ],
)
def test_why_it_does_not_start_is_one_line(memory_gib: int, share: float, fault: str) -> None:
    gpu = replace(A100, memory_bytes=memory_gib * GiB)
    assert started(gpu=gpu, gpu_memory_utilization=share).fault.startswith(fault)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"quant": "nf4"}, {}, "serving: vllm 0.33.0 reads no bitsandbytes weights, got quant nf4"),
        ({"method": "dora", "serve": "as-trained"}, {}, "serving: vllm cannot serve DoRA's"),
        (
            {"method": "lora", "serve": "as-trained", "modules_to_save": ("lm_head",)},
            {},
            "serving: vllm cannot serve modules_to_save beside adapters; use serve merged",
        ),
        (
            {"method": "lora", "serve": "as-trained", "r": 64},
            {"max_lora_rank": 16},
            "max_lora_rank: 16 is less than the adapter's rank 64; give 64 or more",
        ),
        (
            {"method": "lora", "serve": "as-trained"},
            {"enable_lora": False},
            "enable_lora: false has no slot for the adapter of serve as-trained; leave it out, or "
            "use serve merged",
        ),
        (
            {"method": "lora", "serve": "as-trained", "r": 1024},
            {},
            "r: vllm serves adapters up to rank 512, got 1024",
        ),
        ({}, {"tensor_parallel_size": 3}, "tensor_parallel_size: 32 heads and 8 heads of keys"),
        (
            {},
            {"max_num_batched_tokens": 64, "max_num_seqs": 128},
            "max_num_batched_tokens: 64 is less than max_num_seqs 128; give 128 or more, or "
            "max_num_seqs 64 or less",
        ),
        (
            {},
            {"max_num_seqs": 4096},
            "max_num_batched_tokens: 2048 is less than max_num_seqs 4096; give 4096 or more",
        ),
        (
            {"libraries": (("vllm", "0.8.5"),)},
            {"max_num_batched_tokens": 128},
            "max_num_batched_tokens: 128 is less than max_num_seqs 1024; give 1024 or more",
        ),
        (
            {"libraries": (("vllm", "0.6.3"),)},
            {"max_num_batched_tokens": 4096},
            "max_num_batched_tokens: 4096 is less than the context 8192, which vllm 0.6.3 reads in "
            "one step; give 8192 or more, or libraries vllm=0.8 or newer",
        ),
        (
            {},
            {"enable_lora": True, "max_lora_rank": 48},
            "max_lora_rank: vllm has no slots of rank 48; give 1, 8, 16, 32, 64, 128, 256, 320 or "
            "512",
        ),
        ({}, {"block_size": 24}, "block_size: 24 is no multiple of 16; give 32, or leave it out"),
        ({"model": "google-bert/bert-base-uncased"}, {}, "serving: vllm is predicted for models"),
        (
            {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "libraries": (("vllm", "0.10.1"),)},
            {},
            "serving: vllm's pool is not predicted for the recurrent layers of Qwen/Qwen3-Next",
        ),
    ],
)
def test_what_it_cannot_serve_is_refused_in_one_line(
    changed: dict[str, object], options: dict[str, object], message: str
) -> None:
    run = replace(RUN, **changed, serving_options=tuple(options.items()))
    with pytest.raises(ConfigError) as error:
        resolve(load_model(run.model), run, A100)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("version", "quant", "message"),
    [
        (
            "0.33.0",
            None,
            "serving: vllm 0.33.0 does not run on v100-sxm2-16gb: since 0.20 it needs compute "
            "capability 7.5 or newer; give libraries vllm=0.19.0, or leave serving out",
        ),
        (
            "0.33.0",
            "awq-int4",
            "serving: vllm 0.33.0 does not run on v100-sxm2-16gb: since 0.20 it needs compute "
            "capability 7.5 or newer; leave serving out",
        ),
        (
            "0.8.5",
            "awq-int4",
            "quant: vllm 0.8.5 has no kernels for awq-int4 on v100-sxm2-16gb: it needs compute "
            "capability 7.5 or newer; use gptq-int4, or weights that are not quantised",
        ),
    ],
)
def test_a_volta_is_refused_where_kernels_leave_it_out(
    version: str, quant: Quant | None, message: str
) -> None:
    volta = find_gpu("v100-sxm2-16gb")
    run = replace(RUN, model="Qwen/Qwen2.5-1.5B", quant=quant, precision="fp16")
    run = replace(run, libraries=(("vllm", version),))
    with pytest.raises(ConfigError) as error:
        served(run, volta)
    assert str(error.value) == message
    assert served(replace(run, quant="gptq-int4", libraries=(("vllm", "0.19.0"),)), volta)
    assert served(replace(run, libraries=()), find_gpu("t4-16gb"))


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "google/gemma-3-4b-pt"])
def test_a_release_that_always_loads_the_tower_is_refused(model: str) -> None:
    run = replace(RUN, model=model, libraries=(("vllm", "0.8.3"),))
    with pytest.raises(
        ConfigError, match=r"vllm 0\.8\.3 loads what .*; give libraries vllm=0\.10\.1"
    ):
        served(run)


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "google/gemma-3-4b-pt"])
def test_that_a_tower_is_loaded_is_told(model: str) -> None:
    asked = served(replace(RUN, model=model))
    told = notes(asked, start(asked))
    assert any("--language-model-only leaves it out" in note for note in told)
    alone = served(replace(RUN, model=model), language_model_only=True)
    assert any("started for texts alone" in note for note in notes(alone, start(alone)))


@pytest.mark.parametrize(
    ("model", "text_params"),
    [  # one of each family of towers, whatever its blocks call their inputs
        ("google/gemma-3-4b-pt", 3_880_263_168),
        ("google/gemma-4-31B", 30_697_345_280),
        ("HuggingFaceTB/SmolVLM-500M-Instruct", 409_252_800),
        ("llava-hf/llava-1.5-7b-hf", 6_738_939_904),
        ("Qwen/Qwen2-VL-2B-Instruct", 1_543_714_304),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_022_468_096),
    ],
)
def test_a_tower_is_left_on_the_disk(model: str, text_params: int) -> None:
    asked, spec = replace(RUN, model=model), load_model(model)
    assert served(asked, language_model_only=True).model.loaded_params == text_params
    assert served(asked).model.loaded_params == spec.num_params


def test_a_context_beyond_the_positions_leaves_the_pool_as_it_is() -> None:
    taken = started(replace(RUN, context=131_073))
    assert not taken.fault_at(131_072)
    assert "beyond the 131072 positions" in taken.fault_at(131_073)
    assert taken.max_running(131_073) == 0
    assert taken.entries_at(131_073) == taken.entries_at(131_072)


def test_slots_without_adapters_are_told() -> None:
    def told(run: RunConfig = RUN, **options: object) -> list[str]:
        asked = served(run, **options)
        return [note for note in notes(asked, start(asked)) if "no slots for adapters" in note]

    assert told(max_loras=4) == ["max_loras: without enable_lora there are no slots for adapters"]
    assert not told()
    assert not told(max_loras=4, enable_lora=True)
    assert not told(replace(RUN, method="lora", serve="as-trained"), max_loras=4)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_both_8_bit_floats_are_a_byte(name: str) -> None:
    wide, narrow = started().pool, started(kv_cache_dtype=name).pool
    assert narrow.block_bytes * 2 == wide.block_bytes


def test_an_older_release_reads_bitsandbytes_weights() -> None:
    run = replace(RUN, quant="nf4", libraries=(("vllm", "0.27.1"),))
    assert part_bytes(started(run), "weights") < 6 * GiB


@pytest.mark.parametrize(("version", "scale_bits"), [("0.8.5", 8.127), ("0.27.1", 32)])
def test_scales_of_scales_are_expanded_since_0_9(version: str, scale_bits: float) -> None:
    run = replace(RUN, libraries=(("vllm", version),))
    plain = part_bytes(started(run), "weights")
    in_blocks = load_model(LLAMA).groups[0].layer.linears
    num_weights = 32 * sum(linear.num_weights for linear in in_blocks)
    for quant in ("nf4", "nf4-dq"):
        saved = plain - part_bytes(started(replace(run, quant=quant)), "weights")
        assert saved == pytest.approx(
            num_weights * (16 - 4 - scale_bits / 64) / 8, rel=1e-3
        )  # but for code tables, and rests of blocks


def test_its_4_bit_products_expand_a_matrix_in_the_profile_pass() -> None:
    version = (("vllm", "0.27.1"),)
    assert expanded_bytes(load_model(LLAMA), 2) == 2 * 4096 * 14336
    mixtral = load_model("mistralai/Mixtral-8x7B-v0.1")
    assert expanded_bytes(mixtral, 2) == 8 * 3 * 2 * 4096 * 14336
    # without a sampler to speak of, a layer is the peak, and its matrix beside it
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 8192, "restarted": True}
    plain = started(replace(RUN, libraries=version), **few)
    quantised = started(replace(RUN, quant="nf4", libraries=version), **few)
    temporary = part_bytes(quantised, "temporary") - part_bytes(plain, "temporary")
    assert temporary == 2 * 4096 * 14336


def test_blocks_and_concurrency_are_those_of_its_own_planner() -> None:
    """vLLM 0.33.0 `kv_cache_planning` answered; `benchmarks/vllm_blocks.py` asks it again."""
    cases = [json.loads(line) for line in PLANNED.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 120
    for case in cases:
        cut = blocks(
            cached_layers(load_model(case["model"])),
            block_size=case["block_size"],
            element_bytes=2,
            tokens_in_flight=case["tokens_in_flight"],
        )
        pool = Pool(
            num_bytes=case["pool_bytes"], block_bytes=cut.block_bytes, blocks_of=cut.blocks_of
        )
        assert pool.num_blocks == case["num_blocks"], case
        assert pool.max_concurrency(case["context"]) == case["max_concurrency"], case


@pytest.mark.parametrize(
    ("model", "version", "bits"),
    [  # for each logit: what the profile's sampler takes, and since 0.27 counts of tokens
        (LLAMA, "0.15.1", 8 * 38),
        (LLAMA, "0.23.0", 8 * 14),
        (LLAMA, "0.24.0", 8 * 6),
        (LLAMA, "0.33.0", 8 * 14 + 33),
        ("Qwen/Qwen2.5-7B", "0.24.0", 8 * 14),
        ("Qwen/Qwen2.5-7B", "0.27.1", 8 * 6 + 33),
        ("Qwen/Qwen2.5-7B", "0.28.0", 8 * 2 + 33),
        ("Qwen/Qwen3-30B-A3B", "0.28.0", 8 * 14),
        ("Qwen/Qwen3-30B-A3B", "0.29.0", 8 * 2 + 33),
    ],
)
def test_each_runner_has_its_own_sampler(model: str, version: str, bits: int) -> None:
    run = replace(RUN, model=model, libraries=(("vllm", version),))
    few_tokens = {"max_num_batched_tokens": 1024, "max_num_seqs": 1024}
    taken = started(run, **few_tokens, enforce_eager=True)
    spec = served(run).model
    states = 2 * 1024 * spec.hidden_size
    held = part_bytes(taken, "logits_and_loss") - states
    assert held == 1024 * spec.vocab_size * bits // 8


def test_a_gb10_has_the_defaults_of_a_small_card() -> None:
    """NVML tells no total of it: github.com/vllm-project/vllm/pull/57378, logs of 0.13 and 0.18."""
    spark = find_gpu("gb10-128gb")
    for version in ("0.13.0", "0.18.1", "0.32.0"):
        asked = served(replace(RUN, libraries=(("vllm", version),)), spark)
        assert (max_num_batched_tokens(asked), max_num_seqs(asked)) == (2048, 256)
    assert max_num_batched_tokens(served(gpu=spark)) == 2048
    assert max_num_batched_tokens(served(gpu=find_gpu("h100-sxm-80gb"))) == 8192


def test_a_pool_can_be_asked_for_in_bytes_or_in_blocks() -> None:
    assert started(kv_cache_memory_bytes=8 * GiB).pool.num_bytes == 8 * GiB
    assert started(num_gpu_blocks_override=512).pool.num_blocks == 512
    fault = started(kv_cache_memory_bytes=100 * GiB).fault
    assert fault.startswith("a pool of 100.0 GiB and all else is 11")


def test_throughput_doubles_what_is_read_and_run_at_once() -> None:
    asked = served(performance_mode="throughput")
    assert (max_num_batched_tokens(asked), max_num_seqs(asked)) == (4096, 512)
    fine = served(performance_mode="interactivity")
    rank = load_model(LLAMA)
    sizes = 32 - captured_sizes(32)
    assert graph_bytes(fine, rank) - graph_bytes(served(), rank) == 33 * sizes * 300 * 1024


def test_steps_are_planned_ahead_unless_asked_otherwise() -> None:
    assert stepping(served()).plans_ahead
    assert not stepping(served(async_scheduling=False)).plans_ahead


def test_a_thor_has_the_defaults_of_a_small_card() -> None:
    """A log of 0.10.2 has 2,048 tokens, though the card has 122.82 GiB."""
    asked = served(replace(RUN, libraries=(("vllm", "0.10.2"),)), find_gpu("thor"))
    assert (max_num_batched_tokens(asked), max_num_seqs(asked)) == (2048, 256)


def test_what_the_host_takes_of_a_shared_memory_counts() -> None:
    assert HOST in {entry.fact for entry in started(gpu=find_gpu("gb10-128gb")).entries}
    assert HOST not in {entry.fact for entry in started().entries}


@pytest.mark.parametrize(
    ("gpu", "version", "seqs", "tokens"),
    [
        ("h100-sxm-80gb", "0.7.2", 256, 8192),  # the whole context
        ("h100-sxm-80gb", "0.8.4", 1024, 8192),
        ("a100-sxm-80gb", "0.8.4", 256, 2048),
        ("a100-sxm-80gb", "0.8.5", 1024, 8192),
        ("a100-sxm-80gb", "0.9.0", 256, 2048),
        ("b200-180gb", "0.27.0", 1024, 8192),
        ("b200-180gb", "0.28.0", 1024, 16384),
    ],
)
def test_defaults_of_a_card_are_those_of_the_release(
    gpu: str, version: str, seqs: int, tokens: int
) -> None:
    asked = served(replace(RUN, libraries=(("vllm", version),)), find_gpu(gpu))
    assert max_num_seqs(asked) == seqs
    assert max_num_batched_tokens(asked) == tokens


def test_no_more_sequences_run_than_the_tokens_of_a_step_that_are_asked_for() -> None:
    assert max_num_seqs(served(max_num_batched_tokens=128)) == 128
    assert max_num_seqs(served(max_num_batched_tokens=512)) == 256


@pytest.mark.parametrize(
    ("version", "context"),
    [("0.6.3", 4096), ("0.6.3", 40_000), ("0.8.0", 8192), ("0.33.0", 8192)],
)
def test_steps_of_fewer_tokens_than_the_context_are_accepted_where_prompts_are_cut(
    version: str, context: int
) -> None:
    run = replace(RUN, context=context, libraries=(("vllm", version),))
    assert max_num_batched_tokens(served(run, max_num_batched_tokens=4096)) == 4096


@pytest.mark.parametrize(
    ("version", "tokens"),
    [
        ("0.5.2", 40_000),
        ("0.5.3", 512),  # a log in github.com/vllm-project/vllm/issues/6746
        ("0.6.4", 512),
        ("0.6.5", 2048),
    ],
)
def test_a_long_context_is_profiled_in_chunks_before_0_8(version: str, tokens: int) -> None:
    run = replace(RUN, context=40_000, libraries=(("vllm", version),))
    assert max_num_batched_tokens(served(run)) == tokens


def test_what_a_release_counts_of_its_process_is_not_taken_twice() -> None:
    card = find_gpu("rtx-3090-24gb")
    budget = math.ceil(0.9 * card.memory_bytes)
    context = allocator.context_bytes(card, Libraries())
    for version, outside in (("0.3.0", 0), ("0.6.3", context), ("0.6.4", 0), ("0.10.2", context)):
        run = replace(RUN, context=4096, libraries=(("vllm", version),))
        eager = replace(run, serving_options=(("enforce_eager", True),))
        answer = predict(load_model(LLAMA), eager, card, load_calibration(card)).serving
        assert answer is not None
        assert card.memory_bytes - answer.left_bytes == budget + outside


def test_more_than_the_gpu_has_is_told() -> None:
    card = find_gpu("rtx-4090-24gb")
    slots = (("enable_lora", True), ("max_lora_rank", 64), ("max_loras", 8))
    run = replace(RUN, context=8192, libraries=(("vllm", "0.7.2"),), serving_options=slots)
    answer = predict(load_model(LLAMA), run, card, load_calibration(card))
    assert any("it can run out of memory; give a smaller gpu_memory_" in x for x in answer.notes)
    fewer = replace(run, serving_options=())
    answer = predict(load_model(LLAMA), fewer, card, load_calibration(card))
    assert not any("it can run out of memory" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("version", "quant", "capability", "is_kept"),
    [
        ("0.33.0", None, "8.0", True),
        ("0.14.0", "fp8", "9.0", True),
        ("0.13.0", None, "9.0", False),
        ("0.20.0", "awq-int4", "8.0", False),
        ("0.25.0", "awq-int4", "8.0", True),
        ("0.27.1", "nf4", "8.0", False),
        ("0.33.0", None, "10.0", False),
        ("0.33.0", None, "12.0", False),
        ("0.27.1", "fp8", "10.0", False),
        ("0.27.1", "fp8", "12.0", True),  # FlashInfer multiplies blocks of fp8 on 10 alone
        ("0.28.0", "w4a16", "12.1", True),
    ],
)
def test_the_workspace_of_experts_outlives_the_pass(
    version: str, quant: Quant | None, capability: str, is_kept: bool
) -> None:
    """Beside the sampler's logits, which are the larger part of the pass for 1,024 sequences."""
    gpu = replace(A100, memory_bytes=141 * GiB, compute_capability=capability)
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B", quant=quant, libraries=(("vllm", version),))
    taken = started(run, gpu, max_num_seqs=1024, max_num_batched_tokens=8192)
    kept = sum(entry.num_bytes for entry in taken.entries if entry.fact == WORKSPACE)
    assert kept == is_kept * 8192 * 8 * (2048 + 2048) * 2
    assert any(entry.fact == SAMPLER_PASS for entry in taken.entries)


def test_the_forward_has_experts_once() -> None:
    """Few sequences sample less than a layer takes: what is kept is not counted in the layer."""
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B")
    taken = started(run, max_num_seqs=1, max_num_batched_tokens=8192, restarted=True)
    facts = {entry.fact for entry in taken.entries}
    assert {WORKSPACE, ATTENTION_PASS} <= facts
    assert EXPERTS_PASS not in facts


@pytest.mark.parametrize(
    ("version", "quant", "of_codes_s"),
    [
        ("0.4.2", "gptq-int4", 0.0),
        ("0.6.2", "gptq-int4", SCRIPTED_TYPE_S),
        ("0.6.2", "awq-int4", SCRIPTED_TYPE_S),
        ("0.7.3", "gptq-int4", WRAPPED_PRODUCT_S),
    ],
)
def test_the_host_pays_for_products_of_codes_in_eager_steps_alone(
    version: str, quant: Quant, of_codes_s: float
) -> None:
    run = replace(RUN, quant=quant, libraries=(("vllm", version),), precision="fp16")
    assert stepping(served(run, enforce_eager=True)).code_launch_s == of_codes_s
    assert stepping(served(run)).code_launch_s == 0.0


def test_layers_that_borrow_keys_have_no_blocks() -> None:
    """Gemma 4 E4B under 0.27.1: 7.91 sequences of 32,768 tokens in 5.36 GiB, as its log states."""
    kinds = cached_layers(load_model("google/gemma-4-E4B"))
    assert [kind.num_layers for kind in kinds] == [20, 4]
    cut = blocks(kinds, block_size=16, element_bytes=2, tokens_in_flight=2 * 2048)
    held = 5.36 * GiB / (cut.block_bytes * cut.blocks_of(32768))
    assert held == pytest.approx(7.91, rel=0.002)


def test_eager_code_holds_what_its_frames_hold() -> None:
    """Qwen3-8B on two T4 under 0.22.1: two logs differ by 157 to 159 MB over 2,048 tokens."""

    def layer_bytes(
        ranks: int, tokens: int, model: str = "Qwen/Qwen3-8B", **options: object
    ) -> int:
        run = replace(RUN, model=model, context=2048, libraries=(("vllm", "0.22.1"),))
        asked = {"max_num_batched_tokens": tokens, "max_num_seqs": 1, "restarted": True, **options}
        return part_bytes(started(run, tensor_parallel_size=ranks, **asked), "activations")

    eager = layer_bytes(2, 4096, enforce_eager=True) - layer_bytes(2, 2048, enforce_eager=True)
    assert 157e6 < eager < 160e6
    states = 2048 * 4096 * 2
    assert eager - (layer_bytes(2, 4096) - layer_bytes(2, 2048)) == 2 * states
    assert layer_bytes(1, 2048, enforce_eager=True) - layer_bytes(1, 2048) == states
    assert layer_bytes(1, 2048, LLAMA, enforce_eager=True) == layer_bytes(1, 2048, LLAMA)


@pytest.mark.parametrize(("version", "rows"), [("0.16.0", 0), ("0.24.0", 108), ("0.29.0", 0)])
def test_masking_logits_takes_a_row_for_each_multiprocessor(version: str, rows: int) -> None:
    run = replace(RUN, model="Qwen/Qwen2.5-7B", context=2048, libraries=(("vllm", version),))
    asked = {"max_num_seqs": 200, "max_num_batched_tokens": 2048, "restarted": version != "0.16.0"}
    taken = started(run, find_gpu("a100-sxm-80gb"), **asked)
    buffers = [entry.num_bytes for entry in taken.entries if entry.fact == MASK_BUFFER]
    assert sum(buffers) == rows * 152_064 * 4


def test_few_sequences_are_sorted_and_take_no_buffer() -> None:
    assert mask_buffer_entries(vocab_size=1000, sequences=7, processors=108) == []
    assert mask_buffer_entries(vocab_size=1000, sequences=60, processors=None) == []
    (buffer,) = mask_buffer_entries(vocab_size=1000, sequences=60, processors=108)
    assert buffer.num_bytes == 64 * 1000 * 4


def test_windows_keep_one_step_before_0_26() -> None:
    """Gemma 4 E2B under 0.21.0: 129.66 sequences of 8,192 tokens in 9.92 GiB, as a log states."""

    def a_sequence(version: str) -> int:
        run = replace(RUN, model="google/gemma-4-E2B-it", libraries=(("vllm", version),))
        of = served(run)
        cut = pool_blocks(of, of.model)
        return cut.block_bytes * cut.blocks_of(8192)

    assert 9.92 * GiB / a_sequence("0.21.0") == pytest.approx(129.66, rel=0.002)
    assert a_sequence("0.21.0") == a_sequence("0.25.0") < a_sequence("0.26.0")


OF_STATES = replace(RUN, model="Qwen/Qwen3.5-27B", quant="fp8", context=262_144)


def of_release(version: str) -> RunConfig:
    return replace(OF_STATES, libraries=(("vllm", version),))


def test_each_sequence_has_a_block_for_its_state_before_a_start() -> None:
    # an H100 has 856 of Qwen3.6-27B-FP8: github.com/vllm-project/recipes/pull/551
    card = find_gpu("h100-sxm-80gb")
    taken = started(of_release("0.22.0"), card, gpu_memory_utilization=0.95)
    assert taken.pool.num_blocks == pytest.approx(856, rel=0.014)
    blocks = taken.pool.num_blocks
    assert taken.lacks(OF_STATES.context or 0)
    assert taken.max_running(262_144) == 0
    assert taken.fault_at(262_144) == (
        f"max_num_seqs 1024 is more than the {blocks} blocks of the pool, of which each sequence "
        f"keeps its state in one; give max_num_seqs {blocks} or less"
    )
    beside = taken.pool.num_bytes - 1024 * taken.pool.block_bytes
    assert taken.closest(262_144) == (beside, "max_num_seqs 1024")


@pytest.mark.parametrize(
    ("version", "options"),
    [("0.19.0", {}), ("0.22.0", {"enforce_eager": True}), ("0.22.0", {"max_num_seqs": 512})],
)
def test_without_whole_graphs_or_with_fewer_sequences_it_starts(
    version: str, options: dict[str, object]
) -> None:
    card = find_gpu("h100-sxm-80gb")
    assert not started(of_release(version), card, **options).fault_at(262_144)


def test_models_without_states_have_no_such_bound() -> None:
    few = started(RUN, find_gpu("rtx-3090-24gb"), max_num_seqs=1024, num_gpu_blocks_override=600)
    assert few.least_blocks == 0
    assert few.closest(8192) == (few.pool.spare_bytes(8192), "one sequence of 8192 tokens")


def test_adapters_before_0_8_may_take_twice_as_long() -> None:
    """github.com/vllm-project/vllm/pull/11267: 0.66 of the tokens/s; issues/10062: half."""

    def slow_end(version: str, *, slots: bool) -> float:
        run = replace(
            RUN, libraries=(("vllm", version),), serving_options=(("enable_lora", slots),) * slots
        )
        gpu = find_gpu("a100-sxm-80gb")
        served = predict(load_model(run.model), run, gpu, load_calibration(gpu)).serving
        assert served is not None
        assert served.time is not None
        return served.time.interval_tpot_s[1] / served.time.tpot_s

    assert slow_end("0.7.3", slots=True) == pytest.approx(2 * slow_end("0.7.3", slots=False))
    assert slow_end("0.8.5", slots=True) == pytest.approx(slow_end("0.8.5", slots=False))
