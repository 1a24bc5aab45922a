"""What a dataset is: rows in splits, and how a row becomes text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from whichlora.errors import ConfigError

Row = Mapping[str, Any]
Split = Literal["train", "validation"]


class BaseDataset(ABC):
    """Rows, and how a row becomes the text to train on; subclass it for your own data.

    A subclass is named in the config as `module:Class` or `path/to/file.py:Class`, and is made
    without arguments.
    """

    @abstractmethod
    def splits(self) -> Mapping[str, Sequence[Row]]:
        """The rows under "train", and under "validation" where there are any."""

    @abstractmethod
    def to_text(self, row: Row) -> str:
        """The text of `row`; rows without text are left out of training."""


def checked_splits(dataset: BaseDataset) -> dict[Split, Sequence[Row]]:
    splits = dataset.splits()
    if not isinstance(splits, Mapping) or "train" not in splits:
        name = type(dataset).__name__
        raise ConfigError(
            f"dataset: {name}.splits() must return a mapping with the key 'train', "
            f"got {sorted(splits) if isinstance(splits, Mapping) else type(splits).__name__}"
        )
    return {"train": splits["train"], "validation": splits.get("validation") or ()}


def row_texts(dataset: BaseDataset, split: str, rows: Sequence[Row]) -> Iterator[str]:
    """The text of each row, "" where there is none."""
    for index, row in enumerate(rows):
        text = dataset.to_text(row)
        if not isinstance(text, str):
            raise ConfigError(
                f"dataset: row {index} of {split}: {type(dataset).__name__}.to_text() must "
                f"return text, got {type(text).__name__}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half a character, as "\\ud83d"
            raise ConfigError(
                f"dataset: row {index} of {split}: holds half of a surrogate pair; remove it"
            ) from None
        yield text if text.strip() else ""
