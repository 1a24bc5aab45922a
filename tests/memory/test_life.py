"""The stages of a run: what each holds, where, and which setting lowers it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory import life, weights
from whichlora.memory.checkpoint import checkpoint_bytes
from whichlora.memory.life import PART_SETTINGS, Place, Stage, file_bytes, stored_dtypes
from whichlora.methods import get_method
from whichlora.predict.life import stages_of
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.life import LifeConfig
from whichlora.spec.plan import Keeping
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
RUN = RunConfig(model="x", batch_size=2, seq_len=32, r=8)


def job_of(gpu: str = "rtx-4090-24gb", *, tied: bool = False, **settings: Any) -> ResolvedRun:
    model = build(CONFIG | {"tie_word_embeddings": tied}, name="x")
    return resolve(model, replace(RUN, **settings), find_gpu(gpu))


def stages(job: ResolvedRun, **settings: Any) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages_of(job, LifeConfig(**settings))}


def held(stage: Stage, fact: life.Fact, place: Place) -> int:
    return sum(
        int(each.entry.num_bytes)
        for each in stage.held
        if each.entry.fact is fact and each.place == place
    )


def test_logits_of_all_rows_are_on_the_gpu_twice_when_the_last_batch_joins() -> None:
    job = job_of(precision="bf16")
    kept = held(stages(job, eval_rows=20)["evaluating"], life.KEPT_LOGITS, "gpu")
    assert kept == 2 * 20 * 32 * (2000 * 4 + 8)  # fp32 under autocast, and int64 labels


def test_moving_logits_lowers_the_gpu_and_raises_the_host() -> None:
    job = job_of(precision="bf16")
    whole = stages(job, eval_rows=40)["evaluating"]
    moved = stages(job, eval_rows=40, eval_accumulation_steps=2)["evaluating"]
    loss_alone = stages(job)["evaluating"]
    assert loss_alone.num_bytes("gpu") < moved.num_bytes("gpu") < whole.num_bytes("gpu")
    assert loss_alone.num_bytes("host") == 0
    assert moved.num_bytes("host") == 2 * whole.num_bytes("host")  # numpy.concatenate


@given(rows=st.integers(0, 60), more=st.integers(1, 20), every=st.integers(1, 9))
def test_more_rows_never_need_less(rows: int, more: int, every: int) -> None:
    job = job_of(precision="bf16-no-autocast")
    few = stages(job, eval_rows=rows)["evaluating"]
    many = stages(job, eval_rows=rows + more)["evaluating"]
    moved = stages(job, eval_rows=rows + more, eval_accumulation_steps=every)["evaluating"]
    assert few.num_bytes("gpu") <= many.num_bytes("gpu")
    assert moved.num_bytes("gpu") <= many.num_bytes("gpu")


@pytest.mark.parametrize("tied", [False, True])
def test_files_hold_a_tied_table_once(tied: bool) -> None:
    job = job_of(tied=tied, method="qlora")
    stored = stored_dtypes(job.model, job.dtypes)
    assert (stored.quant, stored.embedding_bytes) == ("none", 2)
    assert file_bytes(job.model, stored) == 2 * job.model.loaded_params
    assert stages(job)["downloading"].num_bytes("disk") == 2 * job.model.loaded_params
    assert stages(job)["merging"].num_bytes("disk") == 2 * job.model.loaded_params


def test_a_checkpoint_in_another_dtype_is_downloaded_so() -> None:
    config = {name: value for name, value in CONFIG.items() if name != "dtype"}
    wide = resolve(build(config, name="x"), RUN, find_gpu("rtx-4090-24gb"))
    assert stages(wide)["downloading"].num_bytes("disk") == 4 * wide.model.loaded_params
    packed = job_of(quant="gptq-int4")
    quantised = stages(packed)["downloading"].num_bytes("disk")
    assert quantised < stages(job_of())["downloading"].num_bytes("disk")


def test_an_unquantised_base_lies_on_the_host_first_and_a_4_bit_one_does_not() -> None:
    plain, quantised = (stages(job_of(method=name))["loading"] for name in ("lora", "qlora"))
    assert plain.num_bytes("host") == plain.num_bytes("gpu")
    assert [each.setting for each in plain.held if each.place == "host"] == ['device_map={"": 0}']
    assert 0 < quantised.num_bytes("host") < quantised.num_bytes("gpu")


def test_nothing_is_evaluated_where_there_are_no_rows() -> None:
    job = job_of()
    assert "evaluating" not in stages(job, eval_seq_len=0)
    short, long = (
        stages(job, eval_seq_len=length)["evaluating"].num_bytes("gpu") for length in (64, 4096)
    )
    assert short < long


def test_one_checkpoint_more_than_are_kept_is_on_disk() -> None:
    job = job_of()
    one, three = (
        stages(job, keeping=Keeping(save_total_limit=limit))["training"].num_bytes("disk")
        for limit in (1, 3)
    )
    assert three == 2 * one
    assert stages(job, keeping=Keeping(save_steps=0))["training"].num_bytes("disk") == 0


def test_saving_copies_a_file_to_the_host_and_resuming_reads_the_states_there() -> None:
    job = job_of(method="full")
    written = checkpoint_bytes(
        job.model,
        job.dtypes,
        job.method,
        training_step(job).tensors,
        optimizer_name=job.run.optimizer,
    )
    lived = stages(job)
    assert lived["saving"].num_bytes("host") == written.tensors
    assert lived["resuming"].num_bytes("host") == written.optimizer_states
    assert lived["resuming"].num_bytes("gpu") == lived["saving"].num_bytes("gpu")
    assert "merging" not in lived
    on_cpu = stages(job_of("cpu", method="full"))
    assert {stage.num_bytes("host") for stage in on_cpu.values()} == {0}


def test_merging_takes_the_base_without_quantisation_where_it_is_asked_to() -> None:
    job = job_of(method="qlora")
    on_gpu, on_cpu = (stages(job, merge_on=place)["merging"] for place in ("gpu", "cpu"))
    base = 2 * job.model.loaded_params
    assert on_gpu.num_bytes("gpu") == on_cpu.num_bytes("host") > base
    assert on_cpu.num_bytes("gpu") == 0
    assert on_gpu.num_bytes("host") == base
    assert "merging" not in stages(job, merge_on="none")


def test_merging_holds_what_the_adapters_share_and_what_is_frozen() -> None:
    frozen = 8 * (256 + 256)  # A and B of VeRA, for the widest inputs and outputs
    outputs = 96 + 48 + 48 + 96 + 256 + 256 + 96
    trained = 3 * (7 * 8 + outputs)
    merging = stages(job_of(method="vera"))["merging"]
    assert held(merging, life.WIDE_ADAPTERS, "gpu") == 4 * (trained + frozen)
    options = (("vector_length", 16), ("num_vectors", 512))
    job = job_of(method="vblora", method_options=options)
    parts = 3 * 8 * (6 * 96 + 256 + outputs) // 16 * 512
    merging = stages(job)["merging"]
    assert held(merging, life.WIDE_ADAPTERS, "gpu") == 4 * (parts + 512 * 16)
    assert "merging" not in stages(job_of(method="lily"))


def test_dora_makes_more_than_lora_of_the_matrix_that_it_merges() -> None:
    largest = 96 * 256
    lora, dora = (training_step(job_of(method=name)) for name in ("lora", "dora"))
    assert life.merging_bytes(lora, 2) == 8 * largest
    assert life.merging_bytes(dora, 2) == 14 * largest == get_method("dora").merging(2) * largest


def test_pages_of_the_optimizer_may_go_to_the_host() -> None:
    paged = stages(job_of(optimizer="paged_adamw_8bit", r=512))["training"]
    assert held(paged, life.PAGED_STATES, "host") > 0
    assert held(stages(job_of())["training"], life.PAGED_STATES, "host") == 0


def test_what_weighs_most_on_the_gpu_names_a_setting() -> None:
    lived = stages(job_of(method="qlora", precision="bf16"), eval_rows=8)
    for stage in lived.values():
        for each in stage.held:
            large = each.place == "gpu" and each.entry.num_bytes > 0.1 * stage.num_bytes("gpu")
            assert each.setting or not large or each.entry.part == "temporary", each.entry.what
    assert PART_SETTINGS["optimizer_states"] == "optimizer"
    assert life.FACT_SETTINGS[weights.EMBEDDING_WEIGHTS] == "precision, prepare_kbit"


def test_no_rank_lowers_what_a_full_fine_tuning_holds() -> None:
    settings = {
        each.setting for stage in stages(job_of(method="full")).values() for each in stage.held
    }
    assert "method" in settings
    assert "r, target_modules" not in settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_rows": -1}, "eval_rows: must be a whole number from 0"),
        ({"eval_rows": True}, "eval_rows: must be a whole number"),
        ({"eval_rows": 8, "eval_accumulation_steps": 0}, "from 1 to"),
        ({"eval_accumulation_steps": 2}, "give eval_rows, too"),
        ({"merge_on": "tpu"}, "merge_on: 'tpu' is not known"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LifeConfig(**settings)
