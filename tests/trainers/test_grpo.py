"""TRL's GRPO: answers that the model writes between its steps, and what they take."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.colocated import POOL, REST, SLOTS, STEP, WEIGHTS
from whichlora.memory.entries import Entry, Fact
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.colocated import colocated_engine
from whichlora.predict.counted import count_block
from whichlora.predict.judged import judge_block, judged_time
from whichlora.predict.judgement import SECONDS
from whichlora.predict.largest import largest_that_fits
from whichlora.predict.predict import predict
from whichlora.predict.quantities import generation, ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.predict.rollout import rollout_job
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.links import LinkFiles
from whichlora.store.paths import data_folder
from whichlora.trainers import get_trainer
from whichlora.workflow.combinations import USUAL, grid

NAME = "HuggingFaceTB/SmolLM2-135M"
MODEL = load_model(NAME)
GRPO = RunConfig(model=NAME, trainer="grpo", batch_size=8, seq_len=768)


def job(**changes: Any) -> ResolvedRun:
    options = changes.pop("options", {})
    run = replace(GRPO, trainer_options=tuple(options.items()), **changes)
    return resolve(MODEL, run, A100)


def predicted(**changes: Any) -> Prediction:
    return predict(MODEL, job(**changes).run, A100, prior_calibration(A100))


def test_all_answers_of_an_optimizer_step_are_written_at_once() -> None:
    usual = rollout_job(job(gradient_accumulation_steps=4))
    assert usual is not None
    assert (usual.run.batch_size, usual.run.prompt_len, usual.run.max_new_tokens) == (32, 512, 256)
    fewer = rollout_job(job(gradient_accumulation_steps=4, options={"steps_per_generation": 2}))
    assert fewer is not None
    assert fewer.run.batch_size == 16


def test_a_rollout_holds_its_cache_beside_weights_and_optimizer_states() -> None:
    counted, inner = job(), rollout_job(job())
    assert inner is not None
    alone = ledger(inner).moments["decode"]
    moments = ledger(counted).moments
    held = added(entry.num_bytes for entry in moments["rollout_decode"])
    static = added(entry.num_bytes for entry in training_step(counted).static)
    cache = added(entry.num_bytes for entry in alone if entry.part == "kv_cache")
    assert held > static + cache > 1.4 * static
    assert generation(inner).batch_size == 8


def test_a_step_takes_as_long_as_its_answers_and_what_is_learnt_from_them() -> None:
    step, short = predicted(), predicted(options={"max_completion_length": 64})
    assert sum(step.time.breakdown.values()) == pytest.approx(step.time.step_s)
    assert step.time.prefill_s is not None
    assert step.time.decode_s_per_token is not None
    assert step.time.step_s is not None
    assert short.time.step_s is not None
    written = step.time.prefill_s + 255 * step.time.decode_s_per_token
    learnt = predicted(trainer="sft").time.step_s
    assert learnt is not None
    assert step.time.step_s == pytest.approx(written + learnt, rel=0.02)
    assert short.time.step_s < 0.5 * step.time.step_s
    # twice as many steps learn from the same answers, but compare them with the older model
    again = predicted(options={"num_iterations": 2})
    assert again.time.step_s is not None
    assert again.time.step_s < step.time.step_s


VLLM = {"use_vllm": True, "vllm_max_model_length": 768}


def parts(entries: tuple[Entry, ...], fact: Fact) -> int:
    return int(added(entry.num_bytes for entry in entries if entry.fact is fact))


def test_a_vllm_beside_the_trainer_holds_its_share_of_the_gpu_and_a_copy_of_the_weights() -> None:
    counted = job(options=VLLM)
    step = training_step(counted)
    moment = ledger(counted).moments["rollout_engine"]
    taken = sum(parts(moment, fact) for fact in (WEIGHTS, SLOTS, POOL, REST, STEP))
    share = 0.3 * A100.memory_bytes
    assert share - 2**20 <= taken <= share + 2**20  # graphs are in it since 0.20
    own = added(entry.num_bytes for entry in step.static if entry.part == "weights")
    copied = parts(step.static, WEIGHTS)
    assert 1 < copied / (own - copied) < 1.1  # and cosines of every position
    # room for its largest step is the trainer's while the model learns
    assert (parts(step.static, POOL), parts(step.static, STEP)) == (parts(moment, POOL), 0)
    assert parts(moment, STEP) > 0
    elsewhere = predicted(options={"use_vllm": True, "vllm_mode": "server"})
    assert elsewhere.memory.breakdown.get("kv_cache", 0) == 0
    assert elsewhere.time.prefill_s is None


def test_a_sleeping_vllm_gives_weights_and_cache_back_while_the_model_learns() -> None:
    awake = training_step(job(options=VLLM)).static
    counted = job(options=VLLM | {"vllm_enable_sleep_mode": True})
    asleep = training_step(counted).static
    assert parts(asleep, WEIGHTS) == parts(asleep, POOL) == 0
    assert parts(asleep, REST) == parts(awake, REST) > 0
    writing = ledger(counted).moments["rollout_engine"]
    assert (parts(writing, WEIGHTS), parts(writing, POOL)) == (
        parts(awake, WEIGHTS),
        parts(awake, POOL),
    )


def test_gpus_that_have_one_vllm_together_hold_a_part_of_it_each() -> None:
    spread = {"parallel": ParallelConfig(gpus=3, strategy="ddp")}
    whole, third = (
        job(options=VLLM | {"vllm_tensor_parallel_size": ranks}, **spread) for ranks in (1, 3)
    )
    static = [training_step(each).static for each in (whole, third)]
    assert parts(static[1], WEIGHTS) < 0.5 * parts(static[0], WEIGHTS)
    assert parts(static[1], POOL) > parts(static[0], POOL)
    together = [colocated_engine(each) for each in (whole, third)]
    seats = [each.start.max_num_seqs(768) for each in together if each is not None]
    assert seats == [8, 24]
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size: 2 does not divide the 3"):
        get_trainer("grpo").check(
            job(options=VLLM | {"vllm_tensor_parallel_size": 2}, **spread).run
        )


@pytest.mark.parametrize(
    ("release", "vllm", "context"),
    [("0.20", "0.9.2", 768), ("0.25.1", "0.10.2", 768), ("1.12", "0.27.1", 8192)],
)
def test_each_release_of_trl_starts_the_vllm_that_it_takes(
    release: str, vllm: str, context: int
) -> None:
    """Before 0.26 for the tokens of prompt and answer, later for all that the model accepts."""
    options = {"use_vllm": True, "vllm_mode": "colocate"}
    engine = colocated_engine(job(options=options, libraries=(("trl", release),)))
    assert engine is not None
    assert engine.job.served.version == vllm
    assert engine.context == context
    stated = (("trl", release), ("vllm", "0.11.0"))
    asked = colocated_engine(job(options=options, libraries=stated))
    assert asked is not None
    assert asked.job.served.version == "0.11.0"


def test_a_release_before_1_0_asks_for_a_server_where_nobody_says() -> None:
    older = (("trl", "0.29"),)
    assert colocated_engine(job(options={"use_vllm": True}, libraries=older)) is None
    assert colocated_engine(job(options={"use_vllm": True})) is not None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"vllm_mode": "colocate"}, "vllm_mode: without effect without use_vllm=true"),
        (
            {"vllm_enable_sleep_mode": True, "vllm_max_model_length": 768},
            "vllm_enable_sleep_mode, vllm_max_model_length: without effect",
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.5},
            "vllm_gpu_memory_utilization: without effect with vllm_mode server",
        ),
        ({"use_vllm": True}, ""),
    ],
)
def test_options_that_nobody_reads_are_named(options: dict[str, Any], told: str) -> None:
    notes = predicted(options=options).notes
    assert [note.startswith(told) for note in notes if "without effect" in note] == [True] * bool(
        told
    )


def test_a_vllm_that_cannot_start_is_a_run_that_fails_with_the_reason() -> None:
    small = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.003}
    answer = predicted(options=small)
    assert answer.verdict == "fails"
    assert "a larger vllm_gpu_memory_utilization" in answer.notes[0]
    beside = predicted(options={"use_vllm": True, "vllm_gpu_memory_utilization": 0.008})
    assert beside.verdict == "fails"
    (longest,) = re.findall(r"give vllm_max_model_length (\d+) or less", beside.notes[0])
    fits = {"vllm_gpu_memory_utilization": 0.008, "vllm_max_model_length": int(longest)}
    assert predicted(options={"use_vllm": True} | fits).fits


def test_answers_of_a_vllm_take_its_own_steps_and_wait_where_its_pool_is_full() -> None:
    by_itself, by_vllm = predicted(), predicted(options=VLLM)
    assert by_vllm.time.step_s is not None
    assert by_itself.time.step_s is not None
    assert by_vllm.time.step_s < by_itself.time.step_s
    assert sum(by_vllm.time.breakdown.values()) == pytest.approx(by_vllm.time.step_s)
    engine = colocated_engine(job(options=VLLM))
    rollout = get_trainer("grpo").rollout(job(options=VLLM).run)
    assert engine is not None
    assert rollout is not None
    sizes = {"prompt_len": 512, "max_new_tokens": 256, "r": 16}
    room = engine.start.max_num_seqs(768)
    seconds = []
    for answers in (room, room + 1):
        *_, (_, _, decoding) = engine.answer_passes(rollout, {"batch_size": answers, **sizes})
        seconds.append(decoding[SECONDS])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_many_runs_at_once_take_the_times_of_each() -> None:
    counted, calibration = job(options=VLLM), prior_calibration(A100)
    sizes = np.array([8, 16, 24])
    block = judge_block(count_block(counted, {"batch_size": sizes}), calibration)
    for size, step_s in zip(sizes, block.time_s, strict=True):
        alone = judged_time(counted, calibration, batch_size=int(size)).total_s
        assert step_s == pytest.approx(alone)


@pytest.mark.parametrize(("release", "answers"), [("0.16.1", 8), ("0.17", 32)])
def test_an_older_release_writes_for_each_micro_batch(release: str, answers: int) -> None:
    found = rollout_job(job(gradient_accumulation_steps=4, libraries=(("trl", release),)))
    assert found is not None
    assert found.run.batch_size == answers


@pytest.mark.parametrize(("release", "has_reference"), [("0.18.2", True), ("0.19", False)])
def test_an_older_release_has_a_reference_where_nobody_says(
    release: str, has_reference: bool
) -> None:
    forwards = get_trainer("grpo").forwards(job(libraries=(("trl", release),)).run)
    assert bool(forwards.reference) is has_reference


def test_a_reference_costs_a_forward_and_weights_where_all_are_trained() -> None:
    usual, pulled = (
        training_step(job(method="full", options={"beta": beta})) for beta in (0.0, 0.04)
    )
    weights = added(entry.num_bytes for entry in usual.static if entry.part == "weights")
    both = added(entry.num_bytes for entry in pulled.static if entry.part == "weights")
    assert both == 2 * weights
    # it scores the answers before the graph of the step is there
    assert "reference_forward" not in ledger(job(method="full", options={"beta": 0.04})).moments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "batch_size: 3 answers are written at once"),
        ({"seq_len": 256}, "seq_len: 256 tokens of a prompt and its answer leave none"),
        ({"options": {"num_generations": 1}}, "num_generations: an advantage needs 2"),
        ({"options": {"vllm_gpu_memory_utilization": 1.5}}, "1.5 is no share between 0 and 1"),
        ({"quant": "int8", "options": VLLM}, "the vllm that writes answers: serving: vllm"),
    ],
)
def test_what_trl_or_its_engine_refuses_is_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(**changes)


def on_gpus(strategy: str, **changes: Any) -> ResolvedRun:
    return job(parallel=ParallelConfig(gpus=4, strategy=strategy), **changes)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_each_of_several_gpus_writes_answers_of_its_own(strategy: str, method: str) -> None:
    alone, spread = job(method=method), on_gpus(strategy, method=method)
    one, each = ledger(alone).moments, ledger(spread).moments
    written = {name for name in one if name.startswith("rollout_")}
    assert written == {name for name in each if name.startswith("rollout_")}
    for name in written:
        cache, whole = (
            added(entry.num_bytes for entry in moments[name] if entry.part == "kv_cache")
            for moments in (one, each)
        )
        assert cache == whole
        kept = added(entry.num_bytes for entry in each[name] if entry.part == "optimizer_states")
        states = added(entry.num_bytes for entry in one[name] if entry.part == "optimizer_states")
        assert kept == states if strategy == "ddp" else kept < states
        assert not [entry for entry in each[name] if "waiting" in entry.fact.what]


def test_a_step_of_several_gpus_waits_for_the_answers_too() -> None:
    gpu = find_gpu("a100-sxm-80gb")
    links = LinkFiles((data_folder("calibration"),))
    calibration = replace(prior_calibration(gpu), machines=links)
    alone, spread, learnt = (
        predict(MODEL, each.run, gpu, calibration).time
        for each in (job(), on_gpus("ddp"), on_gpus("ddp", trainer="sft"))
    )
    assert alone.prefill_s is not None
    assert alone.decode_s_per_token is not None
    assert spread.step_s is not None
    assert learnt.step_s is not None
    written = alone.prefill_s + 255 * alone.decode_s_per_token
    assert spread.step_s == pytest.approx(learnt.step_s + written, rel=0.02)
    assert sum(spread.breakdown.values()) == pytest.approx(spread.step_s)


def test_answers_of_a_divided_model_are_refused_unless_another_machine_writes_them() -> None:
    with pytest.raises(ConfigError, match="every GPU has all of its weights; use one"):
        predict(MODEL, on_gpus("zero3").run, A100, prior_calibration(A100))
    elsewhere = on_gpus("zero3", options={"use_vllm": True, "vllm_mode": "server"})
    assert predict(MODEL, elsewhere.run, A100, prior_calibration(A100)).several_gpus


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 2}, 4),
        ({"gradient_accumulation_steps": 16}, 1),
        ({"parallel": ParallelConfig(strategy="ddp", gpus=6)}, 4),
        ({"trainer_options": (("num_generations", 6), ("steps_per_generation", 4))}, 3),
    ],
)
def test_the_least_batch_is_the_first_that_writes_whole_groups(
    changes: dict[str, Any], least: int
) -> None:
    trainer = get_trainer("grpo")
    run = replace(GRPO, **changes)
    assert trainer.least_batch(run) == least
    for size in range(1, least):
        with pytest.raises(ConfigError, match=f"batch_size: .*; give batch_size {least} or a mult"):
            trainer.check(replace(run, batch_size=size))
    trainer.check(replace(run, batch_size=least))


def test_who_names_no_batch_gets_the_least_and_the_largest_is_a_multiple() -> None:
    for said in ({}, {"batch_size": [USUAL]}):
        (run,) = grid({"model": [NAME], "trainer": ["grpo"], **said})
        assert run.batch_size == 8
    (run,) = grid({"model": [NAME], "trainer": ["sft"], "batch_size": [USUAL]})
    assert run.batch_size == 1
    most = largest_that_fits(MODEL, GRPO, A100, prior_calibration(A100), "batch_size")
    assert most.value > 8
    assert most.value % 8 == most.possible % 8 == 0
