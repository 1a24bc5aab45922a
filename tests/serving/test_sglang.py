"""SGLang's pool, beside what its logs state before and after loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.parallel.communicators import communicator_bytes
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.sglang import (
    command,
    free_bytes,
    notes,
    start,
    stepping,
    token_bytes,
)
from whichlora.serving.sglang_share import (
    chunked_prefill_size,
    decode_graphs,
    mem_fraction_static,
    prefill_sizes,
)
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB

LLAMA = "meta-llama/Llama-3.1-8B"
RUN = RunConfig(model=LLAMA, phase="inference", serving="sglang", context=8192)


def served(run: RunConfig = RUN, gpu: GpuSpec = A100, **options: object) -> Served:
    run = replace(run, serving_options=tuple(sorted(options.items())))
    return resolve(load_model(run.model), run, gpu).served


def free_before(free_gib: float) -> GpuSpec:
    """A card with so much free memory before weights are loaded, whatever its context is."""
    return replace(A100, memory_bytes=round(free_gib * GiB), context_bytes=0)


@pytest.mark.parametrize(
    ("model", "free_gib", "share", "ranks", "pool_gib", "tokens"),
    [  # "avail mem" before loading, mem_fraction_static, "K size" and "V size", "#tokens"
        (LLAMA, 78.81, 0.88, 1, 54.26, 444_500),  # 0.4.1
        (LLAMA, 78.59, 0.88, 1, 54.04, 442_750),  # 0.4.4
        (LLAMA, 22.39, 0.879, 1, 4.66, 38_141),  # 0.4.9
        ("Qwen/Qwen3-0.6B", 15.16, 0.817, 1, 11.14, 104_273),  # 0.4.10
        ("Qwen/Qwen3-14B", 23.08, 0.80, 4, 11.38, 298_447),  # one of four cards
    ],
)
def test_the_pool_is_that_of_published_logs(
    model: str, free_gib: float, share: float, ranks: int, pool_gib: float, tokens: int
) -> None:
    run = replace(RUN, model=model)
    card = free_before(free_gib + communicator_bytes(ranks, A100) / GiB)
    asked = served(run, card, mem_fraction_static=share, tp_size=ranks)
    pool = start(asked).pool
    assert pool.num_bytes / GiB == pytest.approx(pool_gib, rel=0.03)
    assert pool.num_blocks == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize(
    ("memory_gib", "chunk", "share"),
    [
        (15.6, 2048, 0.746),
        (23.6, 4096, 0.699),
        (39.4, 4096, 0.820),
        (79.2, 8192, 0.829),
        (140, 8192, 0.903),
    ],
)
def test_the_static_share_follows_the_card_and_its_chunk(
    memory_gib: float, chunk: int, share: float
) -> None:
    asked = served(gpu=free_before(memory_gib))
    assert chunked_prefill_size(asked) == chunk
    assert mem_fraction_static(asked) == pytest.approx(share, abs=0.002)
    assert mem_fraction_static(served(gpu=A100, mem_fraction_static=0.5)) == 0.5


@pytest.mark.parametrize(
    ("release", "memory_gib", "ranks", "share", "chunk", "graphs"),
    [
        ("0.4.4", 79.2, 1, 0.88, 8192, 160),  # logged
        ("0.4.6.post1", 22.1, 4, 0.85, 2048, 80),  # vllm-project/vllm#17469
        ("0.4.7", 139.8, 8, 0.871, 8192, 256),
        ("0.4.9", 23.6, 1, 0.877, 2048, 8),  # logged, as 0.879 of nvidia-smi's 24,564 MiB
        ("0.5.2", 79.2, 8, 0.83, 8192, 160),
        ("0.5.4", 23.6, 1, 0.846, 2048, 16),
        ("0.5.9", 79.2, 1, 0.834, 8192, 256),
        ("0.5.10", 79.2, 1, 0.829, 8192, 256),
        ("0.5.18", 23.6, 1, 0.832, 2048, 24),
    ],
)
def test_every_release_has_its_own_share(
    release: str, memory_gib: float, ranks: int, share: float, chunk: int, graphs: int
) -> None:
    run = replace(RUN, libraries=(("sglang", release),))
    asked = served(run, free_before(memory_gib), tp_size=ranks)
    assert mem_fraction_static(asked) == pytest.approx(share, abs=0.002)
    assert (chunked_prefill_size(asked), decode_graphs(asked)) == (chunk, graphs)


def test_prompts_that_are_not_cut_leave_room_for_whole_ones() -> None:
    """16,384 tokens of prompts, and no graphs of them: 512 + 1.5 * 16384 + 1/8 * 1024 + 2 * 256."""
    asked = served(gpu=free_before(79.2), chunked_prefill_size=-1)
    assert chunked_prefill_size(asked) == 0
    total_mib = asked.gpu.memory_bytes / 2**20
    reserved = 512 + 1.5 * 16_384 + 128 + 2 * decode_graphs(asked)
    assert mem_fraction_static(asked) == round((total_mib - reserved) / total_mib, 3)
    assert stepping(asked).max_step_tokens == 16_384
    assert "chunked_prefill_size -1" in notes(asked, start(asked))[0]
    assert "--chunked-prefill-size -1" in command(asked)
    longer = served(replace(RUN, prompt_len=20_000), free_before(79.2), chunked_prefill_size=-1)
    assert stepping(longer).max_step_tokens == 20_000


def test_a_model_that_sees_leaves_room_for_images() -> None:
    share = mem_fraction_static(served(gpu=A100))
    sees = served(replace(RUN, model="Qwen/Qwen2.5-VL-7B-Instruct"), A100)  # 1280 wide, no layers
    assert mem_fraction_static(sees) == pytest.approx(share * 0.95 * (1 - 0.1 * 0.5625))
    wide = served(replace(RUN, model="Qwen/Qwen2-VL-7B-Instruct"), A100)
    assert mem_fraction_static(wide) == pytest.approx(share * 0.95 * 0.8)


def test_sizes_of_prompts_that_are_captured() -> None:
    assert prefill_sizes(4) == 1
    assert prefill_sizes(2048) == 8 + 14 + 8 + 8 + 4
    assert prefill_sizes(8192) == 8 + 14 + 8 + 8 + 12 + 8


def test_sliding_layers_have_four_fifths_of_the_tokens() -> None:
    model = load_model("google/gemma-3-12b-pt")
    asked = served(replace(RUN, model=model.name))
    one_layer = 2 * 8 * 256 * 2
    assert token_bytes(asked, model) == int((8 + 0.8 * 40) * one_layer)
    llama = load_model(LLAMA)
    assert token_bytes(served(kv_cache_dtype="fp8_e4m3"), llama) * 2 == 131_072


def test_layers_that_borrow_keys_have_a_pool_of_their_own() -> None:
    """A public log has 997,846 and 798,276 tokens in 79.94 GiB: 86,022 bytes for each."""
    model = load_model("google/gemma-4-E4B")
    full, sliding = 7 * 2 * 2 * 512 * 2, 35 * 2 * 2 * 256 * 2
    asked = served(replace(RUN, model=model.name))
    assert token_bytes(asked, model) == int(full + 0.8 * sliding) == 86_016


def test_a_host_that_shares_the_memory_has_a_part_of_it() -> None:
    gb10 = find_gpu("gb10-128gb")
    assert 8 * GiB < free_bytes(served(gpu=replace(gb10, compute_capability="9.0"))) - free_bytes(
        served(gpu=gb10)
    )


def test_files_of_16_bit_become_nf4_with_quantised_scales() -> None:
    def weights(quant: str) -> int:
        entries = start(served(replace(RUN, quant=quant))).entries  # type: ignore[arg-type]
        return sum(each.num_bytes for each in entries if each.part == "weights")

    assert weights("nf4") == weights("nf4-dq") < weights("none") / 2
    flags = command(served(replace(RUN, quant="nf4")))
    assert flags.endswith("--load-format bitsandbytes --quantization bitsandbytes")


def test_a_pool_has_no_more_tokens_than_are_asked_for() -> None:
    assert start(served(max_total_tokens=10_000, page_size=16)).pool.num_tokens(8192) == 10_000
    most = start(served()).pool.num_tokens(8192)
    assert start(served(max_total_tokens=10**9)).pool.num_tokens(8192) == most


def test_it_starts_with_a_context_that_its_pool_cannot_hold_and_says_so() -> None:
    gpu = free_before(24)
    run = replace(RUN, context=131072)
    answer = predict(load_model(LLAMA), run, gpu, load_calibration(gpu))
    assert answer.serving is not None
    assert answer.serving.starts
    assert answer.serving.max_running == 0
    longest = answer.serving.max_context
    assert f"it starts, and refuses sequences of more than {longest} tokens" in answer.notes


def test_weights_beyond_the_share_are_a_fault_in_one_line() -> None:
    fault = start(served(gpu=free_before(16))).fault
    assert fault.startswith("mem_fraction_static 0.7")
    assert "and weights take 15.02 GiB: nothing is left for keys and values" in fault
    assert start(served(gpu=free_before(15))).fault == (
        "weights alone take 15.02 GiB, and 15.00 GiB of the GPU are free; give quant awq-int4 or "
        "gptq-int4, more GPUs, or a smaller model"
    )


@pytest.mark.parametrize(
    ("options", "chunk", "instead"),
    [
        ({"page_size": 96, "chunked_prefill_size": 4096}, 4096, 32),
        ({"page_size": 64, "chunked_prefill_size": 1000}, 1000, 8),
    ],
)
def test_a_page_that_does_not_divide_a_chunk_is_refused(
    options: dict[str, object], chunk: int, instead: int
) -> None:
    with pytest.raises(ConfigError) as error:
        served(**options)
    assert str(error.value) == (
        f"page_size: {options['page_size']} does not divide a chunk of {chunk} tokens "
        f"(chunked_prefill_size); give {instead}, or another chunk"
    )


def test_what_is_not_predicted_is_refused_in_one_line() -> None:
    for changed, message in (
        ({"quant": "int8"}, "serving: sglang makes nf4 of files of 16 bit, got quant int8"),
        (
            {"quant": "nf4", "model": "Qwen/Qwen3-30B-A3B"},
            "serving: sglang loads no bitsandbytes weights of qwen3_moe",
        ),
        (
            {"quant": "nf4", "model": "google/gemma-4-E4B", "libraries": (("sglang", "0.5.20"),)},
            "bitsandbytes weights of gemma4 before 0.5.23",
        ),
        ({"method": "lora", "serve": "as-trained"}, "serving: sglang's unmerged adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            served(replace(RUN, **changed))


def test_the_tower_of_qwen35_is_loaded_and_shared_by_the_ranks() -> None:
    """Two RTX 4090 under 0.5.10: 327,310 tokens, and 8.85 GB of each taken by weights."""
    card = replace(find_gpu("rtx-4090-24gb"), memory_bytes=round(23.52 * GiB))
    run = replace(RUN, model="Qwen/Qwen3.5-9B", context=262_144, libraries=(("sglang", "0.5.10"),))
    options = (("mem_fraction_static", 0.8), ("tp_size", 2))
    asked = resolve(load_model(run.model), replace(run, serving_options=options), card).served
    assert start(asked).pool.num_tokens(262_144) == pytest.approx(327_310, rel=0.01)


def test_states_of_recurrent_layers_have_a_pool_of_their_own() -> None:
    run = replace(RUN, model="Qwen/Qwen3.5-27B")
    layers, recurrent, convolved = 48, 48 * 128 * 128, 3 * (2 * 16 + 48) * 128
    state = layers * (4 * recurrent + 2 * convolved)
    usual = start(served(run, mem_fraction_static=0.9))
    (kept,) = (entry.num_bytes for entry in usual.entries if "states" in entry.fact.what)
    assert kept % state == 0
    # 0.9 of what keys and values have, and one that is padding
    assert kept == pytest.approx(0.9 * usual.pool.num_bytes, rel=0.03)
    assert usual.max_num_seqs(8192) == (kept // state - 1) // 3
    narrow = served(run, mamba_ssm_dtype="bfloat16", disable_radix_cache=True)
    asked = replace(
        run, serving_options=(*narrow.run.serving_options, ("max_running_requests", 64))
    )
    few = start(resolve(load_model(run.model), asked, A100).served)
    (kept,) = (entry.num_bytes for entry in few.entries if "states" in entry.fact.what)
    assert kept == (64 + 1) * layers * 2 * (recurrent + convolved)
    assert few.max_num_seqs(8192) == 64


def test_steps_without_graphs_wait_for_the_host_as_those_of_vllm_do() -> None:
    """Llama-3.1-8B on an H100, whose kernels take less than their launches from Python."""
    h100, model = find_gpu("h100-sxm-80gb"), "meta-llama/Llama-3.1-8B"
    run = RunConfig(model=model, phase="inference", context=2048)
    tpot_s = {}
    for engine, option in (("sglang", "disable_cuda_graph"), ("vllm", "enforce_eager")):
        for is_eager in (True, False):
            asked = replace(run, serving=engine, serving_options=((option, is_eager),))
            answer = predict(load_model(model), asked, h100, load_calibration(h100)).serving
            assert answer
            assert answer.time
            tpot_s[engine, is_eager] = answer.time.tpot_s
    assert tpot_s["sglang", True] > 1.8 * tpot_s["sglang", False]
    assert tpot_s["sglang", True] == pytest.approx(tpot_s["vllm", True], rel=0.1)
