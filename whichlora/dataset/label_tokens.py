"""Tokens of texts that a model reads and does not write, as `train.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.dataset.base import (
    BaseDataset,
    Example,
    checked_splits,
    data_format,
    examples,
    labelled_texts,
)
from whichlora.dataset.encoders import Encode


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTokens:
    """Counts rows with labels: all texts of a row are one sequence, with the tokenizer's ends.

    A pair of texts is counted without the token that some tokenizers put between them.

    Args:
        max_length: tokens that rows are cut to.
    """

    max_length: int
    of_row = "sequences"
    leaves_out = "within {} tokens nothing in them is learned"
    none_left = "no row has a label"

    def counts(self, encode: Encode, rows: Sequence[Example]) -> list[tuple[int, ...]]:
        """Tokens of the sequence of each row."""
        texts = [" ".join(labelled_texts(row)) for row in rows]
        return [(number,) for number in encode(texts, "tokenizer")]

    def is_kept(self, encode: Encode, row: Example, counts: tuple[int, ...]) -> bool:
        """All are: what is cut from a row is not learned."""
        return True


def num_classes(dataset: BaseDataset) -> int:
    """Classes that the rows of all splits name, as `train.py` counts them; 0 where none does.

    Names are counted; numbers are their own names, from 0 to the largest.

    Raises:
        ConfigError: a row of another format.
    """
    expected = data_format(dataset)
    if expected.kind not in ("classified", "tagged"):
        return 0
    labels: set[str | int] = set()
    for split, rows in checked_splits(dataset).items():
        for example in examples(dataset, split, rows, expected=expected):
            if example is not None:
                labels.update(example["tags"] if expected.kind == "tagged" else [example["label"]])
    numbers = [label for label in labels if isinstance(label, int)]
    return max(numbers) + 1 if len(numbers) == len(labels) > 0 else len(labels)
