"""Where in a text the answer to a question stands: its first and its last token.

Source: transformers 5.23 `GenericForQuestionAnswering`, `BertForQuestionAnswering`,
`ForQuestionAnsweringLoss`; peft 0.21.2 `PeftModelForQuestionAnswering`.
"""

from __future__ import annotations

from whichlora.families import with_label_head
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.tasks.base import Task

_ENDS = 2  # of an answer


def _prepare(model: ModelSpec, run: RunConfig) -> ModelSpec:
    return with_label_head(model, TASK.name, num_labels=_ENDS)


def _notes(model: ModelSpec, run: RunConfig) -> tuple[str, ...]:
    head = model.label_head
    if head is None or head.copied:
        return ()
    return (
        f"the head of {model.model_type} is called {head.projection.name}, which PEFT does not "
        f"copy for this task: give --modules-to-save {head.projection.name}, or it is not trained",
    )


TASK = Task(
    name="question-answering",
    summary="where in a text the answer stands",
    auto_class="transformers.AutoModelForQuestionAnswering",
    peft_task="QUESTION_ANS",
    copied=("qa_outputs",),
    linears_by_name=True,
    prepare=_prepare,
    labels="span",
    rows="spans",
    notes=_notes,
)
