"""DeepSpeed's ZeRO: what is divided, what is gathered, and kept readings of the real library."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import gloo_ranks
import pytest
import zero_on_cpu
import zero_requests
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.event_list import EventList
from whichlora.memory.gradients import Trained
from whichlora.memory.optimizer import TEMPORARIES
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import training_ledger
from whichlora.memory.weights import LAYER_WEIGHTS, quantised_state_bytes
from whichlora.parallel import deepspeed, gathered_modules, get_strategy, zero3
from whichlora.parallel.base import RankKind, Spread
from whichlora.parallel.host_update import threads_of
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.numeric import Count
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, MiB

MODEL = load_model("meta-llama/Llama-3.2-1B")
RECORDS = [record for record in zero_on_cpu.kept() if "error" not in record["reading"]]
STAGES = ("zero1", "zero2", "zero3")


def a_run(
    strategy: str, gpus: int = 8, options: dict[str, Any] | None = None, **run: Any
) -> RunConfig:
    parallel = ParallelConfig(strategy=strategy, gpus=gpus, options=tuple((options or {}).items()))
    return RunConfig(**({"model": MODEL.name, "method": "full", "parallel": parallel} | run))


def predicted(strategy: str, gpus: int = 8, **settings: Any) -> Prediction:
    return predict(MODEL, a_run(strategy, gpus, **settings), A100, prior_calibration(A100))


def a_rank(run: RunConfig) -> tuple[RankKind, Spread]:
    job = resolve(MODEL, run, A100)
    assert job.layout is not None
    (kind,) = job.layout.rank_kinds(training_step(job))
    ((_, spread),) = job.layout.strategies
    return kind, spread


def step_and_spread(run: RunConfig) -> tuple[TrainingStep, Spread]:
    rank, spread = a_rank(run)
    return rank.step, spread


@pytest.mark.parametrize(
    "record",
    RECORDS,
    ids=[
        f"{number}-{r['case']['run']['parallel']['strategy']}" for number, r in enumerate(RECORDS)
    ],
)
def test_the_formulas_give_what_real_ranks_held(record: dict[str, Any]) -> None:
    measured, expected = zero_on_cpu.compared(record)
    assert expected == pytest.approx(measured, rel=0.03)


def test_the_median_of_the_errors_is_small() -> None:
    pairs = [zero_on_cpu.compared(record) for record in RECORDS]
    assert len(pairs) >= 60
    errors = sorted(abs(expected / measured - 1) for measured, expected in pairs)
    assert statistics.median(errors) < 0.003
    assert errors[round(0.9 * len(errors))] < 0.02


def test_towers_in_stage_3_are_near_what_real_ranks_held() -> None:
    """Small models, of which tables beside the blocks of a tower are a large part."""
    records = list(zero_on_cpu.kept(zero_on_cpu.SEEN_IN_STAGE_3))
    assert len(records) >= 22
    pairs = [zero_on_cpu.compared(record) for record in records]
    errors = sorted(abs(expected / measured - 1) for measured, expected in pairs)
    assert statistics.median(errors) < 0.01
    assert errors[round(0.9 * len(errors))] < 0.09
    assert errors[-1] < 0.14


def test_a_tower_is_gathered_for_itself_and_kept_as_the_text_is() -> None:
    seen = gathered_modules.Seen(layers=1)
    (whole, near) = (live(seen=seen, max_reuse=distance, max_live=1) for distance in (10**9, 1))
    assert (whole.seen, whole.forward) == (50 + 20, 140)
    assert (near.seen, near.first_layer) == (10, 10)
    frozen = gathered_modules.Seen(layers=1, goes_backward=False)
    found = live(seen=frozen, max_reuse=10**9, max_live=1)
    assert found.seen_backward == 0 < whole.seen_backward


def test_a_block_that_learns_nothing_is_refused_in_stage_3() -> None:
    run = a_run("zero3", model="llava-hf/llava-1.5-7b-hf", method="lora", images=1, seq_len=2048)
    with pytest.raises(ConfigError, match="learns nothing"):
        predict(load_model(run.model), run, A100, prior_calibration(A100))


@pytest.mark.oracle
@pytest.mark.parametrize("strategy", zero_on_cpu.STRATEGIES)
def test_ranks_hold_today_what_they_held(strategy: str) -> None:
    if strategy != "ddp" and not gloo_ranks.HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8")
    of_two = [
        record
        for record in RECORDS
        if record["case"]["run"]["parallel"]["strategy"] == strategy
        and record["case"]["run"]["parallel"]["gpus"] == 2
    ][:2]
    again = gloo_ranks.readings([record["case"] for record in of_two], world_size=2)
    for record, reading in zip(of_two, again, strict=True):
        for moment, size in record["reading"].items():
            assert reading[moment] == pytest.approx(size, rel=1e-3), moment


# --- partitions ---------------------------------------------------------------------------------


def test_partitions_are_padded_to_two_elements_for_each_rank() -> None:
    assert deepspeed.partition_elements(200, 2) == 100
    assert deepspeed.partition_elements(7, 4) == 2
    pieces = list(deepspeed.pieces_of_ranks((30, 100, 70), 100))
    assert pieces == [(0, 30, 30), (0, 100, 70), (1, 100, 30), (1, 70, 70)]
    assert deepspeed.rank_at_norm(pieces) == 1


def test_what_stage_3_gathers_ahead_follows_the_hidden_size_unless_stated() -> None:
    limits = zero3.gather_limits(*step_and_spread(a_run("zero3")))
    assert limits == {
        "max_live": 10**9,
        "max_reuse": 10**9,
        "prefetch": int(0.9 * MODEL.hidden_size**2),
    }
    few = a_run("zero3", options={"stage3_prefetch_bucket_size": 5})
    assert zero3.gather_limits(*step_and_spread(few))["prefetch"] == 5


def test_a_parameter_that_is_cut_is_held_whole_by_both_ranks() -> None:
    shares = deepspeed.flat_shares((100, 60, 40), 2)
    assert (shares.partition, shares.whole, shares.piece) == (100, 100, 100)
    shares = deepspeed.flat_shares((30, 100, 70), 2)
    assert (shares.partition, shares.whole, shares.piece) == (100, 170, 70)
    shares = deepspeed.flat_shares((250, 50, 60, 40), 4)
    assert (shares.whole, shares.piece) == (300, 100)
    assert shares.at_norm == (250, 100)  # the rank with the most parameters has smaller pieces
    assert deepspeed.flat_shares((7,), 4).partition == 2


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_partitions_of_adapters_are_bounded_by_what_flat_shares_says(ranks: int) -> None:
    sizes = (40, 24) * 5
    tensors = (
        Trained(rows=5, width=8, param_bytes=2, count=5),
        Trained(rows=3, width=8, param_bytes=2, count=5),
    )
    exact = deepspeed.flat_shares(sizes, ranks)
    estimated = deepspeed.estimated_shares(tensors, ranks)
    assert estimated.partition == exact.partition
    assert exact.whole <= estimated.whole + 40


def test_states_and_their_fp32_copy_are_divided() -> None:
    for strategy in STAGES:
        of_two = predicted(strategy, 2).memory.breakdown["optimizer_states"]
        of_eight = predicted(strategy, 8).memory.breakdown["optimizer_states"]
        assert of_eight == pytest.approx(12 * MODEL.num_params / 8, rel=1e-3)
        assert of_two == pytest.approx(4 * of_eight, rel=1e-3)
    assert deepspeed.update_share(a_rank(a_run("zero1"))[1]) == 1 / 8


def test_each_stage_needs_less_than_the_one_before() -> None:
    peaks = [
        predicted(strategy, gradient_accumulation_steps=4, seq_len=256).memory.peak_allocated_bytes
        for strategy in STAGES
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.7 * peaks[0]


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_parameter_has_16_bits_but_adapters_made_after_zero_init(
    strategy: str, method: str
) -> None:
    kind, spread = a_rank(a_run(strategy, method=method))
    is_wide = (strategy, method) == ("zero3", "lora")
    assert kind.step.param_bytes == (4 if is_wide else 2)
    assert kind.step.dtypes.linears_keep_inputs == is_wide
    assert not kind.step.dtypes.under_autocast
    if strategy == "zero3":
        assert zero3.partitioned(kind.step, spread).width == 2


def test_the_bucket_is_the_hidden_size_squared_unless_told() -> None:
    kind, spread = a_rank(a_run("zero2"))
    assert deepspeed.bucket_elements(kind.step, spread) == MODEL.hidden_size**2
    kind, spread = a_rank(a_run("zero2", options={"zero_bucket_size": 500_000_000}))
    assert deepspeed.bucket_elements(kind.step, spread) == 500_000_000


def test_gradients_are_reduced_in_buckets() -> None:
    kind, spread = a_rank(a_run("zero2", options={"zero_bucket_size": 10**8}))
    assert deepspeed.num_reductions(kind.step, spread) == -(-MODEL.num_params // 10**8)
    several = predicted("zero2", gradient_accumulation_steps=3).several_gpus
    assert several is not None
    gradients, gathered = several.communication.messages
    assert gradients.num_bytes * gradients.count == pytest.approx(6 * MODEL.num_params, rel=1e-3)
    assert gathered.num_bytes * gathered.count == 2 * MODEL.num_params


# --- stage 3 ------------------------------------------------------------------------------------

LINE = ((-1, 0, 50), (0, 1, 10), (0, 2, 10), (1, 3, 10), (1, 4, 10), (2, 5, 50))


def live(**settings: Any) -> gathered_modules.Live:
    options = {
        "checkpointed": False,
        "reads_table_again": True,
        "max_live": 10**9,
        "max_reuse": 10**9,
        "prefetch": 1,
    }
    return gathered_modules.live_parameters(LINE, **(options | settings))


def test_a_model_smaller_than_the_reuse_distance_stays_gathered() -> None:
    assert live().loss == live().total == 140


def test_without_reuse_modules_are_gathered_ahead_alone() -> None:
    # two modules ahead: the queue has the head twice, for its forward and its backward
    assert live(max_reuse=1).first_layer == 10 + 10 + 50
    assert live(max_reuse=1, max_live=1).first_layer == 10


def test_nothing_is_gathered_ahead_or_kept_where_the_limits_are_zero() -> None:
    assert live(max_reuse=0, max_live=0, prefetch=0) == live(max_reuse=1, max_live=1)
    limits = [option for option in zero3.STRATEGY.options if option.name.startswith("stage3_")]
    assert [option.checked(0) for option in limits] == [0] * 4


def test_layers_near_the_loss_stay_for_the_backward() -> None:
    assert live(max_reuse=101, max_live=1).loss == 50 + 10
    assert live(max_reuse=121, max_live=1).loss == 50 + 20


def test_small_parameters_stay_gathered() -> None:
    kind, spread = a_rank(a_run("zero3"))
    assert zero3.persistence_threshold(kind.step, spread) == 10 * MODEL.hidden_size
    norms = 2 * MODEL.num_hidden_layers + 1
    assert zero3.small_parameter_bytes(kind.step, spread) == 2 * norms * MODEL.hidden_size


def test_adapters_are_gathered_beside_their_matrices() -> None:
    kind, spread = a_rank(a_run("zero3", method="lora", r=64))
    kept = zero3.live_of(kind.step, spread)
    whole = zero3.live_bytes(kind.step, spread, kept, "backward")
    assert whole == kept.total + 4 * kind.step.num_trained
    keys = gathered_modules.adapted_keys(kind.step)
    assert len({key for key, _ in keys}) == 7 * MODEL.num_hidden_layers


def test_the_embedding_is_gathered_while_its_gradient_is_reduced_last() -> None:
    untied = load_model("meta-llama/Llama-3.1-8B")
    job = resolve(untied, replace(a_run("zero3"), model=untied.name), A100)
    step = training_step(job)
    assert zero3.trained_table_bytes(step) == 2 * 128_256 * 4096
    assert job.layout is not None
    moments = job.layout.merged_ledger(job.layout.rank_kinds(step)).moments
    held = {entry.fact: entry.num_bytes for entry in moments["table_reduced"]}
    assert held[deepspeed.WAITING] == zero3.trained_table_bytes(step)
    assert held[zero3.LIVE_PARAMETERS] >= held[deepspeed.WAITING]
    assert "table_reduced" not in ledger(resolve(MODEL, a_run("zero3"), A100)).moments  # tied


def test_the_head_has_the_adapters_of_no_released_matrix_beside_it() -> None:
    at_once = {"stage3_max_reuse_distance": 1, "stage3_max_live_parameters": 1}
    kind, spread = a_rank(a_run("zero3", method="lora", r=64, options=at_once))
    gathered = zero3.live_of(kind.step, spread)
    assert sum(gathered.kinds["loss"]) == 0
    assert zero3.live_bytes(kind.step, spread, gathered, "loss") == gathered.loss
    moments = zero3.STRATEGY.moments(kind, training_ledger(kind.step).moments, spread)
    (held,) = [e.num_bytes for e in moments["loss_forward"] if e.fact is zero3.LIVE_PARAMETERS]
    assert held == gathered.loss == 2 * MODEL.head.num_weights


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
def test_stage_3_updates_one_sub_group_after_another(optimizer: Any) -> None:
    def update_bytes(**options: int) -> dict[str, Count]:
        kind, spread = a_rank(a_run("zero3", optimizer=optimizer, options=options))
        moments = zero3.STRATEGY.moments(kind, training_ledger(kind.step).moments, spread)
        wanted = (deepspeed.FLAT_GRADIENT, TEMPORARIES)
        return {
            name: sum(e.num_bytes for e in moments[name] if e.fact in wanted)
            for name in ("flat_gradient", "optimizer_step")
        }

    kind, spread = a_rank(a_run("zero3"))
    first = zero3.partitioned(kind.step, spread).groups[0]
    whole, few, single = (
        update_bytes(**options)
        for options in ({}, {"sub_group_size": 1_000_000}, {"sub_group_size": 0})
    )
    lists = 2 if optimizer == "adamw_torch" else 1  # gradients, and one list of temporaries
    for found, elements in (
        (whole, first.partition),
        (few, 1_000_000 + first.piece),
        (single, first.piece),
    ):
        assert found == {"flat_gradient": 6 * elements, "optimizer_step": 4 * lists * elements}


def test_codes_are_gathered_as_bytes_and_their_scales_stay_whole() -> None:
    kind, spread = a_rank(a_run("zero3", method="qlora", quant="nf4"))
    wide, _ = a_rank(a_run("zero3", method="lora"))
    matrices = sum(
        group.count * linear.num_weights for group in MODEL.groups for linear in group.layer.linears
    )
    totals = [zero3.live_of(step, spread).total for step in (wide.step, kind.step)]
    assert totals[0] - totals[1] == 2 * matrices - matrices // 2
    widths = dict(gathered_modules.element_widths(kind.step))
    assert set(widths.values()) == {1, 2}
    moments = zero3.STRATEGY.moments(kind, training_ledger(kind.step).moments, spread)
    (held,) = [e.num_bytes for e in moments["layer_forward"] if e.fact is LAYER_WEIGHTS]
    scales = quantised_state_bytes(MODEL, kind.step.dtypes, codes=False)
    assert scales > 4 * matrices // 64
    assert held == pytest.approx(scales + matrices // 2 // spread.size, rel=0.01)


def test_parameters_beyond_the_reuse_distance_are_gathered_twice() -> None:
    nothing_ahead = {"stage3_max_reuse_distance": 1, "stage3_max_live_parameters": 1}
    few = predicted("zero3", options=nothing_ahead).several_gpus
    all_kept = predicted("zero3").several_gpus
    assert few is not None
    assert all_kept is not None
    again = {message.what: message for message in few.communication.messages}
    backward = again["parameters of the backward"]
    assert backward.num_bytes * backward.count > 1.5 * MODEL.num_params
    assert few.communication.num_bytes > all_kept.communication.num_bytes


# --- the host -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STAGES)
def test_an_offloaded_optimizer_is_on_the_host(strategy: str) -> None:
    offloaded = predicted(strategy, options={"offload": ("optimizer",)})
    assert offloaded.memory.breakdown["optimizer_states"] == 0
    assert offloaded.several_gpus is not None
    held = offloaded.several_gpus.ranks[0].host_bytes
    share, largest = MODEL.num_params / 8, MODEL.embeddings[0].num_params
    pinned = [4 * share, 2 * share] + ([] if strategy == "zero3" else [4 * share, 2 * largest])
    plain = (12 if strategy == "zero3" else 8) * share  # states, in stage 3 the parameters, too
    assert held == pytest.approx(plain + sum(map(block, pinned)), rel=1e-3)


def block(num_bytes: float) -> float:
    """Of pinned memory: a power of two."""
    return 2 ** math.ceil(math.log2(num_bytes))


def test_each_update_has_pinned_gradients_of_its_own() -> None:
    kind, spread = a_rank(a_run("zero3", options={"sub_group_size": 40_000_000}))
    part = zero3.partitioned(kind.step, spread)
    first, *others = zero3.sub_groups(kind.step, spread, part)
    table, matrix = MODEL.embeddings[0].num_params // 8, 8192 * 2048 // 8
    in_layer = (2 * 2048 * 2048 + 2 * 512 * 2048) // 8
    # the embedding, and parameters of the first layer until there are 40 million
    assert 40_000_000 <= first < 40_000_000 + matrix
    assert first - table <= in_layer + 3 * matrix
    assert sum((first, *others)) == part.elements


def test_offloaded_parameters_are_on_the_host() -> None:
    both = predicted("zero3", options={"offload": ("optimizer", "params")})
    optimizer = predicted("zero3", options={"offload": ("optimizer",)})
    assert both.several_gpus is not None
    assert optimizer.several_gpus is not None
    moved = both.several_gpus.ranks[0].host_bytes - optimizer.several_gpus.ranks[0].host_bytes
    # in one flat buffer; what `zero.Init` has pinned before stays with the allocator
    flat = block(2 * MODEL.num_params / 8)
    assert flat + 2 * MODEL.num_params / 8 < moved < 2.1 * flat


@pytest.mark.parametrize("strategy", STAGES)
def test_an_offloaded_optimizer_is_deepspeed_s_adam_whatever_was_asked(strategy: str) -> None:
    options = {"offload": ("optimizer",)}
    adam, other = (
        predicted(strategy, options=options, optimizer=name)
        for name in ("adamw_torch", "adamw_8bit")
    )
    assert other.memory.device_used_bytes == adam.memory.device_used_bytes
    assert other.several_gpus.ranks == adam.several_gpus.ranks
    assert "offload: accelerate replaces the optimizer by DeepSpeedCPUAdam" in other.notes


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (a_run("zero2", options={"offload": ("optimizer",)}, optimizer="lion"), "on the host"),
        (a_run("zero2", options={"offload": ("params",)}), "accepted are optimizer"),
        (a_run("zero3", method="qlora", quant="int8"), "use zero2"),
        (a_run("zero3", method="qlora", quant="gptq-int4"), "are buffers"),
    ],
)
def test_what_deepspeed_does_not_run_is_refused(run: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(MODEL, run, A100, prior_calibration(A100))


def test_the_trainer_gets_deepspeeds_own_file() -> None:
    run = a_run("zero3", options={"offload": ("params",), "zero_bucket_size": 7})
    _, spread = a_rank(run)
    config = get_strategy("zero3").training_arguments(run, spread)["deepspeed"]
    zero = config["zero_optimization"]
    assert config["bf16"] == {"enabled": True}
    assert (zero["stage"], zero["reduce_bucket_size"]) == (3, 7)
    assert zero["stage3_prefetch_bucket_size"] == "auto"
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in zero
    none_ahead = a_run("zero3", options={"stage3_prefetch_bucket_size": 0})
    _, spread = a_rank(none_ahead)
    config = get_strategy("zero3").training_arguments(none_ahead, spread)["deepspeed"]
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 0


@pytest.mark.parametrize("strategy", STAGES)
def test_an_offloaded_update_takes_time_on_the_host_and_copies_over_pcie(strategy: str) -> None:
    options = {"offload": ("optimizer",)}
    alone, offloaded = predicted(strategy), predicted(strategy, options=options)
    kind, spread = a_rank(a_run(strategy, options=options))
    update = get_strategy(strategy).host_update(kind, spread)
    share = MODEL.num_params / 8
    assert update is not None
    assert update.threads == threads_of(spread) == 1
    # 28 of the update, 8 of the gradients' scale, 6 of the cast to 16 bit
    assert update.num_bytes == pytest.approx(42 * share, rel=1e-3)
    assert deepspeed.update_share(spread) == 0
    assert alone.several_gpus is not None
    assert offloaded.several_gpus is not None
    assert {m.size for m in alone.several_gpus.communication.messages} == {8}
    copies = [m for m in offloaded.several_gpus.communication.messages if m.size == 1]
    sent = {
        what: sum(m.num_bytes * m.count for m in copies if m.collective == what)
        for what in ("to_host", "from_host")
    }
    # fp32 gradients leave, 16-bit parameters come; stage 3 stores and fetches 16-bit gradients, too
    more = 2 * (strategy == "zero3")
    assert sent["to_host"] == pytest.approx((4 + more) * share, rel=1e-3)
    assert sent["from_host"] == pytest.approx((2 + more) * share, rel=1e-3)


def test_offloaded_parameters_come_to_the_gpu_before_each_gather() -> None:
    options = {"offload": ("optimizer", "params")}
    several = predicted("zero3", options=options, gradient_accumulation_steps=3).several_gpus
    assert several is not None
    shares = [m for m in several.communication.messages if "shares to the GPU" in m.what]
    assert [m.count for m in shares] == [3, 3]
    assert shares[0].num_bytes == pytest.approx(2 * MODEL.num_params / 8, rel=0.01)


def test_a_four_bit_base_loads_whole_on_each_gpu_under_stage_3_and_a_note_says_so() -> None:
    prediction = predicted("zero3", 4, method="qlora", quant="nf4")
    assert any("each GPU first loads all 4-bit weights" in note for note in prediction.notes)
    assert not any("4-bit" in note for note in predicted("zero3", 4, method="lora").notes)


# --- what the allocator reserves ----------------------------------------------------------------


REQUESTS = list(zero_requests.compared())


@pytest.mark.parametrize("compared", REQUESTS, ids=[f"{n}-{r[0]}" for n, r in enumerate(REQUESTS)])
def test_a_rank_reserves_what_the_requests_of_real_ones_do(
    compared: tuple[str, dict[str, int], dict[str, int]],
) -> None:
    _, reading, expected = compared
    assert expected["allocated_bytes"] == pytest.approx(reading["allocated_bytes"], rel=0.05)
    assert expected["reserved_bytes"] == pytest.approx(reading["reserved_bytes"], rel=0.12)


def test_half_of_the_ranks_reserve_exactly_that() -> None:
    exact = [r["reserved_bytes"] == e["reserved_bytes"] for _, r, e in REQUESTS]
    assert sum(exact) >= len(exact) / 2


def reserved_and_verdict(gpu: str, model: str, run: RunConfig) -> tuple[float, str]:
    device = find_gpu(gpu)
    found = predict(load_model(model), run, device, prior_calibration(device))
    return found.memory.peak_reserved_bytes / GiB, found.verdict


# Threads whose runs went out of memory, and were said to fit: LLaMA-Factory issues 4133, 6752
# and 5977, with its files of then.
OF_THREADS = (
    ("a100-sxm-40gb", "Qwen/Qwen1.5-7B", "zero2", 8, 512, "fp16"),
    ("rtx-3090-24gb", "Qwen/Qwen2.5-3B", "zero2", 4, 512, "bf16"),
    ("rtx-3090-24gb", "meta-llama/Meta-Llama-3-8B", "zero3", 8, 1024, "fp16"),
)


@pytest.mark.parametrize(("gpu", "model", "strategy", "gpus", "seq_len", "half"), OF_THREADS)
def test_runs_that_went_out_of_memory_are_not_said_to_fit(
    gpu: str, model: str, strategy: str, gpus: int, seq_len: int, half: str
) -> None:
    options = {"overlap_comm": True, "zero_bucket_size": 500_000_000}
    run = a_run(strategy, gpus, options, model=model, seq_len=seq_len, precision=half, batch_size=1)
    assert reserved_and_verdict(gpu, model, run)[1] == "undecided"


def idle_bytes(run: RunConfig) -> int:
    return predict(MODEL, run, A100, prior_calibration(A100)).memory.breakdown["allocator"]


def test_an_fp32_share_finds_no_hole_among_activations() -> None:
    share = deepspeed.MASTER_BYTES * MODEL.num_params / 2
    for strategy in STAGES:
        assert idle_bytes(a_run(strategy, 2)) > share / 2


def test_several_strategies_together_have_an_estimate() -> None:
    job = resolve(MODEL, a_run("tp+fsdp", 4, {"tp_size": 2}), A100)
    assert job.layout is not None
    kind, *_ = job.layout.rank_kinds(training_step(job))
    assert job.layout.requests(kind) is None


def test_a_stream_of_its_own_has_segments_of_its_own() -> None:
    requests = EventList()
    requests.die(requests.born(40 * MiB))
    number = requests.numbers(1)
    requests.play_aside([(number, 40 * MiB)])
    requests.play_aside([(number, -40 * MiB)])
    assert requests.peak_bytes == requests.large_peak_bytes == 40 * MiB
    assert len(requests.aside) == 2
    assert requests != EventList()


def test_only_gradients_that_a_bucket_takes_leave_stage_1_before_the_end() -> None:
    large = {"overlap_comm": True, "zero_bucket_size": 2 * 10**9}
    at_once = predicted("zero1", 8, options=large).memory
    waiting = predicted("zero1", 8, options=large, gradient_accumulation_steps=2).memory
    gradients = 2 * MODEL.num_params
    assert at_once.peak_allocated_bytes + gradients / 2 < waiting.peak_allocated_bytes


def moments_of(half: str, deepspeed_release: str, **options: Any) -> dict[str, int]:
    libraries = (("deepspeed", deepspeed_release),)
    run = a_run("zero2", 8, options, precision=half, libraries=libraries)
    counted = ledger(resolve(MODEL, run, A100))
    return {name: int(counted.moment_bytes(name)) for name in counted.moments}


def test_before_0_19_6_an_overflow_in_fp16_is_looked_for_in_wide_copies() -> None:
    older = moments_of("fp16", "0.19.5")
    share = MODEL.num_params / 8  # a part of the embedding
    assert older["overflow_check"] - older["gradient_norm"] == pytest.approx(3 * share, rel=0.01)
    assert "overflow_check" not in moments_of("fp16", "0.19.6")
    assert "overflow_check" not in moments_of("bf16", "0.19.5")
    offloaded = {
        release: moments_of("bf16", release, offload=("optimizer",))["last_gradient_to_host"]
        for release in ("0.14.2", "0.19.8")
    }
    assert offloaded["0.14.2"] > offloaded["0.19.8"]
