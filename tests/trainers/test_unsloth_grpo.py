"""Unsloth's GRPO: a vLLM that shares its weights, what standby gives back, what is refused."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import unsloth_grpo
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.colocated import POOL, REST, SLOTS, WEIGHTS
from whichlora.memory.entries import Fact
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.colocated import ColocatedEngine, colocated_engine
from whichlora.predict.largest import largest_that_fits
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import added
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.trainers import get_trainer
from whichlora.trainers.unsloth_vllm import Asked, standby_share

NAME = "Qwen/Qwen3-0.6B"
RUN = RunConfig(model=NAME, trainer="unsloth-grpo", method="lora", batch_size=8, seq_len=768)
T4 = find_gpu("t4-16gb")
FAST = {"fast_inference": True}


def job(run: RunConfig = RUN, **options: Any) -> ResolvedRun:
    asked = replace(run, trainer_options=tuple(options.items()))
    return resolve(load_model(run.model), asked, A100)


def engine_of(found: ResolvedRun) -> ColocatedEngine:
    engine = colocated_engine(found)
    assert engine is not None
    return engine


def predicted(run: RunConfig = RUN, **options: Any) -> Prediction:
    found = job(run, **options)
    return predict(found.model, found.run, A100, prior_calibration(A100))


def held(found: ResolvedRun, fact: Fact) -> int:
    static = training_step(found).static
    return int(added(entry.num_bytes for entry in static if entry.fact is fact))


def test_notebooks_print_the_shares_and_caches_that_are_derived() -> None:
    found = list(unsloth_grpo.compared())
    assert len(found) == 10
    assert max(abs(each.share_error) for each in found) < 0.002
    is_stored = [
        each for each in found if each.row["quant"] != "fp8" and each.row["cache_gib"] != "0.0"
    ]
    assert len(is_stored) == 7
    assert max(abs(each.cache_error_gib) for each in is_stored) < 0.04
    in_tables = [each.settings.sequences for each in is_stored]
    assert in_tables == [320, 160, 160, 224, 128, 192, 160]  # as their logs say
    errors = sorted(abs(each.error) for each in found)
    assert median(errors) < 0.3
    assert errors[-1] < 0.45


def test_the_engine_trains_no_second_copy_of_the_weights() -> None:
    alone, beside = job(), job(**FAST)
    weights = training_step(alone).static
    own = added(entry.num_bytes for entry in weights if entry.part == "weights")
    assert held(beside, WEIGHTS) < 0.07 * own  # positions, rests of segments
    assert held(beside, SLOTS) > 0
    taken = added(
        entry.num_bytes
        for entry in ledger(beside).moments["rollout_engine"]
        if entry.fact in (SLOTS, POOL, REST, WEIGHTS)
    )
    share = engine_of(beside).start.budget_bytes - own
    assert taken == pytest.approx(share, rel=0.05)


def test_standby_gives_the_cache_back_and_keeps_slots_and_graphs() -> None:
    awake, asleep = job(**FAST), job(**FAST, UNSLOTH_VLLM_STANDBY=True)
    assert held(awake, POOL) > 0
    assert held(asleep, POOL) == 0
    assert held(asleep, SLOTS) == held(awake, SLOTS)
    assert held(asleep, REST) > 0
    written = ledger(asleep).moments["rollout_engine"]
    assert sum(entry.num_bytes for entry in written if entry.fact is POOL) > 0


@pytest.mark.parametrize(
    ("gpu", "unsloth", "vllm", "share"),
    [
        ("t4-16gb", "2026.10.9", "", 0.8 * 0.95),
        ("l4-24gb", "2026.10.9", "", 0.825 * 0.95),
        ("l4-24gb", "2026.10.9", "0.10.2", 0.825),
        ("l4-24gb", "2025.11.3", "0.10.2", 0.875),
        ("h100-sxm-80gb", "2026.10.9", "", 0.925 * 0.95),
        ("h100-sxm-80gb", "2025.9.7", "", 0.5),
    ],
)
def test_standby_has_the_share_of_its_release_and_card(
    gpu: str, unsloth: str, vllm: str, share: float
) -> None:
    stated = {"unsloth": unsloth} | ({"vllm": vllm} if vllm else {})
    asked = Asked(share=0.5, context=1024, rank=64, standby=True, vllm=vllm)
    found = standby_share(find_gpu(gpu), Libraries.of(stated.items()), asked)
    assert found == pytest.approx(share)


def test_its_engine_is_started_for_the_context_that_its_cache_holds() -> None:
    long = replace(RUN, model="Qwen/Qwen3-4B", seq_len=16384)
    options = tuple((FAST | {"gpu_memory_utilization": 0.7}).items())
    model = load_model(long.model)
    found = resolve(model, replace(long, trainer_options=options), T4)
    settings = unsloth_grpo.engine_settings(
        found.run, model, T4, T4.memory_bytes - allocator.idle_context_bytes(T4)
    )
    assert settings.context % 256 == 0
    assert settings.context < 16384


def test_a_four_bit_base_has_the_last_vllm_with_bitsandbytes() -> None:
    four = replace(RUN, method="qlora")
    assert engine_of(job(four, **FAST)).job.served.version == "0.27.1"
    assert engine_of(job(**FAST)).job.served.version == "0.31.0"
    assert any("vllm-bnb-plugin" in note for note in predicted(four, **FAST).notes)
    stated = replace(four, libraries=(("vllm", "0.11.2"),))
    assert engine_of(job(stated, **FAST)).job.served.version == "0.11.2"
    assert not any("vllm-bnb-plugin" in note for note in predicted(stated, **FAST).notes)


def test_an_older_bitsandbytes_expands_every_matrix_for_a_token() -> None:
    four = replace(RUN, method="qlora", model="Qwen/Qwen3-4B")
    older = replace(four, libraries=(("bitsandbytes", "0.45.5"),))
    fused, expanding = (predicted(run, **FAST).time.decode_s_per_token for run in (four, older))
    assert fused is not None
    assert expanding is not None
    assert expanding > 2 * fused


def test_the_loss_makes_no_logits_of_all_answers() -> None:
    unsloth, trl = predicted(), predicted(replace(RUN, trainer="grpo"))
    assert unsloth.memory.peak_allocated_bytes < trl.memory.peak_allocated_bytes
    assert "unsloth-fused" in unsloth.run.loss_head


def test_a_type_that_unsloth_compiles_is_counted_as_its_stock_layers() -> None:
    answer = predicted(replace(RUN, model="unsloth/gemma-3-1b-it"))
    assert any("Unsloth compiles the layers of gemma3_text" in note for note in answer.notes)
    with pytest.raises(ConfigError, match="modules_to_save"):
        predicted(replace(RUN, model="Qwen/Qwen3-30B-A3B", modules_to_save=("lm_head",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FAST | {"max_lora_rank": 8}, "max_lora_rank: 8 is less than the adapter's rank 16"),
        (FAST | {"max_lora_rank": 1024}, "max_lora_rank: vllm has slots up to rank 512"),
        (FAST | {"max_seq_length": 512}, "max_seq_length: 512 is less than the seq_len 768"),
        ({"num_generations": 3}, "batch_size: 8 answers are written at once"),
    ],
)
def test_what_unsloth_or_its_engine_refuses_is_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(**options)


def test_settings_of_an_engine_that_is_not_there_are_named() -> None:
    notes = predicted(gpu_memory_utilization=0.9, max_lora_rank=32).notes
    told = "gpu_memory_utilization, max_lora_rank: without effect without fast_inference=true"
    assert any(note.startswith(told) for note in notes)
    assert not any("without effect" in note for note in predicted(**FAST).notes)


def test_the_largest_batch_leaves_room_for_the_cache_unless_it_sleeps() -> None:
    model, calibration = load_model(NAME), prior_calibration(A100)

    def most(**options: Any) -> int:
        run = replace(RUN, trainer_options=tuple(options.items()))
        return largest_that_fits(model, run, A100, calibration, "batch_size").value

    share = FAST | {"gpu_memory_utilization": 0.8}
    assert most(**share) < most(**share, UNSLOTH_VLLM_STANDBY=True)


def test_answers_of_the_engine_are_scored_by_nobody_but_it() -> None:
    """`vllm_importance_sampling_correction` is off, and TRL's is on."""
    trainer, trl = get_trainer("unsloth-grpo"), get_trainer("grpo")
    assert trainer.forwards(job(**FAST).run).policy == 0
    by_vllm = replace(RUN, trainer="grpo", trainer_options=(("use_vllm", True),))
    assert trl.forwards(by_vllm).policy == 1
