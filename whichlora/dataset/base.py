"""Datasets: rows in splits, and the example of each row that is trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.spec.data_format import AUDIO, COLUMNS, LABELLED_KINDS, DataFormat, negatives_of

Row = Mapping[str, Any]
Example = Mapping[str, Any]
Split = Literal["train", "validation"]


class BaseDataset(ABC):
    """Rows, and the example of each row that is trained on; subclass it for your own data.

    A subclass is named in the config as `module:Class` or `path/to/file.py:Class`, and is made
    without arguments. It has `to_text`, or `to_example` where a row is more than one text.
    """

    @abstractmethod
    def splits(self) -> Mapping[str, Sequence[Row]]:
        """The rows under "train", and under "validation" where there are any."""

    def to_text(self, row: Row) -> str:
        """The text of `row`; rows without text are left out of training."""
        raise ConfigError(
            f"dataset: {type(self).__name__} has neither to_text nor to_example; write one of them"
        )

    def to_example(self, row: Row) -> Example:
        """The example of `row` to train on, in the columns of one `DataFormat` for all rows.

        {"text": …}, {"messages": [{"role": …, "content": …}, …]}, {"prompt": …, "completion": …},
        {"prompt": …, "chosen": …, "rejected": …} or {"audio": …, "text": …}; for some trainers also
        with "label", or a prompt alone.
        """
        return {"text": self.to_text(row)}

    def describe(self) -> str:
        """The columns that are trained on, in words."""
        return f"as {type(self).__name__} gives it"


def checked_splits(dataset: BaseDataset) -> dict[Split, Sequence[Row]]:
    splits = dataset.splits()
    if not isinstance(splits, Mapping) or "train" not in splits:
        name = type(dataset).__name__
        raise ConfigError(
            f"dataset: {name}.splits() must return a mapping with the key 'train', "
            f"got {sorted(splits) if isinstance(splits, Mapping) else type(splits).__name__}"
        )
    return {"train": splits["train"], "validation": splits.get("validation") or ()}


def data_format(dataset: BaseDataset) -> DataFormat:
    """The format of the rows that are trained on, taken from the first one.

    Raises:
        ConfigError: no row to train on, or one of no known format.
    """
    for example in examples(dataset, "train", checked_splits(dataset)["train"]):
        if example is not None:
            return DataFormat.of(example)
    raise ConfigError(
        "dataset: has no text to learn in its split train: no row, or only empty texts and "
        "answers; give at least one"
    )


def examples(
    dataset: BaseDataset,
    split: Split,
    rows: Sequence[Row],
    *,
    expected: DataFormat | None = None,
) -> Iterator[Example | None]:
    """The example of each row, None where a row holds no text.

    Args:
        expected: the format of every row; without it, that of the first.

    Raises:
        ConfigError: a row of no known format, or of another one, with its number.
    """
    for index, row in enumerate(rows):
        try:
            example = dataset.to_example(row)
            expected = checked_format(example, expected)
        except ConfigError as error:
            raise ConfigError(f"dataset: row {index} of {split}: {error}") from None
        yield example if any(text.strip() for text in texts_of(trained(example))) else None


def checked_format(example: Example, expected: DataFormat | None = None) -> DataFormat:
    """The format of `example`.

    Raises:
        ConfigError: it has none, or not the `expected` one; or its texts can't be written.
    """
    row_format = DataFormat.of(example)
    try:
        if row_format.kind in LABELLED_KINDS:
            "".join(labelled_texts(example)).encode()
            example = {}
        for name, value in example.items():
            if name == AUDIO:
                continue
            if isinstance(value, str) or name in COLUMNS[row_format.kind]:
                "".join(texts_of(value)).encode()
    except UnicodeEncodeError:  # JSON can spell half a character, as "\\ud83d"
        raise ConfigError("holds half of a surrogate pair; remove it") from None
    if expected is not None and row_format != expected:
        raise ConfigError(
            f"has {row_format.describe()}, and the rows before it have {expected.describe()}; give "
            "every row the same columns"
        )
    return row_format


def trained(example: Example) -> Any:
    """The text or messages that the model learns to write; a row without any is left out."""
    if any(name in example for name in ("tokens", "context", "document", "positive")):
        return " ".join(labelled_texts(example))
    return next(
        example[name]
        for name in ("text", "messages", "completion", "chosen", "prompt")
        if name in example
    )


def labelled_texts(example: Example) -> list[str]:
    """The texts that a model reads at once, of a row whose labels are not written by it."""
    if "tokens" in example:
        return [" ".join(example["tokens"])]
    if "positive" in example:
        return [example[name] for name in ("anchor", "positive", *negatives_of(example))]
    names = ("question", "context", "query", "document", "text")
    return [example[name] for name in names if name in example]


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a column that holds a text or messages, without the images among them.

    Raises:
        ConfigError: a message without role and text.
    """
    if isinstance(value, bool):  # a label
        return
    if isinstance(value, str):
        yield value
        return
    for message in value:
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise ConfigError("a message must have role and content")
        content = message["content"]
        if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
            yield from (part["text"] for part in content if part.get("type") == "text")
            continue
        if not isinstance(content, str):
            got = type(content).__name__
            raise ConfigError(f"the content of a message must be text, got {got}")
        yield content
