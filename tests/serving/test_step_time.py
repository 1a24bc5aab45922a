"""Steps of serving engines: parts that add up, and what each of them depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest

import whichlora
from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving.kernel_rates import MOST_PRODUCTS, TRITON_BLOCKS, kernel_rates
from whichlora.serving.step_time import PARTS, Step, StepTimer, own_all_reduce, step_timer
from whichlora.serving.vllm import FIRST_AWQ
from whichlora.spec.dtypes import resolve_dtypes
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.timing.expansion import unpacking_time
from whichlora.timing.model import chip_of

MODEL = "Qwen/Qwen2.5-7B"
ALONE = Step(decoding=1, cached_tokens=1000, sampled=1)


def timer(
    gpu_name: str = "a100-sxm-80gb", model: str = MODEL, serving: str = "vllm", **settings: object
) -> StepTimer:
    run = RunConfig(model=model, phase="inference", serving=serving, **settings)  # type: ignore[arg-type]
    job = resolve(load_model(model), run, find_target(gpu_name))
    assert job.engine.stepping is not None
    stepping = job.engine.stepping(job.served)
    return step_timer(job.served, stepping=stepping, reduction_s=own_all_reduce(0.0, 1))


def served(gpu_name: str = "a100-sxm-80gb", **settings: object) -> ServingPrediction:
    run = RunConfig(model=MODEL, phase="inference", **({"serving": "vllm"} | settings))  # type: ignore[arg-type]
    gpu = find_target(gpu_name)
    answer = predict(load_model(MODEL), run, gpu, load_calibration(gpu)).serving
    assert answer is not None
    return answer


def test_parts_add_up_to_a_step() -> None:
    parts = timer().parts(ALONE)
    assert tuple(parts) == PARTS
    assert timer().seconds(ALONE) == pytest.approx(sum(parts.values()))


def test_one_token_waits_for_the_weights() -> None:
    """15.2 GB without the token table, at 74 % of the bandwidth."""
    model = load_model(MODEL)
    read = 2 * (model.num_params - model.vocab_size * model.hidden_size)
    products_s = timer().parts(ALONE)["products"]
    assert products_s == pytest.approx(read / (0.74 * 2.039e12), rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    long = Step(
        decoding=0, cached_tokens=0, prompt_tokens=4096, prompt_pairs=4096**2 / 2, sampled=1
    )
    model = load_model(MODEL)
    flops = 2 * 4096 * (model.num_params - 2 * model.vocab_size * model.hidden_size)
    at_least = flops / (0.77 * 312e12)
    assert at_least < timer().parts(long)["products"] < 1.15 * at_least


def test_keys_and_values_are_read_once() -> None:
    one, more = (
        timer().parts(Step(decoding=1, cached_tokens=cached, sampled=1))["attention"]
        for cached in (10_000, 20_000)
    )
    assert more - one == pytest.approx(10_000 * 28 * 2 * 4 * 128 * 2 / (0.75 * 2.039e12), rel=1e-6)


def test_eight_bit_keys_are_half_as_many_bytes() -> None:
    wide, narrow = (
        timer(serving_options=options).parts(Step(decoding=4, cached_tokens=4e5, sampled=4))
        for options in ((), (("kv_cache_dtype", "fp8"),))
    )
    assert narrow["attention"] < 0.51 * wide["attention"]


def test_heads_of_a_group_read_keys_for_themselves_before_0_4_3() -> None:
    """28 heads of 28 layers, a multiplication for each element, at 0.195 of 19.5 TFLOP/s."""
    older = timer(libraries=(("vllm", "0.4.2"),))
    one, more = (
        older.parts(Step(decoding=1, cached_tokens=cached, sampled=1))["attention"]
        for cached in (4_000, 8_000)
    )
    flops = 2 * 4_000 * 28 * 28 * 2 * 128
    assert more - one == pytest.approx(flops / (0.195 * 19.5e12), rel=1e-6)
    shared = timer(libraries=(("vllm", "0.4.3"),))
    assert shared.parts(ALONE)["attention"] < older.parts(ALONE)["attention"]


def test_the_blocks_of_a_chunk_do_not_fill_a_gpu() -> None:
    """Eight blocks of 64 queries for each of 28 heads: 224, in three rounds of 108."""
    chunk = Step(decoding=0, cached_tokens=0, sampled=0, prompt_tokens=512, prompt_pairs=3e7)
    short, long = (
        timer(libraries=(("vllm", "0.6.3"),), context=context).parts(chunk)["attention"]
        for context in (32_768, 40_000)
    )
    moved = 512 * timer(libraries=(("vllm", "0.6.3"),)).attentions[0].prompt_s
    assert (long - moved) / (short - moved) == pytest.approx(3 * 108 / 224)


@pytest.mark.parametrize(("version", "ns"), [("0.4.3", 50), ("0.5.0", 0)])
def test_the_first_hosts_copy_all_tokens_of_a_step(version: str, ns: float) -> None:
    eager = timer(
        libraries=(("vllm", version),),
        serving_options=(("enforce_eager", True),),
        quant="gptq-int4",
    )
    one, more = (
        eager.seconds(Step(decoding=1, cached_tokens=cached, sampled=1)) for cached in (100, 10_100)
    )
    assert more - one == pytest.approx(ns * 1e-5, abs=1e-9)


@pytest.mark.parametrize(("tokens", "rounds"), [(1, 1), (256, 1), (257, 2)])
def test_the_first_kernel_of_stored_experts_is_launched_for_each(tokens: int, rounds: int) -> None:
    """128 experts, two products, 48 layers, 2.5 µs each, in place of 40 µs for a layer's."""
    step = Step(decoding=tokens, cached_tokens=1000, sampled=1)
    older, newer = (
        timer(
            model="Qwen/Qwen3-30B-A3B",
            serving="sglang",
            quant="gptq-int4",
            libraries=(("sglang", version),),
        )
        for version in ("0.4.6", "0.4.7")
    )
    more = older.parts(step)["kernels"] - newer.parts(step)["kernels"]
    assert more == pytest.approx(48 * (2 * rounds * 128 * 2.5e-6 - 40e-6))


def test_the_blocks_of_the_first_awq_kernel_pass_their_tiles_in_rounds() -> None:
    """864 blocks at once; queries, output and down one round, gate and up (2,368 blocks) three."""
    tiles = 14 + 14 + 74 + 3 * 14
    older = timer(libraries=(("vllm", "0.4.2"),), quant="awq-int4", precision="fp16")
    codes = [product for product in older.products if product.is_unpacked]
    assert sum(each.count for each in codes) == 4 * 28
    work = sum(
        each.count
        * FIRST_AWQ.seconds(1, each.shapes[0][0], sum(out for _, out in each.shapes), 108)
        for each in codes
    )
    assert work == pytest.approx(28 * tiles * 1.5e-6)


@pytest.mark.parametrize(("version", "ms"), [("0.4.2", 3.75), ("0.4.3", 0.0)])
def test_ray_schedules_each_step_of_other_ranks(version: str, ms: float) -> None:
    """Published: Llama-2-7B on one and on two A100 takes 24.2 s for 2,000 tokens alike."""
    alone, shared = (
        timer(libraries=(("vllm", version),), serving_options=(("tensor_parallel_size", ranks),))
        for ranks in (1, 2)
    )
    assert shared.stepping.step_s - alone.stepping.step_s == pytest.approx(1e-3 * ms)


def test_storages_are_in_the_order_of_their_bytes() -> None:
    steps = [timer(quant=quant).seconds(ALONE) for quant in ("gptq-int4", "gptq-int8", "none")]
    assert steps == sorted(steps)


def test_zeros_of_awq_take_no_time_since_they_are_fused() -> None:
    """By github.com/vllm-project/vllm/pull/16850, of 0.9."""

    def step_s(version: str, quant: Quant) -> float:
        return timer(libraries=(("vllm", version),), quant=quant).seconds(ALONE)

    assert step_s("0.8.5", "awq-int4") > step_s("0.8.5", "gptq-int4")
    assert step_s("0.9.0", "awq-int4") == pytest.approx(step_s("0.9.0", "gptq-int4"), rel=0.01)


@pytest.mark.parametrize(
    ("card", "version", "is_bound"),
    [("t4-16gb", "0.45.3", True), ("t4-16gb", "0.50.2", True), ("rtx-4090-24gb", "0.45.3", False)],
)
def test_codes_of_bitsandbytes_are_unpacked_as_fast_as_a_card_issues_instructions(
    card: str, version: str, is_bound: bool
) -> None:
    """Of each element half a byte is read and two are written, and a product reads these."""
    step = Step(decoding=1024, cached_tokens=0, sampled=1024)
    libraries = (("vllm", "0.8.5"), ("bitsandbytes", version))
    found = timer(
        card, "meta-llama/Llama-3.1-8B", quant="nf4", precision="fp16", libraries=libraries
    )
    moved = [p for p in found.products if p.expanded_bytes]
    rate = unpacking_time(
        resolve_dtypes(
            RunConfig(model=MODEL, quant="nf4", precision="fp16", libraries=libraries),
            trains_base=False,
            device_kind="cuda",
        ),
        chip_of(find_target(card), "fp16"),
    )
    assert {p.unpacking for p in moved} == {rate}
    assert (rate > 1) is is_bound
    slower = found.parts(step)["products"]
    plain = replace(found, products=tuple(replace(p, unpacking=1.0) for p in found.products))
    unpacked = sum(p.count * (p.expanded_bytes / 2 + p.num_bytes) for p in moved)
    more = (moved[0].unpacking - 1) * unpacked / (0.8 * found.bandwidth)
    assert slower - plain.parts(step)["products"] == pytest.approx(more)


def test_units_multiply_4_bit_floats_and_other_cards_unpack_them() -> None:
    """9 PFLOP/s of a B200, 1.68 of an RTX 5090 by its datasheet; an H100 computes in 16 bit."""
    prompt = Step(0, 0, 1, 8192, 8192**2 / 2)

    def products_s(gpu: str, quant: str) -> float:
        return timer(gpu, model="Qwen/Qwen3-32B", quant=quant).parts(prompt)["products"]

    for gpu, faster in (("b200", 2.3), ("rtx-5090", 5.0)):
        assert products_s(gpu, "none") > faster * products_s(gpu, "nvfp4")
        assert products_s(gpu, "nvfp4a16") > products_s(gpu, "none")
    assert products_s("h100-sxm-80gb", "nvfp4") > products_s("h100-sxm-80gb", "none")
    one = {
        quant: timer("b200", model="Qwen/Qwen3-32B", quant=quant).parts(ALONE)["products"]
        for quant in ("none", "nvfp4", "mxfp8")
    }
    assert one["nvfp4"] < one["mxfp8"] < one["none"]


def test_experts_in_4_bit_floats_have_kernels_of_their_own() -> None:
    prompt = Step(0, 0, 1, 8192, 8192**2 / 2)
    wide, narrow = (
        timer("b200", model="Qwen/Qwen3-30B-A3B", quant=quant).parts(prompt)["products"]
        for quant in ("none", "nvfp4")
    )
    assert narrow < wide / 2


def test_inputs_of_8_bit_products_are_narrowed_one_by_one() -> None:
    """3.3 ps for each; queries, the output, gate and up read 3,584, down 18,944, in 28 layers."""
    eight = timer("h100-sxm-80gb", quant="fp8")
    assert sum(each.count * each.row_s for each in eight.products) == pytest.approx(
        3.3e-12 * 28 * (3 * 3584 + 18944)
    )
    long = Step(decoding=0, cached_tokens=0, sampled=1, prompt_tokens=8192)
    wide = timer("h100-sxm-80gb").parts(long)["products"]
    assert 0.5 < eight.parts(long)["products"] / wide < 0.75


def test_a_small_model_gains_nothing_from_few_bits() -> None:
    """Published: 311 tokens/s in 16 bit, 257 to 262 in 8 and 4 bit (Qwen2.5-0.5B, vLLM 0.6.3)."""
    speeds = {}
    gpu = find_target("a100-sxm-80gb")
    for quant in ("none", "gptq-int8", "gptq-int4"):
        run = RunConfig(
            model="Qwen/Qwen2.5-0.5B", phase="inference", serving="vllm", quant=quant,  # type: ignore[arg-type]
            prompt_len=1, max_new_tokens=2048, libraries=(("vllm", "0.6.3"),),
        )  # fmt: skip
        answer = predict(load_model(run.model), run, gpu, load_calibration(gpu)).serving
        assert answer is not None
        assert answer.time is not None
        speeds[quant] = answer.time.output_tokens_per_s
    assert speeds["none"] == pytest.approx(311, rel=0.1)
    assert speeds["gptq-int4"] == pytest.approx(261, rel=0.1)
    assert speeds["none"] > speeds["gptq-int8"]


@pytest.mark.parametrize(("version", "ms"), [("0.13.0", 0.805), ("0.14.0", 0.0)])
def test_a_step_that_is_planned_ahead_hides_its_host(version: str, ms: float) -> None:
    engine = timer(libraries=(("vllm", version),)).parts(ALONE)["engine"]
    assert engine == pytest.approx(1e-3 * ms)


def test_without_graphs_the_host_decides() -> None:
    eager = timer(quant="gptq-int4", serving_options=(("enforce_eager", True),))
    graphs = timer(quant="gptq-int4")
    assert eager.parts(ALONE)["engine"] > 2 * graphs.parts(ALONE)["engine"]


def test_adapters_cost_two_kernels_each() -> None:
    merged, adapted = timer(), timer(method="lora", serve="as-trained")
    assert adapted.parts(ALONE)["kernels"] > merged.parts(ALONE)["kernels"]
    assert adapted.launches_s > merged.launches_s


def test_experts_that_no_token_chose_are_not_read() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    run = RunConfig(model=name, phase="inference", serving="vllm")
    job = resolve(load_model(name), run, find_target("h100-sxm-80gb"))
    assert job.engine.stepping is not None
    mixture = step_timer(
        job.served, stepping=job.engine.stepping(job.served), reduction_s=own_all_reduce(0.0, 1)
    )
    few, many = (
        mixture.parts(Step(decoding=n, cached_tokens=0, sampled=n))["products"] for n in (1, 64)
    )
    assert few < many / 4
    all_bytes = 2 * load_model(name).num_params / (0.99 * 3.35e12)
    assert few < 0.15 * all_bytes
    assert many == pytest.approx(all_bytes, rel=0.1)


def test_ranks_divide_the_reads_and_add_up_what_they_have() -> None:
    alone, two = (
        served(serving_options=(("tensor_parallel_size", ranks),)).time for ranks in (1, 2)
    )
    assert alone is not None
    assert two is not None
    assert two.step_parts_s["products"] == pytest.approx(
        alone.step_parts_s["products"] / 2, rel=0.02
    )
    assert alone.step_parts_s["communication"] == 0
    assert two.step_parts_s["communication"] > 0


def test_an_all_reduce_has_a_latency_and_a_ring() -> None:
    seconds = own_all_reduce(100e9, 4)
    assert seconds(0) == pytest.approx(5e-6)
    assert seconds(1e9) == pytest.approx(5e-6 + 1.5 * 0.01)


def test_intervals_hold_the_median_and_a_rate_has_its_own() -> None:
    for settings in ({"batch_size": 8}, {"request_rate": 2.0}):
        time = served(**settings).time
        assert time is not None
        for value, (low, high) in (
            (time.ttft_s, time.interval_ttft_s),
            (time.tpot_s, time.interval_tpot_s),
        ):
            assert low < value < high


def test_a_rate_beyond_the_engine_is_said() -> None:
    assert served(request_rate=1000.0).time.queue_grows  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("engine", "off"),
    [("vllm", ("enable_prefix_caching", False)), ("sglang", ("disable_radix_cache", True))],
)
def test_a_prefix_that_is_not_kept_is_read_each_time(engine: str, off: tuple[str, bool]) -> None:
    shared = {"serving": engine, "prompt_len": 8000, "shared_prompt_fraction": 0.9}
    kept, read = (served(**shared, serving_options=one).time for one in ((), (off,)))
    whole = served(**(shared | {"shared_prompt_fraction": 0.0})).time
    assert kept is not None
    assert read is not None
    assert whole is not None
    assert kept.ttft_s < read.ttft_s / 2
    assert read.ttft_s == pytest.approx(whole.ttft_s, rel=0.01)


def test_prefix_in_the_pool_shortens_the_first_wait() -> None:
    new, cached = (
        served(prompt_len=8000, shared_prompt_fraction=share).time for share in (0.0, 0.9)
    )
    assert new is not None
    assert cached is not None
    assert cached.ttft_s < 0.3 * new.ttft_s


def test_boards_that_power_does_not_limit_reach_more_of_their_peak() -> None:
    limited, free = (kernel_rates(find_target(name)) for name in ("l40s-48gb", "rtx-4090-24gb"))
    assert limited.products < free.products <= MOST_PRODUCTS


def test_a_card_that_nobody_measured_has_a_wider_interval() -> None:
    known, other = (kernel_rates(find_target(name)) for name in ("a100-sxm-80gb", "rtx-3090-24gb"))
    assert other.deviation > known.deviation


def test_clients_with_equal_lengths_stay_in_step_and_wait_for_all_prompts() -> None:
    """What `vllm bench serve` sends with its own defaults: `--random-range-ratio 0`."""
    even, uneven = (
        served(batch_size=16, prompt_len=4096, max_new_tokens=256, length_spread=spread).time
        for spread in (0.0, 0.1)
    )
    assert even is not None
    assert uneven is not None
    assert even.ttft_s > 2 * uneven.ttft_s
    assert (even.length_spread, uneven.length_spread) == (0.0, 0.1)
    assert uneven == served(batch_size=16, prompt_len=4096, max_new_tokens=256).time


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_spread": 1.0}, "length_spread: must be from 0 to below 1, got 1.0"),
        ({"length_spread": 0.0, "serving": "transformers"}, "length_spread: is of an engine"),
    ],
)
def test_lengths_vary_under_an_engine_alone(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served(**settings)


def test_a_rate_is_of_an_engine_and_not_of_clients() -> None:
    with pytest.raises(ConfigError, match="request_rate: is of an engine that serves"):
        served(serving="transformers", request_rate=2.0)
    with pytest.raises(ConfigError, match="give one of them"):
        whichlora.estimate(
            MODEL, gpu="a100-sxm-80gb", phase="inference", serving="vllm",
            concurrency=4, request_rate=2.0,
        )  # fmt: skip


def test_json_states_waits_flat_and_null_where_unknown() -> None:
    known, unknown = (
        served().to_dict(),
        served(serving_options=(("gpu_memory_utilization", 0.1),)).to_dict(),
    )
    assert known["ttft_s"] < known["interval_ttft_s"][1]
    assert set(known) == set(unknown)
    assert unknown["tpot_s"] is None


@pytest.mark.parametrize(("tokens", "ms"), [(64, 0.217), (1024, 0.401), (8192, 1.501)])
def test_a_layer_of_experts_takes_what_vllms_table_says(tokens: int, ms: float) -> None:
    """Of aiconfigurator's table of vLLM 0.18 on an H200: MiniMax M2.5 on four ranks, fp8 blocks."""
    mixture = timer(
        "h200-sxm-141gb",
        "MiniMaxAI/MiniMax-M2.5",
        serving_options=(("tensor_parallel_size", 4),),
        quant="fp8",
    )
    experts = [product for product in mixture.products if product.experts > 1]
    seconds = sum(sum(mixture._product(product, tokens)) for product in experts)
    assert seconds / 62 == pytest.approx(1e-3 * ms, rel=0.2)


@pytest.mark.parametrize(
    ("gpu", "model", "release", "layers", "tokens", "ms"),
    [
        # Triton's kernels gate, narrow and add up the rows of all experts
        ("l40s", "Qwen/Qwen3-235B-A22B-FP8", "0.24.0", 94, 1024, 0.814),
        ("l40s", "Qwen/Qwen3-235B-A22B-FP8", "0.24.0", 94, 8192, 4.497),
        # FlashInfer's leave out those of other GPUs
        ("h100-sxm-80gb", "MiniMaxAI/MiniMax-M2.5", "0.24.0", 62, 1024, 0.240),
        ("h100-sxm-80gb", "MiniMaxAI/MiniMax-M2.5", "0.24.0", 62, 8192, 0.664),
    ],
)
def test_whole_experts_take_what_vllms_table_says(
    gpu: str, model: str, release: str, layers: int, tokens: int, ms: float
) -> None:
    """Of aiconfigurator's tables of vLLM 0.24, balanced, eight ranks."""
    options = (("enable_expert_parallel", True), ("tensor_parallel_size", 8))
    mixture = timer(
        gpu, model, quant="fp8", serving_options=options, libraries=(("vllm", release),)
    )
    experts = [product for product in mixture.products if product.experts > 1]
    seconds = sum(sum(mixture._product(product, tokens)) for product in experts)
    assert seconds / layers == pytest.approx(1e-3 * ms, rel=0.2)


def test_hopper_had_tritons_kernels_of_whole_experts_before_0_17() -> None:
    options = (("enable_expert_parallel", True), ("tensor_parallel_size", 8))
    prompt = Step(0, 0, 1, 8192, 8192**2 / 2)
    older, newer = (
        timer(
            "h100-sxm-80gb",
            "MiniMaxAI/MiniMax-M2.5",
            quant="fp8",
            serving_options=options,
            libraries=(("vllm", release),),
        ).parts(prompt)["products"]
        for release in ("0.16.0", "0.17.0")
    )
    assert older > 1.2 * newer


def test_a_router_with_fp32_weights_is_multiplied_without_matrix_units() -> None:
    mixture = timer("h100-sxm-80gb", "MiniMaxAI/MiniMax-M2.5", quant="fp8")
    router = next(each for each in mixture.products if each.shapes == ((3072, 256),))
    assert router.rate < 67e12
    assert router.num_bytes == 4 * 3072 * 256
    usual = timer("h100-sxm-80gb", "Qwen/Qwen3-30B-A3B")
    assert next(each for each in usual.products if each.shapes == ((2048, 128),)).rate > 500e12


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "ms"),
    [(1, 65536, 1024, 0.544), (64, 65536, 2048, 0.647), (4096, 4096, 4096, 0.572)],
)
def test_tritons_product_in_blocks_takes_what_vllms_table_says(
    rows: int, inputs: int, outputs: int, ms: float
) -> None:
    """Of aiconfigurator's table of vLLM 0.24 on an L40S, whose first rows wait for the host."""
    seconds = TRITON_BLOCKS.seconds(rows, inputs, outputs, 142)
    assert seconds == pytest.approx(1e-3 * ms, rel=0.12)


def test_ada_multiplies_fp8_in_blocks_by_triton_until_marlin_does() -> None:
    def products_s(gpu: str, model: str, release: str) -> float:
        libraries = (("vllm", release),)
        return timer(gpu, model, quant="fp8", libraries=libraries).parts(ALONE)["products"]

    blocks, rows = "Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B"
    assert products_s("l40s", blocks, "0.20.0") > 1.05 * products_s("l40s", rows, "0.20.0")
    for gpu, release in (("l40s", "0.33.0"), ("l20-48gb", "0.20.0"), ("h100-sxm-80gb", "0.20.0")):
        same = pytest.approx(products_s(gpu, rows, release), rel=1e-3)  # scales of rows are more
        assert products_s(gpu, blocks, release) == same


def test_quantised_steps_of_0_6_2_wait_for_the_host_beyond_its_graphs() -> None:
    """Qwen2.5-14B after 129,024 tokens: 16 bit is the slowest, the others are alike.

    Published: 14.53 tokens a second, and 15.10 to 15.25 in three quantised forms.
    """
    model = load_model("Qwen/Qwen2.5-14B")  # whose positions are those of the scaled Instruct
    gpu = find_target("a100-sxm-80gb")
    speeds = []
    for quant in ("none", "gptq-int8", "gptq-int4", "awq-int4"):
        run = RunConfig(
            model=model.name,
            phase="inference",
            serving="vllm",
            prompt_len=129024,
            max_new_tokens=2048,
            quant=quant,  # type: ignore[arg-type]
            libraries=(("vllm", "0.6.2"),),
        )
        answer = predict(model, run, gpu, load_calibration(gpu)).serving
        assert answer is not None
        assert answer.time is not None
        speeds.append(2048 / (answer.time.ttft_s + 2047 * answer.time.tpot_s))
    assert speeds == pytest.approx([14.53, 15.10, 15.13, 15.25], rel=0.05)
    assert speeds[0] < min(speeds[1:])
