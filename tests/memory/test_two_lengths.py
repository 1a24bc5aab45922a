"""Encoder-decoders whose source and target have lengths of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from whichlora.errors import ConfigError
from whichlora.memory.activations import zeros_bytes
from whichlora.memory.kv_cache import trained_cache_elements, trained_source_elements
from whichlora.memory.step_events import training_events
from whichlora.predict.ledger_lines import entry_line
from whichlora.predict.quantities import (
    forward_features,
    ledger,
    moment_parts,
    num_tokens,
    step_features,
    training_step,
)
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import layers_in_order, parts_of, with_source_len
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import seq2seq_traces

GPU = find_gpu("rtx-4090-24gb")
T5, BART = "google/flan-t5-base", "facebook/bart-base"
FIRST_FRESH = 44  # records before it were drawn while the formulas were made


def job(model: str = T5, **settings: Any) -> ResolvedRun:
    run = RunConfig(model=model, **{"seq_len": 512, "batch_size": 4} | settings)
    return resolve(load_model(model), run, GPU)


def peak(model: str = T5, **settings: Any) -> int:
    return int(ledger(job(model, **settings)).peak_allocated_bytes)


def lines() -> list[dict[str, Any]]:
    return list(seq2seq_traces.RUNS.kept())


def errors(kept: list[dict[str, Any]]) -> list[float]:
    return [abs(seq2seq_traces.predicted(line) / line["traced"] - 1) for line in kept]


def test_traced_runs_of_every_class_are_predicted() -> None:
    kept = lines()
    assert {line["run"]["model"] for line in kept} == set(seq2seq_traces.CONFIGS)
    sizes = errors(kept)
    assert len(sizes) >= 60
    assert median(sizes) < 0.0005
    assert max(sizes) < 0.01
    fresh = errors(kept[FIRST_FRESH:])
    assert len(fresh) >= 20
    assert median(fresh) < 0.0005
    assert max(fresh) < 0.007


@pytest.mark.sampled(3)
@pytest.mark.oracle
@pytest.mark.parametrize("number", range(FIRST_FRESH, FIRST_FRESH + 22))
def test_the_real_classes_still_need_what_was_traced(number: int) -> None:
    line = lines()[number]
    assert seq2seq_traces.traced(line) == pytest.approx(line["traced"], rel=1e-4)


@pytest.mark.parametrize("model", [T5, BART])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_short_target_needs_less_and_a_long_one_more(model: str, checkpoints: bool) -> None:
    settings = {"gradient_checkpointing": checkpoints}
    sizes = [peak(model, target_len=length, **settings) for length in (32, 64, 512, 1000)]
    assert sizes == sorted(sizes)
    assert sizes[1] < 0.7 * peak(model, **settings)
    shorter = peak(model, seq_len=64, target_len=512, **settings)
    assert shorter < peak(model, target_len=512, **settings)


def test_logits_are_of_the_target_alone() -> None:
    short, long = (
        added(
            entry.num_bytes
            for entry in ledger(job(target_len=length, precision="bf16-pure")).moments[
                "loss_forward"
            ]
            if entry.part == "logits_and_loss"
        )
        for length in (64, 512)
    )
    assert long == 8 * short


def test_the_trainer_gets_an_fp32_copy_of_the_encoder_s_output() -> None:
    step = training_step(job(target_len=64))
    assert step.loss.widened_encoder_out == 4 * 4 * 512 * step.model.hidden_size
    assert training_step(job(target_len=64, precision="bf16-pure")).loss.widened_encoder_out == 0


def test_the_encoder_runs_on_the_source_and_cross_attention_reads_it() -> None:
    step = training_step(job(target_len=64))
    assert (step.source_len, step.seq_len) == (512, 64)
    assert (step.source_tokens, step.tokens) == (4 * 512, 4 * 64)
    encoder, decoder = parts_of(step.model)
    assert {layer.padded(4 * 64, 64) for layer in layers_in_order(encoder)} == {(4 * 512, 512)}
    assert {layer.padded(4 * 64, 64) for layer in layers_in_order(decoder)} == {(4 * 64, 64)}
    (cross,) = {layer.attentions[1] for layer in layers_in_order(decoder)}
    assert cross.memory_len == 512
    assert with_source_len(step.model, 512) == step.model


def test_zeros_of_cross_attention_have_a_row_for_each_token_of_the_target() -> None:
    step = training_step(job(target_len=64))
    first = layers_in_order(parts_of(step.model)[1])[0]
    assert zeros_bytes(first, step.dtypes, span=64) == 12 * 64 * 512 * 2
    assert step.masks.decoder_zeros_bytes == 2 * 12 * 64 * 512 * 2


def test_a_decoder_caches_keys_of_the_source_and_of_its_own() -> None:
    stepped = training_step(job(target_len=64, method="qlora", gradient_checkpointing=False))
    of_target = trained_cache_elements(stepped.model, stepped.dtypes)
    assert trained_source_elements(stepped.model, stepped.dtypes) == of_target > 0


@pytest.mark.parametrize("line", lines()[::5], ids=lambda line: line["run"]["model"])
def test_the_replayed_events_add_up_to_the_ledger(line: Mapping[str, Any]) -> None:
    resolved = seq2seq_traces.job_of(line)
    live = max(seq2seq_traces.live_bytes(resolved).values())
    requests = training_events(training_step(resolved))
    workspaces = requests.workspace_bytes
    assert requests.peak_bytes - workspaces == pytest.approx(
        live, rel=0.015
    )  # tables of positions are loaded twice


def test_arrays_of_lengths_are_counted_as_each_of_them() -> None:
    resolved = job(target_len=64)
    lengths, batches = [64, 512, 300], [[1], [8]]
    sizes = {"seq_len": np.array(lengths), "batch_size": np.array(batches)}
    together = moment_parts(resolved, **sizes)["loss_backward"]["activations"]
    features = step_features(resolved, **sizes)["attention"]
    for row, (batch,) in enumerate(batches):
        for column, length in enumerate(lengths):
            one = {"seq_len": length, "batch_size": batch}
            alone = moment_parts(resolved, **one)["loss_backward"]["activations"]
            assert together[row, column] == alone
            assert features[row, column] == step_features(resolved, **one)["attention"]


def test_a_decoder_without_so_many_positions_stops_at_those_it_has() -> None:
    line = next(line for line in lines() if line["run"]["model"] == "led")
    run = replace(RunConfig.from_dict(line["run"]), target_len=None)
    long, short = (
        seq2seq_traces.job_of(line | {"run": replace(run, seq_len=length).to_dict()})
        for length in (4096, 512)
    )
    assert training_step(long).seq_len == 1024
    assert training_step(long).source_len == 4096
    assert training_step(short).source_len == training_step(short).seq_len == 512
    many = training_step(long, seq_len=np.array([512, 4096]))
    assert many.seq_len.tolist() == [512, 1024]


def test_tokens_per_second_are_those_of_the_source() -> None:
    assert num_tokens(job(target_len=64)) == num_tokens(job()) == 4 * 512


def test_a_shorter_target_leaves_generation_as_it_is() -> None:
    plain, short = (
        job(phase="inference", prompt_len=256, max_new_tokens=32, target_len=length)
        for length in (None, 64)
    )
    assert ledger(plain).peak_allocated_bytes == ledger(short).peak_allocated_bytes
    features = [forward_features(each, context=256, decoding=False) for each in (plain, short)]
    assert features[0] == features[1]


def test_explained_lines_say_of_which_length_they_are() -> None:
    resolved = job(target_len=64)
    entries = ledger(resolved).moments["loss_backward"]
    logits = next(entry for entry in entries if entry.part == "logits_and_loss")
    assert "target_len, vocab_size" in entry_line(resolved, logits).shape


@pytest.mark.parametrize(
    ("model", "settings", "fault"),
    [
        ("openai-community/gpt2", {"target_len": 64}, "is of encoder-decoders of texts"),
        ("openai/whisper-small", {"target_len": 64, "seq_len": 128}, "its length is seq_len"),
        (BART, {"target_len": 2048}, "more than the 1024 positions"),
        (T5, {"target_len": 0}, "must be 1 or more"),
    ],
)
def test_a_target_that_there_is_not_is_refused(
    model: str, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        job(model, **settings)


def test_a_run_without_a_target_names_none() -> None:
    assert "target_len" not in json.dumps(RunConfig(model="any").to_dict())
    run = RunConfig(model="any", target_len=64)
    assert RunConfig.from_dict(run.to_dict()) == run
    assert run.lengths == "2048+64"


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("t5", {"method": "lora", "seq_len": 256, "target_len": 32}),
        ("t5", {"method": "qlora", "seq_len": 64, "target_len": 128}),
        ("longt5", {"method": "full", "gradient_checkpointing": False, "target_len": 16}),
        ("led", {"method": "lora", "gradient_checkpointing": False, "target_len": 192}),
    ],
)
def test_real_steps_on_a_cpu_need_what_is_predicted(family: str, settings: dict[str, Any]) -> None:
    from oracle_memory import case, predicted_peak, step_peak

    sizes = {"seq_len": 96, "batch_size": 8, "gradient_checkpointing": True}
    one = case(family, **sizes | settings)
    assert predicted_peak(one) == pytest.approx(step_peak(one), rel=0.005)


def test_no_gradients_are_reduced_in_the_forward_of_an_encoder() -> None:
    spread = {"parallel": ParallelConfig(strategy="zero2", gpus=2)}
    moments = moment_parts(job(target_len=64, seq_len=1024, batch_size=8, **spread))
    gradients = {name: parts["gradients"] for name, parts in moments.items()}
    forward, backward = (
        next(bytes_ for name, bytes_ in gradients.items() if name.endswith(moment))
        for moment in ("encoder_forward", "encoder_backward")
    )
    assert forward < backward
