"""Tokens of texts that are compared with each other, each of which is a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.dataset.base import Example, labelled_texts
from whichlora.dataset.encoders import Encode
from whichlora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorTokens:
    """Counts rows of an anchor, a text that belongs to it, and some that do not.

    Args:
        max_length: tokens that texts are cut to.
        texts: of each row.
    """

    max_length: int
    texts: int
    of_row = "examples"
    leaves_out = "within {} tokens nothing in them is learned"
    none_left = "no row has texts"

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of the texts of each row.

        Raises:
            ConfigError: a row has more or fewer negatives than the run.
        """
        texts = [labelled_texts(row) for row in rows]
        for of_row in texts:
            if len(of_row) != self.texts:
                number = max(0, len(of_row) - 2)
                given = f"give trainer option num_negatives={number}" if number else "leave it out"
                raise ConfigError(
                    f"num_negatives: the run has {self.texts - 2}, and a row of the data set has "
                    f"{number}; {given}, or give every row as many"
                )
        flat = iter(encode([text for of_row in texts for text in of_row], "tokenizer"))
        return [tuple(next(flat) for _ in of_row) for of_row in texts]

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """All are: what is cut from a text is not learned."""
        return True
