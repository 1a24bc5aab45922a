"""LitGPT: its own layers, adapters and loss, and what its releases changed."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import litgpt_traces
import pytest
import trace_records
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.gradients import trained_params
from whichlora.memory.lasting import LEFT_GRADIENT
from whichlora.memory.loss import HEAD_COPY
from whichlora.memory.weights import linear_bytes, weight_bytes
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import count_run
from whichlora.predict.explain import explain
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

LLAMA = "meta-llama/Llama-3.2-1B"
RUN = RunConfig(
    model=LLAMA,
    trainer="litgpt",
    method="lora",
    precision="bf16-pure",
    target_modules=("query", "value"),
    gradient_checkpointing=False,
    batch_size=2,
    seq_len=512,
)
WORDS, WIDTH = 128_256, 2048


def job(run: RunConfig = RUN, **settings: Any) -> ResolvedRun:
    run = replace(run, **settings)
    return resolve(load_model(run.model), run, A100)


def held(found: ResolvedRun, fact: Any) -> int:
    entries = ledger(found).moments["loss_backward"]
    return int(sum(entry.num_bytes for entry in entries if entry.fact is fact))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("line", [*trace_records.read(litgpt_traces.RECORDS)])
def test_the_ledger_has_the_bytes_of_litgpt_s_own_code(line: dict[str, Any]) -> None:
    # the head's adapter is counted as if it ran on all tokens at once
    most = 0.025 if "head" in line["run"]["target_modules"] else 0.006
    assert litgpt_traces.predicted(line) == pytest.approx(line["traced"], rel=most)


def test_half_of_its_peaks_are_met_to_a_thousandth() -> None:
    lines = list(trace_records.read(litgpt_traces.RECORDS))
    assert len(lines) >= 60
    errors = [abs(litgpt_traces.predicted(line) / line["traced"] - 1) for line in lines[::3]]
    assert median(errors) < 0.001


@pytest.mark.parametrize(
    ("model", "trained"),
    [
        ("microsoft/phi-1_5", 1_572_864),
        ("meta-llama/Llama-2-7b-hf", 4_194_304),
        ("meta-llama/Llama-2-13b-hf", 6_553_600),
    ],
)
def test_adapters_have_as_many_parameters_as_litgpt_prints(model: str, trained: int) -> None:
    """Source: tutorials/resource-tables.md, "Trainable parameters"."""
    found = job(model=model, r=8)
    assert trained_params(found.model, found.targets, found.method, 8) == trained


@pytest.mark.parametrize(
    ("model", "asked", "own"),
    [
        (LLAMA, ("q_proj", "v_proj"), {"query", "value"}),
        (LLAMA, ("default",), {"query", "value"}),
        (LLAMA, ("gate_proj", "up_proj", "down_proj"), {"fc_1", "fc_2", "mlp_proj"}),
        (LLAMA, ("mlp", "head"), {"fc_1", "fc_2", "mlp_proj", "lm_head"}),
        ("tiiuae/falcon-7b", ("query_key_value",), {"query", "key", "value"}),
        ("tiiuae/falcon-7b", ("query", "mlp"), {"query", "fc", "mlp_proj"}),
        ("microsoft/Phi-3-mini-4k-instruct", ("qkv_proj", "o_proj"), {"query", "key", "value"}),
    ],
)
def test_targets_have_its_words_or_those_of_transformers(
    model: str, asked: tuple[str, ...], own: set[str]
) -> None:
    targets = set(job(model=model, target_modules=asked).targets)
    assert targets - {"projection"} == own


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ("gate_proj",)}, "all matrices of the MLP or none, got fc_1; give mlp"),
        ({"model": "openai-community/gpt2"}, "is predicted for llama, mistral"),
        ({"precision": "bf16"}, "bf16-pure (its bf16-true), fp32, or bf16 with base_dtype"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: trainer litgpt has false"),
        ({"method": "dora"}, "method: trainer litgpt has lora, qlora or full, got dora"),
        ({"quant": "int8"}, "quant: trainer litgpt has nf4"),
        ({"attn": "eager"}, "attn: trainer litgpt has sdpa, got eager"),
    ],
)
def test_what_it_has_not_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        count_run(job(**settings))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_nobody_s_settings_are_those_of_its_command() -> None:
    usual = job(precision="auto", gradient_checkpointing=None)
    assert (usual.run.precision, usual.run.base_dtype) == ("bf16", "float32")
    assert usual.run.gradient_checkpointing is False
    assert job(method="qlora", precision="auto").run.precision == "bf16-pure"


def test_embeddings_and_head_are_two_matrices_of_which_4_bits_store_one() -> None:
    wide, narrow = job(), job(method="qlora")
    table = WORDS * WIDTH * 2
    assert weight_bytes(wide.model, wide.dtypes)["embeddings"] == 2 * table
    head = narrow.model.head
    assert head is not None
    stored = weight_bytes(narrow.model, narrow.dtypes)
    assert stored["embeddings"] == table
    assert stored["head"] == linear_bytes(head, narrow.dtypes) < 0.3 * table
    shown = explain(load_model(LLAMA), narrow.run, A100, prior_calibration(A100)).lines
    (line,) = [line for line in shown if line.what == "quantised head"]
    assert (line.num_bytes, line.dtype) == (stored["head"], "nf4-dq")
    assert sum(line.num_bytes for line in shown) == ledger(narrow).peak_allocated_bytes


@pytest.mark.parametrize(("release", "gradients"), [("0.4.13", 0), ("0.5.0", 1)])
def test_a_stable_embedding_leaves_a_gradient(release: str, gradients: int) -> None:
    found = job(method="qlora", libraries=(("litgpt", release),))
    assert held(found, LEFT_GRADIENT) == gradients * WORDS * WIDTH * 2
    assert held(job(), LEFT_GRADIENT) == 0  # nor beside weights of 16 bit
    assert training_step(found).needs_grad is bool(gradients)


def test_each_chunk_of_the_head_has_a_copy_of_it_under_autocast() -> None:
    mixed = job(precision="bf16", base_dtype="float32")
    assert held(mixed, HEAD_COPY) == (512 // 128 - 1) * WORDS * WIDTH * 2
    assert held(replace(mixed, run=replace(mixed.run, seq_len=513)), HEAD_COPY) == (
        4 * WORDS * WIDTH * 2
    )
    assert held(job(), HEAD_COPY) == 0


@pytest.mark.parametrize(
    ("release", "moment"), [("0.1.0", "loss_backward"), ("0.4.13", "loss_forward")]
)
def test_the_logits_of_the_batch_before_are_there_unless_the_longest_came_first(
    release: str, moment: str
) -> None:
    found = job(seq_len=1024, libraries=(("litgpt", release),))
    assert ledger(found).peak_moment == moment


def test_norms_of_2023_have_nothing_in_fp32() -> None:
    peaks = [
        ledger(job(libraries=(("litgpt", release),))).moment_bytes("layer_backward")
        for release in ("0.0", "0.1.0")
    ]
    of_all_norms = 2 * 16 * WIDTH * 1024 * (4 - 2)
    assert peaks[1] - peaks[0] == pytest.approx(of_all_norms, rel=0.05)
