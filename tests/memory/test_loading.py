"""The end of loading: what is on the device beside the weights that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.memory.event_list import unsplit_weight_bytes
from whichlora.memory.loading import (
    NARROW_TABLE,
    START,
    UNSPLIT_WEIGHTS,
    loading_moment,
    loading_temporaries,
    narrow_table_bytes,
    table_sizes,
    tied_table_bytes,
    unquantised_matrix_bytes,
)
from whichlora.memory.training import training_loading
from whichlora.memory.weights import weight_bytes
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.backends.cuda import OLDER_WORKSPACE_BYTES
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.models import find_model
from whichlora.units import GiB, MiB

SHORT = RunConfig(
    model="Qwen/Qwen2.5-0.5B",
    phase="inference",
    prompt_len=1,
    max_new_tokens=16,
    precision="fp16",
)


def job(run: RunConfig) -> ResolvedRun:
    model = find_model(run.model)
    assert model is not None
    return resolve(model, run, A100)


# qwen25_speed of transformers 4.46: 2,048 new tokens, which need less than loading
@pytest.mark.parametrize(
    ("name", "published_gib"), [("Qwen/Qwen2.5-0.5B", 0.68), ("Qwen/Qwen2.5-3B", 2.50)]
)
def test_an_awq_checkpoint_holds_the_tied_head_twice(name: str, published_gib: float) -> None:
    run = replace(SHORT, model=name, quant="awq-int4", max_new_tokens=2048)
    counted = ledger(job(run))
    assert counted.peak_moment == "loading"
    assert counted.peak_allocated_bytes / GiB == pytest.approx(published_gib, abs=0.005)


# 36 layers with 3 matrices of 43 MiB in 44, and a table of 593.5 in 594
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 108.5),
        ({"quant": "nf4"}, 0.0),
        ({"phase": "finetune"}, 108.5),
        ({"phase": "finetune", "trainer": "unsloth"}, 0.0),
        ({"expandable_segments": True}, 0.0),
        ({"model": "albert/albert-base-v2"}, 0.0),  # its one layer is loaded once
        # transformers 4 has gates apart from what they multiply, each of 5.5 MiB
        ({"model": "Qwen/Qwen1.5-MoE-A2.7B", "libraries": (("transformers", "4.38.2"),)}, 1.0),
    ],
    ids=str,
)
def test_weights_that_are_loaded_one_by_one_leave_remainders(
    settings: dict[str, Any], expected: float
) -> None:
    resolved = job(replace(SHORT, **({"model": "Qwen/Qwen2.5-3B"} | settings)))
    entries = next(iter(ledger(resolved).moments.values()))
    (unsplit,) = (entry.num_bytes for entry in entries if entry.fact is UNSPLIT_WEIGHTS)
    assert unsplit / MiB == expected
    if not resolved.run.expandable_segments:
        assert unsplit == unsplit_weight_bytes(resolved.model, resolved.dtypes)


def test_a_head_of_its_own_is_loaded_once() -> None:
    untied = job(replace(SHORT, model="Qwen/Qwen2.5-7B", quant="awq-int4"))
    assert tied_table_bytes(untied.model, untied.dtypes) == 0
    assert "loading" not in ledger(untied).moments


@pytest.mark.parametrize(
    ("quant", "is_wide"), [("nf4", True), ("int8", True), ("gptq-int4", False)]
)
def test_bitsandbytes_reads_a_matrix_in_16_bit(quant: Quant, is_wide: bool) -> None:
    loaded = job(replace(SHORT, quant=quant))
    assert unquantised_matrix_bytes(loaded.model, loaded.dtypes) == 2 * 896 * 4864 * is_wide


def test_nothing_has_run_a_product_and_no_buffer_is_there_while_loading() -> None:
    run = replace(SHORT, quant="nf4", libraries=(("transformers", "4.38.2"),))
    older = job(run)
    weights = weight_bytes(older.model, older.dtypes)
    assert weights["buffers"] > 0  # rotary tables
    (entries,) = loading_moment(older.model, older.dtypes, like=1).values()
    on_device = sum(entry.num_bytes for entry in entries)
    assert on_device == sum(weights.values()) - weights["buffers"] + 2 * 896 * 4864
    counted = ledger(older)
    assert counted.moment_bytes("loading") == on_device
    assert counted.workspace_in("decode") == OLDER_WORKSPACE_BYTES


SHORT_TRAINING = RunConfig(model="Qwen/Qwen2.5-7B", method="qlora", batch_size=1, seq_len=8)


def test_a_table_is_widened_beside_its_16_bit_copy() -> None:
    run = replace(SHORT_TRAINING, model="google/gemma-2-2b", target_modules=("q_proj", "v_proj"))
    prepared = job(replace(run, loss_head="trl-fused", prepare_kbit=True))
    model, dtypes = prepared.model, prepared.dtypes
    largest = max(table_sizes(model))
    assert narrow_table_bytes(model, dtypes, prepare_kbit=True) == 2 * largest
    assert narrow_table_bytes(model, dtypes, prepare_kbit=False) == 0
    assert 2 * largest > sum(loading_temporaries(model, dtypes).values())
    counted = ledger(prepared)
    assert counted.peak_moment == "loading"
    assert counted.moments["loading"][-1].fact is NARROW_TABLE


def test_a_start_from_gradients_decides_whether_a_run_fits() -> None:
    plain, started = (job(replace(SHORT_TRAINING, method=name)) for name in ("lora", "lora-ga"))
    assert training_loading(training_step(plain), like=1) == {}
    counted = ledger(started)
    assert counted.peak_moment == "loading"
    assert counted.moments["loading"][-1].fact is START
    assert counted.peak_allocated_bytes > 1.7 * ledger(plain).peak_allocated_bytes
