"""Explanations: lines that add up, numbers that multiply, alternatives that are predictions."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from devices import A100
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DEVICES, finetune_runs, inference_runs

from whichlora.parallel import list_strategies
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.explain import Explanation, explain
from whichlora.predict.ledger_lines import Line
from whichlora.predict.predict import predict
from whichlora.serving import get_engine, list_engines
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.trainers import get_trainer, list_trainers

RUNS = st.one_of(finetune_runs(), inference_runs())
LLAMA = RunConfig(model="meta-llama/Llama-3.1-8B", method="qlora", batch_size=4)


@cache
def model(name: str) -> ModelSpec:
    found = find_model(name)
    assert found is not None
    return found


def explained(
    run: RunConfig, gpu: GpuSpec = A100, calibration: Calibration | None = None
) -> Explanation:
    return explain(model(run.model), run, gpu, calibration or prior_calibration(gpu))


@cache
def of_llama() -> Explanation:
    """That of `LLAMA`, which several tests read."""
    return explained(LLAMA)


def all_lines(found: Explanation) -> list[Line]:
    lines = [*found.lines, *found.card]
    return lines + [one for line in lines for one in line.members]


# --- the ledger at the peak


@given(run=RUNS, gpu=DEVICES)
@settings(max_examples=20)
def test_the_lines_add_up_to_the_largest_moment_and_each_says_why_it_is_there(
    run: RunConfig, gpu: GpuSpec
) -> None:
    found = explained(run, gpu)
    memory = found.prediction.memory
    assert sum(line.num_bytes for line in found.lines) == memory.peak_allocated_bytes
    beyond = sum(line.num_bytes for line in found.card)
    assert memory.peak_allocated_bytes + beyond == memory.device_used_bytes
    for part, size in memory.breakdown.items():
        lines = (*found.lines, *found.card)
        assert sum(line.num_bytes for line in lines if line.part == part) == size
    for line in found.lines:
        if line.members:
            assert sum(one.num_bytes for one in line.members) == line.num_bytes
    sizes = [line.num_bytes for line in found.lines]
    assert sizes == sorted(sizes, reverse=True)
    assert found.moments[memory.moment] == max(found.moments.values())
    assert found.moments[memory.moment] == memory.peak_allocated_bytes
    for line in all_lines(found):
        assert_numbers_give_its_bytes(line)
        assert all((line.what, line.shape, line.dtype, line.why, line.kind, line.source)), line


def assert_numbers_give_its_bytes(line: Line) -> None:
    if line.numbers.endswith(" B"):
        factors = [int(word) for word in line.numbers.removesuffix(" B").split(" × ")]
        assert math.prod(factors) == line.num_bytes, line
    elif line.numbers:
        *factors, bits = line.numbers.removesuffix(" bit").split(" × ")
        size = math.prod(map(int, factors)) * float(bits) / 8
        assert size == pytest.approx(line.num_bytes, rel=1e-3)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("trainer", list_trainers())
def test_the_numbers_of_a_line_give_its_bytes_in_every_trainer(
    trainer: str, checkpointing: bool
) -> None:
    run = RunConfig(
        model="meta-llama/Llama-3.2-1B",
        trainer=trainer,
        batch_size=8,
        seq_len=512,
        gradient_checkpointing=checkpointing and trainer != "litgpt",
        precision="bf16-pure" if get_trainer(trainer).has_one_way else "bf16",
    )
    for line in all_lines(explained(run)):
        assert_numbers_give_its_bytes(line)


def test_what_measured_runs_corrected_is_a_line_of_its_own() -> None:
    prior = prior_calibration(A100)
    factors = dict(prior.memory.mean) | {"weights": 1.01, "temporary": 0.5}
    calibration = replace(prior, memory=replace(prior.memory, mean=factors, num_runs=7))
    found = explained(LLAMA, A100, calibration)
    assert sum(line.num_bytes for line in found.lines) == (
        found.prediction.memory.peak_allocated_bytes
    )
    (weights,) = (line for line in found.lines if line.what == "correction of weights")
    assert weights.shape == "+1.00% of what is counted"
    assert weights.kind == "fitted"
    assert weights.source == "calibration a100: 7 memory runs"
    assert any(line.num_bytes < 0 for line in found.lines)


def on_four_gpus(strategy: str) -> Explanation:
    parallel = ParallelConfig(strategy=strategy, gpus=4)
    model_name = "meta-llama/Llama-3.2-1B"
    run = RunConfig(model=model_name, method="full", seq_len=512, parallel=parallel)
    return explained(replace(run, gradient_accumulation_steps=4))  # a pipeline needs as many


@pytest.mark.parametrize(
    "strategy", [name for name, found in list_strategies().items() if not found.needs_shards]
)
def test_the_lines_of_a_rank_add_up(strategy: str) -> None:
    found = on_four_gpus(strategy)
    memory = found.prediction.memory
    assert sum(line.num_bytes for line in found.lines) == memory.peak_allocated_bytes
    for line in found.lines:
        if line.members:
            assert sum(member.num_bytes for member in line.members) == line.num_bytes


def test_a_share_of_a_rank_multiplies_to_its_bytes() -> None:
    shares = [line for line in on_four_gpus("fsdp").lines if line.numbers.startswith("1/")]
    assert "weights of the layers" in {line.what for line in shares}
    for line in shares:
        share, *factors = line.numbers.removesuffix(" B").split(" × ")
        whole = math.prod(map(int, factors))
        assert whole / int(share.removeprefix("1/")) == pytest.approx(line.num_bytes, rel=1e-3)


@pytest.mark.parametrize("engine", [name for name, one in list_engines().items() if one.divided_by])
def test_the_lines_of_an_engine_on_several_gpus_add_up(engine: str) -> None:
    found = explained(
        RunConfig(
            model="Qwen/Qwen3-8B",
            phase="inference",
            serving=engine,
            serving_options=((get_engine(engine).divided_by, 2),),
        )
    )
    assert (
        sum(line.num_bytes for line in found.lines) == found.prediction.memory.peak_allocated_bytes
    )
    for line in found.lines:
        if line.members:
            assert sum(member.num_bytes for member in line.members) == line.num_bytes
    weights = [line for line in found.lines if line.what == "weights of the layers"]
    assert all(line.numbers.startswith("1/2 × ") for line in weights)


def test_what_twice_as_many_gpus_shrink_is_what_a_strategy_divides() -> None:
    for strategy, divides in (("ddp", False), ("fsdp", True)):
        shrinks = {each.what: each.shrinks for each in on_four_gpus(strategy).scaling}
        assert shrinks["weights of the layers"] == divides
        assert shrinks["optimizer states"] == divides
    names = {alternative.name for alternative in on_four_gpus("ddp").strategies}
    assert {"ddp", "fsdp"} <= names


def test_a_layer_without_checkpointing_is_listed_tensor_by_tensor() -> None:
    run = replace(LLAMA, method="lora", gradient_checkpointing=False, batch_size=1)
    (saved,) = (line for line in explained(run).lines if line.what == "saved by all layers")
    by_name = {one.what: one for one in saved.members}
    query = by_name["query, rotated"]
    assert query.shape == "[batch_size, seq_len, 4096]"
    assert query.numbers == "32 × 1 × 2048 × 4096 × 2 B"
    assert query.dtype == "bf16"
    assert by_name["up_proj: result"].num_bytes == 32 * 2048 * 14336 * 2
    assert any("first layer" in name and one.num_bytes < 0 for name, one in by_name.items())


def test_a_checkpointed_layer_is_listed_beside_the_peak() -> None:
    recomputed = explained(replace(LLAMA, method="lora", batch_size=1)).layer
    copies = sum(one.num_bytes for one in recomputed if one.what.endswith("adapter, cast"))
    of_tensors = sum(one.num_bytes for one in recomputed) - copies
    assert of_tensors == 2048 * 217_448  # a traced Llama-3 layer
    by_name = {line.what: line for line in recomputed}
    assert by_name["up_proj: result"].numbers == "1 × 2048 × 14336 × 2 B"
    assert explained(replace(LLAMA, gradient_checkpointing=False)).layer == ()


def test_equal_tensors_of_layers_of_two_kinds_are_one_line() -> None:
    run = RunConfig(model="google/gemma-2-2b", gradient_checkpointing=False, precision="bf16-pure")
    (saved,) = (line for line in explained(run).lines if line.what == "saved by all layers")
    names = [one.what for one in saved.members]
    assert len(names) == len(set(names))


# --- alternatives


@given(run=RUNS, gpu=DEVICES)
@settings(max_examples=12)
def test_every_alternative_is_the_changed_run_and_half_of_a_size_never_holds_more(
    run: RunConfig, gpu: GpuSpec
) -> None:
    found = explained(run, gpu)
    calibration = prior_calibration(gpu)
    for one in (*found.methods, *found.savings, *found.ranks):
        changed = predict(model(run.model), replace(run, **one.settings), gpu, calibration)
        assert one.prediction == changed
    for use in found.caches:
        changed = predict(model(run.model), replace(run, kv_cache=use.kv_cache), gpu, calibration)
        assert use.prediction == changed
    live = found.prediction.memory.peak_allocated_bytes
    for one in found.savings:
        if one.name.startswith("half the "):  # the allocator may still keep more for less
            assert one.prediction.memory.peak_allocated_bytes <= live


# Where a higher rank can be cheaper (docs/memory.md): 8-bit optimizers keep wide states of small
# tensors, and blocks of one rank leave remainders that those of the next one do not. Ranks that
# double outweigh these.
@given(run=finetune_runs(optimizer="adamw_torch_fused"), gpu=DEVICES)
@settings(max_examples=12)
def test_the_largest_saving_comes_first_and_a_rank_never_gets_cheaper(
    run: RunConfig, gpu: GpuSpec
) -> None:
    found = explained(replace(run, r=16, lora_alpha=32), gpu)
    used = [one.prediction.memory.device_used_bytes for one in found.savings]
    assert used == sorted(used)
    ranks = [one.prediction.memory.peak_allocated_bytes for one in found.ranks]
    assert ranks == sorted(ranks)
    assert bool(found.ranks) == (run.method != "full")


def test_methods_stand_side_by_side_with_their_own_storage() -> None:
    found = of_llama()
    by_name = {one.name: one.prediction for one in found.methods}
    assert list(by_name) == ["full", "lora", "qlora", "dora", "qdora"]
    assert by_name["qlora"] == found.prediction
    assert [by_name[name].run.quant for name in by_name] == [
        "none", "none", "nf4-dq", "none", "nf4-dq",
    ]  # fmt: skip
    assert by_name["full"].num_trainable_params == found.prediction.num_params


def test_a_choice_that_the_device_lacks_is_not_offered() -> None:
    old = replace(A100, compute_capability="7.0")
    names = [one.name for one in explained(LLAMA, old).savings]
    assert "eager attention" in names
    assert "flash_attention_2 attention" not in names


def test_a_saving_is_that_of_one_setting_and_two_are_named_as_two() -> None:
    found = of_llama()
    asked = found.prediction.run
    assert asked.prepare_kbit
    changed = {
        one.name: {
            name
            for name, value in one.prediction.run.to_dict().items()
            if value != asked.to_dict()[name]
        }
        for one in found.savings
    }
    both = {name for name, settings in changed.items() if len(settings) > 1}
    assert both == {
        "TRL's recipe: trl-fused loss, base not prepared for k-bit training",
        "base weights not quantised, nor prepared for k-bit training",
    }
    assert changed["trl-fused loss, without logits"] == {"loss_head"}
    assert changed["base not prepared for k-bit training"] == {"prepare_kbit"}
    saved = {one.name: found.saved_bytes(one) for one in found.savings}
    fused, unprepared = (
        saved["trl-fused loss, without logits"],
        saved["base not prepared for k-bit training"],
    )
    (recipe,) = (size for name, size in saved.items() if name.startswith("TRL"))
    assert recipe > max(fused, unprepared)


def test_a_16_bit_base_is_offered_in_4_bit_with_and_without_its_preparation() -> None:
    found = explained(replace(LLAMA, method="lora"))
    four_bit = {one.name: one for one in found.savings if one.name.startswith("4-bit")}
    alone = four_bit["4-bit base weights"]
    prepared = four_bit["4-bit base weights, prepared for k-bit training"]
    assert found.saved_bytes(alone) > found.saved_bytes(prepared) > 0


def test_an_engine_rounds_a_sequence_up_to_whole_blocks() -> None:
    run = replace(LLAMA, phase="inference", prompt_len=500, max_new_tokens=118, batch_size=3)
    by_engine = {one.kv_cache: one for one in explained(run).caches}
    tokens = {name: one.kept_tokens for name, one in by_engine.items()}
    assert tokens == {
        "dynamic": 617,
        "static": 617,
        "quantized": 617,
        "paged": 768,
        "vllm": 624,
    }
    elements = 2 * 32 * 8 * 128  # keys and values, layers, heads, width
    for name, one in by_engine.items():
        assert one.token_bytes == elements * (4.5 if name == "quantized" else 16) / 8
        assert one.block_bytes == one.block_tokens * one.token_bytes
        assert one.cache_bytes == 3 * one.kept_tokens * one.token_bytes


def test_the_json_holds_every_table_and_adds_up() -> None:
    found = json.loads(json.dumps(of_llama().to_dict()))
    assert set(found) == {
        "prediction", "lines", "card", "layer", "moments", "methods", "savings", "ranks",
        "caches",
    }  # fmt: skip
    total = sum(line["num_bytes"] for line in found["lines"] + found["card"])
    assert total == found["prediction"]["memory"]["device_used_bytes"]
    assert set(found["lines"][0]) == {
        "part", "what", "shape", "dtype", "count", "numbers", "num_bytes", "kind", "source",
        "why", "members",
    }  # fmt: skip
    assert {one["name"] for one in found["methods"]} >= {"full", "lora", "qlora", "dora"}
    assert all("saved_bytes" in one and "memory" in one for one in found["savings"])
