"""Tokens of transcripts of clips, as `train.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.dataset.audio import seconds_of
from whichlora.dataset.base import Example
from whichlora.dataset.encoders import Encode

_SPECIAL = 3  # a transcript begins, without times, and ends


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTokens:
    """Counts rows of which the transcript of a clip is learned.

    Args:
        max_length: tokens that a transcript may have; a longer one is left out, not cut, since its
            end would be taken for that of the clip.
        window_s: seconds that the model's processor keeps of a clip; so is a longer one.
    """

    max_length: int
    window_s: float
    of_row = "sequences"

    @property
    def leaves_out(self) -> str:
        """Why rows are left out, with a place for the greatest length."""
        return f"they are longer than {self.window_s:g} s of audio, or than {{}} tokens"

    @property
    def none_left(self) -> str:
        """Why no row is left, with a place for the greatest length."""
        return (
            f"no clip is within {self.window_s:g} s and its transcript within {{}} tokens; split "
            "the clips, or raise sequence_length"
        )

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of each transcript, without the one that the model puts before them itself.

        Source: transformers 5.23 `WhisperTokenizer.set_prefix_tokens`, `shift_tokens_right`.
        """
        (special,) = encode([""], "tokenizer")
        missing = 0 if special else _SPECIAL  # an estimate has none
        numbers = encode([row["text"] for row in rows], "tokenizer")
        return [(number + missing - 1,) for number in numbers]

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """Whether clip and transcript are read whole."""
        return max(counts) <= self.max_length and seconds_of(row) <= self.window_s
