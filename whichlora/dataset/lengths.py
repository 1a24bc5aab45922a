"""Token lengths of the training data, and how they were counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from whichlora.dataset.base import Split
from whichlora.dataset.images import Size
from whichlora.errors import ConfigError
from whichlora.units import rows_are

UNCUT = 10**9  # tokens, more than any text has


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """Tokens of every sequence after truncation, and how they were counted.

    Args:
        lengths: split to lengths, in the order of the rows: of the longest sequence of each.
        others: split to tokens of the other sequence of each row, where a row is a pair.
        max_length: tokens that longer sequences were cut to.
        num_truncated: sequences that were cut, over all splits.
        num_empty: rows left out because they have no text, over all splits.
        num_blank: rows trained on, over all splits, in which a turn of the assistant has no text.
        num_unlearned: rows left out, over all splits, and `unlearned`: why.
        of_row: what a row is, in words.
        image_sizes: split to sizes of the images of each row; empty where no row has one.
        longest_target: tokens of the longest target after truncation, where rows have a source,
            whose lengths these are, and a target; else None.
        method: "tokenizer <name>", "bytes", or how the lengths were estimated and why.
        longest_possible: where lengths are assumed or estimated, an upper bound of the longest
            sequence; None is the longest of `lengths`.
        alternatives: where lengths are assumed or estimated, other plausible lengths: less and more
            spread, or shorter and longer; a sample of many sequences.

    Raises:
        ConfigError: no sequence to train on.
    """

    lengths: Mapping[str, tuple[int, ...]]
    max_length: int
    num_truncated: int = 0
    num_empty: int = 0
    num_blank: int = 0
    num_unlearned: int = 0
    unlearned: str = ""
    of_row: str = "sequences"
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    image_sizes: Mapping[str, tuple[tuple[Size, ...], ...]] = field(default_factory=dict)
    longest_target: int | None = None
    method: str
    longest_possible: int | None = None
    alternatives: tuple[Self, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths.get("train"):
            raise ConfigError("dataset: has no text in its split train; give at least one row")

    @property
    def is_counted(self) -> bool:
        """Whether a tokenizer counted them; else they are estimated from bytes, or assumed."""
        return not self.method.startswith(("estimated", "assumed"))

    def num_sequences(self, split: Split = "train") -> int:
        return len(self.lengths.get(split, ()))

    def total_tokens(self, split: Split = "train") -> int:
        """Tokens of one pass over `split`, padding left out."""
        return sum(self.lengths.get(split, ())) + sum(self.others.get(split, ()))

    def mean(self, split: Split = "train") -> float:
        return self.total_tokens(split) / self.num_sequences(split)

    def longest(self, split: Split = "train") -> int:
        """The longest sequence, which decides the memory."""
        return max(*self.lengths[split], self.longest_possible or 0)

    def paired(self) -> Self:
        """These lengths as those of pairs whose answers are equally long."""
        return replace(
            self,
            others=self.lengths,
            of_row="pairs",
            alternatives=tuple(each.paired() for each in self.alternatives),
            method=f"{self.method}; both answers of a pair are as long",
        )

    def at_least(self, tokens: int) -> Self:
        """These lengths, of at least so many tokens as far as they are not cut."""
        least = min(tokens, self.max_length)
        return replace(
            self,
            lengths={
                split: tuple(max(length, least) for length in lengths)
                for split, lengths in self.lengths.items()
            },
            alternatives=tuple(each.at_least(tokens) for each in self.alternatives),
        )

    def describe(self) -> str:
        """The amount of training data, and the rows that are left out, in words."""
        words = [
            f"{self.num_sequences()} {self.of_row}, {self.total_tokens()} tokens an epoch, "
            f"longest {self.longest()}"
        ]
        return ", ".join([*words, *self.changed()])

    def changed(self) -> list[str]:
        """How many rows are cut or left out, and how many have an answer without text."""
        words = []
        if self.num_truncated:
            words.append(f"{rows_are(self.num_truncated, 'cut')} to {self.max_length} tokens")
        if self.num_unlearned:
            words.append(f"{self.num_unlearned} rows are left out: {self.unlearned}")
        if self.num_empty:
            words.append(rows_are(self.num_empty, "left out", " without text"))
        if self.num_blank:
            rows = "1 row has" if self.num_blank == 1 else f"{self.num_blank:,} rows have"
            words.append(f"{rows} an answer without text, of which the end is learned")
        return words
