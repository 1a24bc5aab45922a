"""What a notebook shows of an answer: the tables of the terminal as HTML."""

from __future__ import annotations

from whichlora.predict.explain import Explanation
from whichlora.predict.largest import Placement
from whichlora.predict.life import Life
from whichlora.spec.rendering import notebook_html
from whichlora.spec.results import Answers, Prediction
from whichlora.terminal.estimate import predictions_document
from whichlora.terminal.explained import explanation_document
from whichlora.terminal.life import life_document
from whichlora.terminal.placements import placements_document
from whichlora.terminal.sheet import as_html


@notebook_html.register
def _(prediction: Prediction) -> str:
    return as_html(predictions_document([prediction]))


@notebook_html.register
def _(answers: Answers) -> str | None:  # type: ignore[type-arg]  # dispatch is by class
    if all(isinstance(answer, Prediction) for answer in answers) and answers:
        return as_html(predictions_document(answers, answers.refused))
    if all(isinstance(answer, Placement) for answer in answers) and answers:
        return as_html(placements_document(answers))
    return None


@notebook_html.register
def _(explanation: Explanation) -> str:
    return as_html(explanation_document(explanation))


@notebook_html.register
def _(life: Life) -> str:
    return as_html(life_document(life))
