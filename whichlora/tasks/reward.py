"""How good an answer is: one number, learnt from pairs of which one is better.

Source: TRL 1.16 `RewardTrainer`; transformers 5.23 `GenericForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families import with_label_head
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.tasks import sequence_classification
from whichlora.tasks.base import Task


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    if model.task != "causal-lm":
        raise ConfigError(
            f"{model.name}: task reward is predicted for models that continue a text; "
            f"{model.model_type} is none"
        )
    return with_label_head(model, sequence_classification.TASK.name, num_labels=1)


def _config(run: RunConfig) -> Mapping[str, Any]:
    return {"num_labels": 1}


TASK = Task(
    name="reward",
    summary="how good an answer is, from pairs",
    auto_class="transformers.AutoModelForSequenceClassification",
    peft_task="SEQ_CLS",
    copied=sequence_classification.COPIED,
    prepare=_prepare,
    labels="none",
    trainers=("reward",),
    config=_config,
)
