"""A class for each text: sentiment, topic, intent.

Source: transformers 5.23 `GenericForSequenceClassification`, `BertForSequenceClassification`,
`ForSequenceClassificationLoss`; peft 0.21.2 `PeftModelForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.families import with_label_head
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.tasks.base import Task

NUM_LABELS = Option(name="num_labels", summary="classes to tell apart", default=2)
COPIED = ("classifier", "score")


def num_labels(run: RunConfig) -> int:
    number = NUM_LABELS.of(run.task_options)
    assert isinstance(number, int)
    return number


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return with_label_head(model, TASK.name, num_labels=num_labels(run))


def _config(run: RunConfig) -> Mapping[str, Any]:
    number = num_labels(run)
    # a class that finds none looks at the labels: one label would be a regression
    problem = "regression" if number == 1 else "single_label_classification"
    return {"num_labels": number, "problem_type": problem}


TASK = Task(
    name="sequence-classification",
    summary="a class for each text",
    auto_class="transformers.AutoModelForSequenceClassification",
    peft_task="SEQ_CLS",
    copied=COPIED,
    prepare=_prepare,
    labels="class",
    rows="classified",
    options=(NUM_LABELS,),
    config=_config,
)
