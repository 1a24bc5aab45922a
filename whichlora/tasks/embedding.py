"""A vector for each text, near to those of texts that belong to it (a bi-encoder).

Source: sentence-transformers 6.2 `Transformer`, `Pooling`; transformers 5.23 `AutoModel`;
peft 0.21.2 `PeftModelForFeatureExtraction`.
"""

from __future__ import annotations

from typing import cast, get_args

from whichlora.families import with_pooling
from whichlora.spec.architecture import ModelSpec, Pooling
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.tasks.base import Task

POOLING = Option(
    name="pooling_mode",
    summary="how hidden states become the vector of a text: their mean, that of the first or last",
    default="mean",
    choices=get_args(Pooling),
)


def pooling_of(run: RunConfig) -> Pooling:
    return cast("Pooling", POOLING.of(run.task_options))


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return with_pooling(model, pooling_of(run))


def _notes(model: ModelSpec, run: RunConfig) -> tuple[str, ...]:
    attentions = (each for layer, _ in model.layers() for each in layer.attentions)
    if not any(each.causal for each in attentions) or pooling_of(run) == "lasttoken":
        return ()
    return (
        f"a decoder's last token alone has read the whole text: models such as Qwen3-Embedding "
        f"have {POOLING.name} lasttoken, here it is {pooling_of(run)}",
    )


TASK = Task(
    name="embedding",
    summary="a vector for each text",
    auto_class="transformers.AutoModel",
    peft_task="FEATURE_EXTRACTION",
    copied=(),
    prepare=_prepare,
    labels="none",
    rows="anchors",
    trainers=("sentence-transformers",),
    options=(POOLING,),
    notes=_notes,
)
