"""Tokens of a source and its target, as `train.py` makes them for an encoder and its decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.dataset.base import Example, texts_of
from whichlora.dataset.encoders import Encode
from whichlora.spec.data_format import DataFormat

_BETWEEN = "\n\n"  # messages


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokens:
    """Counts rows of which an encoder reads one text, and its decoder learns to write the other.

    Args:
        max_length, target_length: tokens that sources and targets are cut to.
    """

    max_length: int
    target_length: int
    of_row = "pairs of a source and a target"
    leaves_out = "they have no target"
    none_left = "no row has a target: the last message must be the assistant's"

    @staticmethod
    def reads(data: DataFormat) -> bool:
        """Whether rows of `data` are such pairs."""
        return data.kind in ("prompt-completion", "messages") and not data.media

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of each source."""
        numbers = encode([source_and_target(row)[0] for row in rows], "tokenizer")
        return [(number,) for number in numbers]

    def longest_target(self, encode: Encode, rows: Sequence[Example]) -> int:
        """The most tokens of a target of `rows`."""
        numbers = encode([source_and_target(row)[1] for row in rows], "tokenizer")
        return min(max(numbers), self.target_length)

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """Whether there is something to write."""
        return "messages" not in row or row["messages"][-1]["role"] == "assistant"


def source_and_target(row: Example) -> tuple[str, str]:
    """What the encoder reads of a row, and what the decoder learns to write."""
    if "messages" in row:
        *before, answer = row["messages"]
        return _BETWEEN.join(texts_of(before)), _BETWEEN.join(texts_of([answer]))
    return _BETWEEN.join(texts_of(row["prompt"])), _BETWEEN.join(texts_of(row["completion"]))
