"""How well a document answers a query: one number of both texts read together (a cross-encoder).

It is a class for texts with one label and a binary cross entropy, whose checkpoint the
`CrossEncoder` of sentence-transformers loads.

Source: transformers 5.23 `BertForSequenceClassification.forward`, problem_type
multi_label_classification; sentence-transformers 6.2 `BinaryCrossEntropyLoss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.families import with_label_head
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.tasks import sequence_classification
from whichlora.tasks.base import Task


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return with_label_head(model, sequence_classification.TASK.name, num_labels=1)


def _config(run: RunConfig) -> Mapping[str, Any]:
    # `BCEWithLogitsLoss` of one logit; a regression would be a squared error
    return {"num_labels": 1, "problem_type": "multi_label_classification"}


TASK = Task(
    name="reranking",
    summary="how well a document answers a query",
    auto_class="transformers.AutoModelForSequenceClassification",
    peft_task="SEQ_CLS",
    copied=sequence_classification.COPIED,
    prepare=_prepare,
    labels="number",
    rows="scored",
    config=_config,
)
