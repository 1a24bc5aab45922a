"""Experts divided whole, and groups of GPUs with sequences of their own."""

from __future__ import annotations

import random

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.memory.weights import weight_bytes
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.predict.serving_links import exchange_s
from whichlora.serving import sglang, sglang_share, vllm
from whichlora.serving.base import Served
from whichlora.serving.expert_ranks import ExpertRanks, check_experts
from whichlora.serving.profile_pass import attention_entry, layer_entry
from whichlora.serving.rank import rank_model
from whichlora.serving.step_time import Step, step_timer
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu, find_target
from whichlora.store.hub import load_model
from whichlora.workflow.combinations import shared_by_engine

MINIMAX, DEEPSEEK = "MiniMaxAI/MiniMax-M2.5", "deepseek-ai/DeepSeek-V3"
H200 = "h200-sxm-141gb"


def run_of(engine: str, model: str = DEEPSEEK, **options: object) -> RunConfig:
    return RunConfig(
        model=model,
        phase="inference",
        serving=engine,
        context=9000,
        prompt_len=4000,
        max_new_tokens=500,
        batch_size=64,
        quant="fp8",
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )


def asked(engine: str, model: str = DEEPSEEK, **options: object) -> Served:
    return resolve(load_model(model), run_of(engine, model, **options), find_gpu(H200)).served


def answer(engine: str, model: str = DEEPSEEK, **options: object) -> ServingPrediction:
    gpu = find_target(H200)
    run = run_of(engine, model, **options)
    serving = predict(load_model(model), run, gpu, load_calibration(gpu)).serving
    assert serving is not None
    return serving


def test_whole_experts_take_as_much_as_divided_ones() -> None:
    """Scales are of blocks, which both divisions leave whole."""
    model, dtypes = load_model(DEEPSEEK), asked("vllm").dtypes
    by_width = weight_bytes(rank_model(model, 8), dtypes)["layers"]
    whole = weight_bytes(rank_model(model, 8, ExpertRanks(whole=8)), dtypes)["layers"]
    assert whole == by_width


def test_the_fullest_gpu_has_one_more_and_redundant_ones_count() -> None:
    assert ExpertRanks(whole=6).held(256) == 43
    assert ExpertRanks(whole=8, redundant=32).held(256) == 36
    one, more = (
        weight_bytes(
            rank_model(load_model(DEEPSEEK), 8, ExpertRanks(whole=8, redundant=redundant)),
            asked("vllm").dtypes,
        )["layers"]
        for redundant in (0, 8)
    )
    expert = 3 * 7168 * 2048  # of 58 layers
    assert more - one == pytest.approx(58 * expert, rel=2e-3)


def test_a_copy_has_attention_whole_and_a_share_of_the_experts() -> None:
    model = load_model(DEEPSEEK)
    rank = rank_model(model, 1, ExpertRanks(copies=8, whole=8))
    layer = next(layer for layer, _ in rank.layers() if layer.moe is not None)
    whole = next(layer for layer, _ in model.layers() if layer.moe is not None)
    assert layer.attentions == whole.attentions
    assert layer.moe is not None
    assert whole.moe is not None
    assert layer.moe.shared == whole.moe.shared
    assert {linear.count for linear in layer.moe.expert.linears} == {32}


def test_sglang_divides_dense_matrices_and_the_head_among_all() -> None:
    served = asked("sglang", tp_size=8, ep_size=8, attn_dp_size=8)
    rank = rank_model(served.model, 1, sglang.expert_ranks(served))
    dense = next(layer for layer, _ in rank.layers() if layer.mlp is not None)
    assert dense.mlp is not None
    assert dense.mlp.width == 18432 // 8
    assert rank.head is not None
    assert rank.head.out_features == 129280 // 8
    assert rank.embeddings == served.model.embeddings
    assert sglang_share.copies(served) == 8
    assert sglang_share.copies(asked("sglang", tp_size=8, dp=8, enable_dp_attention=True)) == 8


def test_the_fullest_of_ranks_is_as_full_as_random_choices_make_it() -> None:
    """8 of 256 experts for each of 64 tokens, on eight ranks: 200 draws, of one seed."""
    draw, choices, ranks = random.Random(1), 8, 8
    fullest = []
    for _ in range(200):
        rows = [0] * ranks
        for _ in range(64):
            for expert in draw.sample(range(256), choices):
                rows[expert // 32] += 1
        fullest.append(max(rows))
    mean = 64 * choices / ranks
    drawn = sum(fullest) / len(fullest) / mean
    predicted = 1 + ExpertRanks(whole=ranks).spread(choices) / 64**0.5
    assert predicted == pytest.approx(drawn, rel=0.05)
    assert ExpertRanks(width=8).spread(8) == 0.0


def test_engines_that_share_experts_each_have_a_pool() -> None:
    one = answer("vllm", MINIMAX, tensor_parallel_size=4, enable_expert_parallel=True)
    four = answer("vllm", MINIMAX, data_parallel_size=4, ep=True)
    start = vllm.start(asked("vllm", MINIMAX, data_parallel_size=4, ep=True))
    assert four.kv_pool_tokens == 4 * start.pool.num_tokens(9000)
    assert four.max_concurrency == 4 * start.pool.max_concurrency(9000)
    assert start.max_running(9000) == 4 * start.pool.num_sequences(9000)
    # each rank has all heads of keys, so a token takes four times as much of one GPU
    assert four.block_bytes == 4 * one.block_bytes
    assert one.time is not None
    assert four.time is not None
    assert "communication" in four.time.step_parts_s


def test_latents_of_all_groups_hold_more_sequences_than_repeated_ones() -> None:
    repeated = answer("sglang", tp_size=8, ep_size=8)
    own = answer("sglang", tp_size=8, ep_size=8, attn_dp_size=8)
    assert own.kv_pool_tokens > 2 * repeated.kv_pool_tokens


def test_a_step_of_groups_reads_fewer_latents_and_exchanges_states() -> None:
    parts = []
    for options in ({}, {"attn_dp_size": 8}):
        served = asked("sglang", tp_size=8, ep_size=8, **options)
        stepping = sglang.stepping(served)
        exchange = exchange_s(
            stepping.copies, served.gpu, load_calibration(served.gpu).machines, gathered_share=1.0
        )
        assert exchange is not None
        timer = step_timer(
            served, stepping=stepping, reduction_s=lambda _: 0.0, exchange_s=exchange
        )
        sequences = 128 // stepping.copies
        step = Step(decoding=sequences, cached_tokens=4096.0 * sequences, sampled=sequences)
        parts.append(timer.parts(step))
    alike, own = parts
    assert own["communication"] > alike["communication"] == 0.0
    assert own["attention"] < alike["attention"]


def test_states_of_all_ranks_are_gathered_in_fewer_bytes_where_they_are_narrow() -> None:
    gpu = find_target(H200)
    machines = load_calibration(gpu).machines
    wide, narrow = (exchange_s(8, gpu, machines, gathered_share=share) for share in (1.0, 0.5))
    alone = exchange_s(1, gpu, machines, gathered_share=1.0)
    assert wide is not None
    assert narrow is not None
    assert alone is not None
    assert alone(1e6) == 0.0
    assert narrow(64e6) < wide(64e6) < 2 * narrow(64e6)


def test_the_profile_pass_gathers_tokens_of_all_copies() -> None:
    rank = rank_model(load_model(MINIMAX), 1, ExpertRanks(copies=4, whole=4))
    one, four = (
        layer_entry(rank, tokens=8192, element_bytes=2, copies=copies).num_bytes
        for copies in (1, 4)
    )
    experts = 8192 * 8 * (3072 + 1536) * 2  # eight of a token: the wider product, the activation
    assert four - one == 3 * experts + 4 * 8192 * 3072 * 2
    assert attention_entry(rank, tokens=8192, element_bytes=2).num_bytes < one


def test_gpus_are_shared_beside_copies() -> None:
    settings = {"serving": "vllm", "gpus": 8, "serving_options": {"data_parallel_size": 4}}
    options = dict(shared_by_engine(settings)["serving_options"])
    assert options["tensor_parallel_size"] == 2
    with pytest.raises(ConfigError, match="gpus: 6, but data_parallel_size is 4"):
        shared_by_engine(settings | {"gpus": 6})


def test_the_command_has_the_flags_of_experts() -> None:
    served = asked("vllm", tensor_parallel_size=8, ep=True, num_redundant_experts=32)
    command = vllm.command(served)
    assert "--enable-expert-parallel" in command
    assert "--enable-eplb --eplb-config.num_redundant_experts 32" in command


@pytest.mark.parametrize(
    ("engine", "model", "options", "message"),
    [
        ("vllm", "Qwen/Qwen3-8B", {"data_parallel_size": 2}, "has no experts, so it makes engines"),
        ("vllm", "Qwen/Qwen3-8B", {"ep": True}, "has no experts; leave it out"),
        ("vllm", DEEPSEEK, {"num_redundant_experts": 8}, "8 without enable_expert_parallel"),
        ("vllm", DEEPSEEK, {"tp": 8, "ep": True, "num_redundant_experts": 3}, "give 0 or a mult"),
        ("sglang", DEEPSEEK, {"tp": 8, "dp": 8}, "dp_size: without enable_dp_attention"),
        ("sglang", DEEPSEEK, {"tp": 8, "ep": 3}, "ep_size: 3 is no divisor of tp_size 8"),
        ("sglang", "Qwen/Qwen3-8B", {"tp": 8, "ep": 2}, "has none; leave them out"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    engine: str, model: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(engine, model, **options)


def test_one_expert_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than two for each of 256 GPUs"):
        check_experts(load_model(DEEPSEEK), ExpertRanks(whole=256))


def test_copies_of_stages_have_no_time() -> None:
    served = answer("vllm", MINIMAX, data_parallel_size=2, pipeline_parallel_size=2)
    assert served.time is None
