"""Heads for labels: parameters, bytes, refusals, and the kept traces of all tasks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.memory.gradients import copied_linears
from whichlora.memory.training import trained_params
from whichlora.predict.quantities import ledger, passes
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.data_format import DataFormat
from whichlora.spec.numeric import added
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.tasks import BUILT_IN, get_task, rows_of, task_of, with_task
from whichlora.timing.work import head_weights, num_logits

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import task_traces

GPU = find_gpu("a100-sxm-80gb")
BERT, LLAMA = "google-bert/bert-base-uncased", "meta-llama/Llama-3.2-1B"


def job(name: str, task: str, **settings: Any) -> ResolvedRun:
    return resolve(load_model(name), RunConfig(model=name, task=task, **settings), GPU)


def test_traced_runs_of_every_task_are_predicted() -> None:
    by_task = task_traces.RUNS.errors()
    assert set(by_task) == {*task_traces.TASKS, "embedding"}
    sizes = [size for of_task in by_task.values() for size in of_task]
    assert len(sizes) >= 45
    assert median(sizes) < 0.005
    assert quantiles(sizes, n=20, method="inclusive")[18] < 0.03
    assert max(sizes) < 0.06


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
@pytest.mark.parametrize("name", [BERT, LLAMA])
def test_a_task_has_no_vocabulary_and_costs_by_its_labels(name: str, task: str) -> None:
    few = job(name, task, batch_size=8, seq_len=256)
    words = resolve(load_model(name), replace(few.run, task="", task_options=()), GPU)

    def in_loss(of: ResolvedRun) -> int:
        entries = ledger(of).moments["loss_forward"]
        return int(added(e.num_bytes for e in entries if e.part == "logits_and_loss"))

    assert in_loss(few) < in_loss(words) / 3
    assert few.model.head is few.model.masked_head is None
    many = job(name, task, batch_size=8, seq_len=256, task_options=(("num_labels", 1000),))
    assert many.model.num_params - few.model.num_params >= 998 * few.model.hidden_size
    each = head_weights(many.model)[0]
    assert each == (0 if few.model.label_head.pools == "before" else 1000 * few.model.hidden_size)
    assert num_logits(few.model) == (0 if few.model.label_head.pools == "before" else 2)


def test_peft_trains_a_copy_of_the_head_beside_the_adapters() -> None:
    def trained(name: str, task: str) -> int:
        of = job(name, task)
        head = copied_linears(of.model, ())
        without = replace(of.model.label_head, copied=False)
        beside, alone = (
            trained_params(model, of.targets, of.method, 16)
            for model in (of.model, replace(of.model, label_head=without))
        )
        assert int(beside - alone) == sum(linear.num_params for linear in head)
        return int(beside - alone)

    assert trained(BERT, "sequence-classification") == 2 * 768 + 2
    # RoBERTa's classifier is a module of two matrices
    assert trained("FacebookAI/roberta-base", "sequence-classification") == 768 * 769 + 2 * 769
    assert job("distilbert/distilbert-base-uncased", "reranking").peft_targets != "all-linear"
    assert trained(LLAMA, "sequence-classification") == 2 * 2048
    modern = "answerdotai/ModernBERT-base"
    assert trained(modern, "question-answering") == 0  # PEFT looks for `qa_outputs`
    notes = get_task("question-answering").notes
    assert "classifier" in notes(job(modern, "question-answering").model, RunConfig(model="x"))[0]
    assert not notes(job(BERT, "question-answering").model, RunConfig(model="x"))


def test_a_model_of_labels_is_served_by_one_forward() -> None:
    served = job(LLAMA, "sequence-classification", phase="inference", batch_size=4)
    assert [name for name, _, _ in passes(served)] == ["prefill"]
    assert set(ledger(served).moments) == {"forward", "logits"}


def test_a_trainer_for_one_task_implies_it_and_a_task_its_trainer() -> None:
    run = RunConfig(model="x", trainer="reward")
    assert task_of(run) == get_task("reward") == BUILT_IN["reward"]
    assert with_task(RunConfig(model="x", task="reward")).trainer == "reward"
    assert rows_of(run) == "pairs"
    assert rows_of(RunConfig(model="x", task="reranking")) == "scored"
    named = job(LLAMA, "reward", method="full", batch_size=4, seq_len=256)
    implied = resolve(
        load_model(LLAMA), replace(named.run, task="", trainer="reward", task_options=()), GPU
    )
    assert ledger(named).peak_allocated_bytes == ledger(implied).peak_allocated_bytes


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (LLAMA, {"task": "sequence-clasification"}, "task: 'sequence-clasification' is not known"),
        (LLAMA, {"task_options": (("num_labels", 3),)}, "task_options: num_labels is of a task"),
        (
            LLAMA,
            {"task": "token-classification", "task_options": (("labels", 3),)},
            "whose options are num_labels",
        ),
        (LLAMA, {"task": "reranking", "trainer": "dpo"}, "trainer: dpo does not train task rerank"),
        (LLAMA, {"task": "reranking", "loss_head": "liger"}, "loss_head: liger is of a vocabulary"),
        (
            "google-t5/t5-small",
            {"task": "token-classification"},
            "of t5 is not predicted; no other task is, so",
        ),
        ("google/gemma-2-2b", {"task": "question-answering"}, "known of it are sequence-class"),
        (BERT, {"task": "reward"}, "models that continue a text"),
    ],
    ids=str,
)
def test_what_a_task_can_not_be_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_model(name), RunConfig(model=name, **settings), GPU)


@pytest.mark.parametrize(
    ("row", "kind", "fault"),
    [
        ({"text": "a", "label": "good"}, "classified", {"label": True}),
        ({"tokens": ["a"], "tags": [0]}, "tagged", {"tags": [0, 1]}),
        (
            {"question": "q", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}},
            "spans",
            {"context": "b a"},
        ),
        ({"query": "q", "document": "d", "score": 0.5}, "scored", {"score": 3}),
    ],
    ids=str,
)
def test_rows_of_a_task_are_checked(row: dict[str, Any], kind: str, fault: dict[str, Any]) -> None:
    assert DataFormat.of(row).kind == kind
    with pytest.raises(ConfigError):
        DataFormat.of({**row, **fault})
