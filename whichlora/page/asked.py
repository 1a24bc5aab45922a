"""A question of the page with the settings that it and its files mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from whichlora.page.form import DATA, Question, chosen_files, data, settings, stated
from whichlora.spec.results import SCHEMA_VERSION, Answers, Prediction
from whichlora.workflow import estimates
from whichlora.workflow.from_files import with_files
from whichlora.workflow.whole_training import NO_FILES, Data, FromFiles

Part = dict[str, Any]  # of an answer, as JSON; "part" says which

HEADLINES = {"fits": "Fits", "undecided": "May fit", "fails": "Does not fit"}
UNKNOWN = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be predicted.

    Args:
        settings: as `combinations` takes them.
        files: what files of another tool say beside `settings`.
        data: what is learned, if anybody said.
        stated: names of the settings that somebody gave.
    """

    question: Question
    settings: Mapping[str, list[Any]]
    files: FromFiles = NO_FILES
    data: Data | None = None
    stated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, question: Question) -> Self:
        """What `question` means.

        Raises:
            ConfigError: a fault of a file, or settings that exclude each other.
        """
        asked, files = settings(question), chosen_files(question)
        is_set = {field.name for field in stated(question)} & {*asked, "concurrency"}
        if not files:
            what = data(question)
            return cls(question=question, settings=asked, data=what, stated=frozenset(is_set))
        merged, said = with_files(files, asked, is_set)
        what = data(question, said)
        return cls(
            question=question,
            settings=merged,
            files=said,
            data=what,
            stated=said.stated or frozenset(is_set),
        )

    def predicted(self, gpus: Sequence[str], **options: Any) -> Answers[Prediction]:
        """Its predictions on `gpus`; options are those of `estimates.estimate`.

        Raises:
            ConfigError: none is left, or a fault of the data.
        """
        return estimates.estimate_grid(
            self.settings,
            gpus,
            files=self.files,
            data=self.data,
            stated=self.stated,
            **options,
        )

    def at_length(self, seq_len: int) -> Asked:
        """A step of it at that length, where it has data; else itself."""
        if self.data is None:
            return self
        question = {name: text for name, text in self.question.items() if name not in DATA}
        question["seq_len"] = str(seq_len)
        settings = {**self.settings, "seq_len": [seq_len]}
        return replace(self, question=question, settings=settings, data=None)


def document(answers: Answers[Prediction]) -> str:
    """What `whichlora estimate --json` prints."""
    return json.dumps({"schema_version": SCHEMA_VERSION} | estimates.document(answers), indent=1)


def link(question: Question) -> dict[str, str]:
    """The fields of an address, which carries no file."""
    values = stated(question).items()
    return {field.name: text for field, text in values if field.kind != "file"}
