"""A class for each token: names, parts of speech.

Source: transformers 5.23 `GenericForTokenClassification`, `BertForTokenClassification`,
`ForTokenClassification` of loss_utils.py; peft 0.21.2 `PeftModelForTokenClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.families import with_label_head
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.tasks.base import Task
from whichlora.tasks.sequence_classification import COPIED, NUM_LABELS, num_labels


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return with_label_head(model, TASK.name, num_labels=num_labels(run))


def _config(run: RunConfig) -> Mapping[str, Any]:
    return {"num_labels": num_labels(run)}


TASK = Task(
    name="token-classification",
    summary="a class for each token",
    auto_class="transformers.AutoModelForTokenClassification",
    peft_task="TOKEN_CLS",
    copied=COPIED,
    linears_by_name=True,
    prepare=_prepare,
    labels="per_token",
    rows="tagged",
    options=(NUM_LABELS,),
    config=_config,
)
