"""Tokens of pairs of answers, of labelled answers and of prompts, as TRL's trainers make them.

Source: TRL 1.16 `_prepare_dataset` of dpo_trainer.py, kto_trainer.py and reward_trainer.py;
`tokenize_row` of orpo_trainer.py and cpo_trainer.py; `GRPOTrainer._tokenize_prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from whichlora.dataset.base import Example, texts_of
from whichlora.dataset.encoders import Encode, Frame, Render
from whichlora.dataset.text_tokens import of_messages, start_tokens
from whichlora.spec.data_format import COLUMNS, KINDS
from whichlora.spec.run import RunConfig
from whichlora.trainers import Trainer, get_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """Counts the sequences of each row: of a prompt with each of its answers.

    Args:
        run: whose trainer makes tokens of the rows.
        max_length: tokens that a sequence is cut to.
        render: the chat template; None where it is not available, and for plain texts.
    """

    run: RunConfig
    max_length: int
    render: Render | None

    @property
    def trainer(self) -> Trainer:
        return get_trainer(self.run.trainer)

    @property
    def answers(self) -> tuple[str, ...]:
        """Columns of the answers to a prompt; none where the model writes them."""
        columns = COLUMNS[KINDS[self.trainer.rows][0]]
        return tuple(name for name in columns if name not in ("prompt", "label"))

    @property
    def of_row(self) -> str:
        return {"pairs": "pairs", "prompts": "prompts"}.get(self.trainer.rows, "answers")

    @property
    def leaves_out(self) -> str:
        if self.trainer.drops_longer:
            return "they have more than {} tokens"
        if not self.answers:
            return "prompt and answer have more than {} tokens"
        return "their prompts fill {} tokens"

    @property
    def none_left(self) -> str:
        return f"all rows are left out: {self.leaves_out}; raise sequence_length"

    @property
    def _written(self) -> int:
        """Tokens of the answer that the model writes."""
        return 0 if self.answers else self.trainer.scored_tokens(self.run) or 0

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of each sequence of each row, uncut."""
        if not self.answers:
            return [(self._start(encode, row) + self._written,) for row in rows]
        counted = [self._of_answers(encode, rows, answer) for answer in self.answers]
        return list(zip(*counted, strict=True))

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """Whether the trainer, or the job before it, keeps the row."""
        if max(counts) <= self.max_length:
            return True
        if self.trainer.drops_longer or not self.answers:
            return False
        return self._start(encode, row) < self.max_length

    def _of_answers(self, encode: Encode, rows: Sequence[Example], answer: str) -> list[int]:
        wholes = [self._whole(row, answer) for row in rows]
        texts = [text for text in wholes if text is not None]
        if len(texts) == len(wholes):
            return encode(texts, self._frame_of(rows[0]) if rows else "none")
        framed = int(self.trainer.frames_rows)  # by the end that the template has not written
        return [of_messages(encode, _texts(row, answer)) + framed for row in rows]

    def _frame_of(self, row: Example) -> Frame:
        """Special tokens of a text of `row`, which a chat template may have rendered."""
        if self.trainer.frames_rows:
            return "bos and eos"
        return "eos" if isinstance(row[self.answers[0]], str) else "none"

    def _whole(self, row: Example, answer: str) -> str | None:
        """Prompt and answer; None where the chat template is not available."""
        if isinstance(row[answer], str):
            text: str = row.get("prompt", "") + row[answer]
            return text
        return self.render and self.render([*row.get("prompt", ()), *row[answer]])

    def _start(self, encode: Encode, row: Example) -> int:
        """Tokens of the prompt, up to where an answer differs from it."""
        prompt = _prompt(row)
        wholes = [text for answer in self.answers if (text := self._whole(row, answer)) is not None]
        if not wholes:
            return start_tokens(encode, self.render, prompt)
        if not isinstance(prompt, str):
            assert self.render is not None
            prompt = self.render(prompt, add_generation_prompt=True)
            if self.trainer.frames_rows:  # `maybe_apply_chat_template`
                prompt = _shared([prompt, *wholes])
        starts = [encode.shared(prompt, whole, self._frame_of(row)) for whole in wholes]
        return max(starts) if self.trainer.frames_rows else min(starts)


def _prompt(row: Example) -> Any:
    """The prompt, which may be what both answers begin with."""
    if "prompt" in row:
        return row["prompt"]
    if not isinstance(row["chosen"], str):
        return row["chosen"][:0]
    shared = _shared([row["chosen"], row["rejected"]])
    return shared[: len(shared) - shared.endswith(" ")]  # as `extract_prompt` of TRL


def _shared(texts: Sequence[str]) -> str:
    """What all `texts` begin with."""
    same = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return texts[0][: sum(1 for _ in same)]


def _texts(row: Example, answer: str) -> list[str]:
    return [*texts_of(row.get("prompt", ())), *texts_of(row[answer])]
