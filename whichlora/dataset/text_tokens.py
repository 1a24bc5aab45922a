"""Tokens of texts, conversations and answers, as `train.py` makes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.dataset.audio import seconds_of
from whichlora.dataset.base import Example, texts_of, trained
from whichlora.dataset.encoders import Encode, Messages, Render
from whichlora.dataset.images import Grid, image_tokens
from whichlora.dataset.lengths import UNCUT
from whichlora.errors import ConfigError

MESSAGE_TOKENS = 5
"""Tokens that a chat template adds to a message: around its role, before and after its content.

Kind: exact for Llama 3 (`<|start_header_id|>` role `<|end_header_id|>` "\\n\\n" `<|eot_id|>`),
ChatML, as Qwen and SmolLM2 have it (`<|im_start|>` role "\\n" `<|im_end|>` "\\n"), and Gemma
(`<start_of_turn>` role "\\n" `<end_of_turn>` "\\n"); Phi-3 adds 4, Mistral 1 to 2. A system
prompt that a template adds by itself (Llama 3.1, Qwen2.5) is not counted.
Source: the chat_template of these models' tokenizer_config.json.
"""
_MOST_ROLES = 5  # that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokens:
    """Counts rows of which one text or conversation is learned.

    Args:
        max_length: tokens that rows are cut to.
        render: the chat template; None where it is not available, and for plain texts.
        conversational: rows hold messages.
        completions_only: rows in which nothing is learned are left out.
        grid: the rule of the model's processor for images or clips; None where rows have none.
        media: what they are called.
        window_s: seconds that the processor keeps of a clip; a row with a longer one is left out.
    """

    max_length: int
    render: Render | None
    conversational: bool
    completions_only: bool
    grid: Grid | None = None
    media: str = ""
    window_s: float = 0.0
    of_row = "sequences"

    @property
    def leaves_out(self) -> str:
        """Why rows are left out, with a place for the greatest length."""
        if self.grid is not None:
            longer = f", a clip is longer than {self.window_s:g} s" if self.window_s else ""
            room = f"within {{}} tokens there is no room for their {self.media}"
            return f"{room}{longer}, or nothing is learned"
        if self.max_length == UNCUT:
            return "no turn in them is the assistant's"
        return "within {} tokens nothing in them is learned"

    @property
    def none_left(self) -> str:
        """Why no row is left, with a place for the greatest length."""
        if self.grid is not None:
            return (
                f"no row has room within {{}} tokens for its {self.media} and for text to learn; "
                "raise sequence_length, or "
                f"{'split the clips' if self.window_s else 'set image_max_pixels'}"
            )
        return (
            "nothing is learned within {} tokens of any row: prompts fill them, or no turn is the "
            "assistant's; raise sequence_length, or set train_on: all"
        )

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of the sequence of each row."""
        if not self.conversational:
            numbers = encode(["".join(all_texts(row)) for row in rows], "ended")
        elif self.render is not None:
            numbers = encode([self.render(_messages(row)) for row in rows], "none")
        else:
            numbers = [of_messages(encode, all_texts(row)) for row in rows]
        if self.grid is not None:
            numbers = [number + self._added(row) for number, row in zip(numbers, rows, strict=True)]
        return [(number,) for number in numbers]

    def _added(self, row: Example) -> int:
        """Tokens of the images or clips of `row`, beyond what a chat template writes."""
        assert self.grid is not None
        return image_tokens(row, self.grid, rendered=self.render is not None)

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """Whether the first `max_length` of the row's tokens hold some that are learned."""
        if row.get(self.media) and max(counts) > self.max_length:
            return False  # the job can't cut the tokens of an image
        if self.window_s and seconds_of(row) > self.window_s:
            return False
        if not self.completions_only or "text" in row:
            return True
        before = _before_answer(row)
        if max(counts) <= self.max_length:
            return "messages" not in row or len(before) < len(row["messages"])
        return start_tokens(encode, self.render, before) < self.max_length


def require_answers(rows: Sequence[Example]) -> None:
    """Refuse conversations in which no turn is learned, with train_on completions.

    Raises:
        ConfigError: no turn is the assistant's.
    """
    roles = dict.fromkeys(m["role"] for row in rows for m in row.get("messages", ()))
    if roles and "assistant" not in roles:
        listed = ", ".join(map(repr, list(roles)[:_MOST_ROLES]))
        raise ConfigError(
            f"dataset: nothing is learned, as no turn is the assistant's: roles are {listed}; name "
            "the role of the answers assistant, or plan with train_on: all"
        )


def of_messages(encode: Encode, texts: list[str]) -> int:
    """Tokens of a conversation whose chat template is not available."""
    return 1 + sum(MESSAGE_TOKENS + number for number in encode(texts, "none"))


def start_tokens(encode: Encode, render: Render | None, prompt: str | Messages) -> int:
    """Tokens before an answer, as the job cuts the prompt."""
    if isinstance(prompt, str):
        return encode([prompt], "tokenizer")[0]
    if render is not None:
        return encode([render(prompt, add_generation_prompt=True)], "none")[0]
    before_answer = MESSAGE_TOKENS - 1  # template tokens before an answer
    return of_messages(encode, list(texts_of(prompt))) + before_answer


def all_texts(example: Example) -> list[str]:
    """The texts of what is learned, and of the prompt before it."""
    return [*texts_of(example.get("prompt", ())), *texts_of(trained(example))]


def _messages(example: Example) -> Messages:
    """All messages of a conversation that is trained on, the prompt first."""
    return [*example.get("prompt", ()), *trained(example)]


def _before_answer(row: Example) -> str | Messages:
    """The prompt or messages before the first learned token, with train_on completions."""
    if "messages" in row:
        return list(itertools.takewhile(lambda m: m["role"] != "assistant", row["messages"]))
    chosen: str | Messages = row.get("chosen", "")
    prompt: str | Messages = row.get("prompt", "" if isinstance(chosen, str) else chosen[:-1])
    return prompt
