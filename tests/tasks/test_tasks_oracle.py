"""Tasks against transformers and PEFT on CPU: parameters, real steps, a train.py that trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
oracle = pytest.importorskip("oracle_memory")

import torch
import transformers
from train_runs import run_script
from transformers.models.auto import modeling_auto
from written_job import train_script_of

from whichlora.families import build, known_types
from whichlora.families.labels import SEQUENCES, SPANS, TOKENS
from whichlora.profiler.build import config_object
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.data_format import COLUMNS, KINDS, DataFormat
from whichlora.spec.run import RunConfig
from whichlora.store.models import list_models
from whichlora.store.paths import data_folder
from whichlora.tasks import get_task

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

MAPPINGS = {
    SEQUENCES: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    TOKENS: modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    SPANS: modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
SMALLEST = {
    record.model_type: record for record in sorted(list_models(), key=lambda each: -each.params)
}


def of_database(model_type: str) -> tuple[ModelSpec, dict[str, Any]]:
    file = data_folder("models_db") / f"{SMALLEST[model_type].hub_id.replace('/', '--')}.json"
    config = json.loads(file.read_text(encoding="utf-8"))["config"]
    return build(config, name=model_type), config


@pytest.mark.sampled(10)
@pytest.mark.parametrize("model_type", sorted(set(SMALLEST) & set(known_types())))
def test_a_type_has_the_classes_and_parameters_of_transformers(model_type: str) -> None:
    spec, config = of_database(model_type)
    for task, head in spec.label_heads:
        assert model_type in MAPPINGS[task]
        settings = {"num_labels": 2} if task == SPANS else {"num_labels": 7}
        projection = replace(head.projection, out_features=settings["num_labels"])
        counted = replace(
            spec,
            head=None,
            head_tied=False,
            label_head=replace(head, projection=projection),
        )
        theirs = config_object({**config, **settings})
        with torch.device("meta"):
            model = getattr(transformers, MAPPINGS[task][model_type])(theirs)
        assert counted.num_params == sum(p.numel() for p in model.parameters())


def run_of(task: str, **settings: Any) -> RunConfig:
    return RunConfig(model="tiny", task=task, **settings)


CPU_RUNS = [
    (task, family, method)
    for task in ("sequence-classification", "token-classification", "question-answering")
    for family in ("bert", "llama", "gpt2")
    for method in ("full", "lora")
] + [("reranking", "bert", "lora"), ("reranking", "llama", "full")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("task", "family", "method"), CPU_RUNS)
def test_a_real_step_on_a_cpu_takes_the_predicted_bytes(
    task: str, family: str, method: str
) -> None:
    one = oracle.case(family, task=task, method=method, gradient_checkpointing=False)
    assert oracle.predicted_peak(one) == pytest.approx(oracle.step_peak(one), rel=0.01)


ROWS: dict[str, list[dict[str, Any]]] = {
    "classified": [{"text": "good " * 3, "label": "up"}, {"text": "bad " * 3, "label": "down"}],
    "tagged": [{"tokens": ["in", "Paris"], "tags": [0, 1]}],
    "spans": [
        {
            "question": "who?",
            "context": "it was me",
            "answers": {"text": ["me"], "answer_start": [7]},
        }
    ],
    "scored": [{"query": "who?", "document": "me", "score": 1.0}],
}
BERT = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**BERT, "model_type": "llama", "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("sequence-classification", BERT),
        ("token-classification", LLAMA),
        ("question-answering", BERT),
        ("reranking", LLAMA),
    ],
    ids=["sequences", "tokens", "spans", "scores"],
)
def test_train_py_trains_the_head(tmp_path: Path, task: str, config: dict[str, Any]) -> None:
    run = run_of(
        task, padding="padded", seq_len=32, batch_size=2, precision="fp32", r=4, method="lora"
    )
    rows = get_task(task).rows
    assert rows is not None
    (kind,) = KINDS[rows]
    assert set(ROWS[kind][0]) == set(COLUMNS[kind])
    names = ["query", "value"] if config is BERT else ["q_proj", "v_proj"]
    path = tmp_path / "train.py"
    path.write_text(
        train_script_of(
            run,
            target_modules=names,
            weights="random",
            model_config=config,
            epochs=4,
            learning_rate=5e-3,
            data_format=DataFormat(kind=kind),
            masked_lm=config is BERT,
        )
    )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind] * 6))
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    states = sorted((tmp_path / "output").glob("checkpoint-*/trainer_state.json"))
    (first, *_) = json.loads(states[-1].read_text())["log_history"]
    assert result["final_loss"] < first["loss"]
    saved = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert saved["task_type"] == get_task(task).peft_task
    assert set(get_task(task).copied) <= set(saved["modules_to_save"])
