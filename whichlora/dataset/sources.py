"""`DatasetConfig` → dataset: a file, a hub dataset, a user's class, or counts alone."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from whichlora.dataset import assumed, audio
from whichlora.dataset.base import BaseDataset, Example, Row, checked_format
from whichlora.dataset.files import read_rows
from whichlora.dataset.images import found_in
from whichlora.dataset.lengths import UNCUT, TokenLengths
from whichlora.dataset.rendering import rendering
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.data_format import DataFormat, Rows
from whichlora.spec.plan import DATA_FILE_SUFFIXES, DatasetConfig

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "test"),
}
"""Names of files and of splits of the hub; the first that exists is used."""

_MOST_ALTERNATIVE = 20_000  # samples of an alternative distribution of lengths


def open_dataset(config: DatasetConfig, rows: Rows = "texts") -> BaseDataset:
    """The data that `config` names.

    Args:
        rows: what the trainer takes.

    Raises:
        ConfigError: no such data, or no way to make such rows of its columns.
        DataFileError: a file that can't be read, with the line.
    """
    return _OPENERS[config.kind](config, rows)


def first_format(path: str) -> DataFormat | None:
    """The format of the first row of a file, and so of all; None where it has no row.

    Raises:
        DataFileError: the row can't be read, with its line.
    """
    config = DatasetConfig(path=path)
    first, _ = _read_examples([Path(path)], config, "texts", most=1)
    return next(map(DataFormat.of, first), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDataset(BaseDataset):
    """Rows of columns, and one function that makes an example of each.

    Args:
        columns: the columns that are trained on, in words.
    """

    train: Sequence[Row]
    validation: Sequence[Row]
    render: Callable[[Row], Example]
    columns: str

    def splits(self) -> Mapping[str, Sequence[Row]]:
        return {"train": self.train, "validation": self.validation}

    def to_example(self, row: Row) -> Example:
        return self.render(row)

    def describe(self) -> str:
        return self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDataset(BaseDataset):
    """No data, only how much of it there is.

    Args:
        spread: standard deviation of the logarithm of the lengths, where it is known.
        max_tokens: length of the longest sequence, where it is known.
        typical, between: the assumed spread and its bounds, where it is not known.
    """

    num_samples: int
    mean_tokens: float
    spread: float | None = None
    max_tokens: int | None = None
    typical: float = assumed.TYPICAL
    between: tuple[float, float] = (assumed.NARROW, assumed.WIDE)

    def splits(self) -> Mapping[str, Sequence[Row]]:
        raise ConfigError(
            "dataset: gives only counts of tokens and samples; give dataset.path to train on data"
        )

    def describe(self) -> str:
        return ""

    def lengths(self, max_length: int) -> TokenLengths:
        """Lengths spread as those of public instruction data, with alternatives.

        The longest sequence has `max_tokens`, or any length; it is cut to `max_length`.
        """
        longest = max_length if self.max_tokens is None else min(self.max_tokens, max_length)
        spreads = self.between if self.spread is None else ()
        if self.max_tokens is None:
            longest_method = "the longest may be as long as sequence_length"
        else:
            longest_method = f"the longest of {self.max_tokens} tokens"
        shape = "as public instruction data" if self.spread is None else "as p95_tokens tells"
        lengths = f"log-normal around the mean of {self.mean_tokens:.4g} tokens, spread {shape}"
        if self.spread == 0:
            lengths, longest_method = "all rows are equal", f"{longest} tokens each"
        return replace(
            self._spread(self.typical if self.spread is None else self.spread, max_length),
            longest_possible=None if longest == UNCUT else longest,
            alternatives=tuple(
                replace(self, num_samples=min(self.num_samples, _MOST_ALTERNATIVE))._spread(
                    spread, max_length
                )
                for spread in spreads
            ),
            method=f"assumed, as only counts are given: {lengths}; {longest_method}",
        )

    def _spread(self, spread: float, max_length: int) -> TokenLengths:
        longest = self.max_tokens or UNCUT
        counts = assumed.lengths_of(
            self.num_samples, self.mean_tokens, spread=spread, max_length=longest
        )
        return TokenLengths(
            lengths={"train": tuple(counts.clip(max=max_length).tolist()), "validation": ()},
            max_length=max_length,
            num_truncated=int((counts > max_length).sum()),
            method="assumed",
        )


def _open_counts(config: DatasetConfig, rows: Rows) -> BaseDataset:
    if config.num_samples is None or config.mean_tokens is None:
        raise ConfigError("dataset: names no data; give path, or tokens and samples")
    return CountedDataset(
        num_samples=config.num_samples,
        mean_tokens=config.mean_tokens,
        spread=config.spread,
        max_tokens=config.max_tokens,
    )


def _open_file(config: DatasetConfig, rows: Rows) -> BaseDataset:
    path = Path(os.path.expanduser(config.path))
    files = {"train": [path], "validation": []}
    if path.is_dir():
        files = {split: _split_files(path, names) for split, names in SPLIT_NAMES.items()}
        if not files["train"]:
            present = ", ".join(sorted(file.name for file in _data_files(path))) or "no data file"
            raise DataFileError(
                f"{path}: has no training file, such as train.jsonl, but {present}; rename it, or "
                "give the file as dataset.path"
            )
    if config.validation_path is not None:
        files["validation"] = [Path(os.path.expanduser(config.validation_path))]
    examples, columns = _read_examples(files["train"], config, rows)
    if not examples:
        raise DataFileError(f"{files['train'][0]}: has no rows; give at least one")
    if files["validation"]:
        expected = checked_format(examples[0])
        held_out, _ = _read_examples(files["validation"], config, rows, expected)
    else:
        train, validation = _hold_out(len(examples), config.validation_fraction)
        held_out = [examples[index] for index in validation]
        examples = [examples[index] for index in train]
    return TableDataset(train=examples, validation=held_out, render=dict, columns=columns)


def _split_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """The file of the first name that has one, or its parts as the hub splits them."""
    data_files = _data_files(folder)
    for name in names:
        for suffix in DATA_FILE_SUFFIXES:
            parts = re.compile(rf"{name}(-\d+-of-\d+)?{re.escape(suffix)}")
            if files := [file for file in data_files if parts.fullmatch(file.name)]:
                return files
    return []


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in DATA_FILE_SUFFIXES)


def _open_hub(config: DatasetConfig, rows: Rows) -> BaseDataset:
    """A dataset of the hub, or of the cache of the `datasets` library."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"dataset.path: {config.path!r} is a Hugging Face dataset, which needs the library "
            "datasets; pip install 'whichlora[profile]', or give a local file"
        ) from None
    try:
        loaded = datasets.load_dataset(config.path, config.config_name, split=config.split)
        names = datasets.get_dataset_split_names(config.path, config.config_name)
        suffix = config.split.removeprefix("train")  # train_sft goes with test_sft
        held_out_names = [name + end for end in (suffix, "") for name in SPLIT_NAMES["validation"]]
        validation = next((name for name in held_out_names if name in names), None)
        held_out = (
            None
            if validation is None
            else datasets.load_dataset(config.path, config.config_name, split=validation)
        )
    except Exception as error:  # the library raises whatever lies below it
        raise ConfigError(
            f"dataset.path: {config.path!r} can't be loaded ({_one_line(error)}); check the id, "
            "config_name, split and the connection, or give a local file"
        ) from error
    if not len(loaded):
        raise ConfigError(
            f"dataset.split: {config.split!r} of {config.path} has no rows; give another"
        )
    try:
        render, columns = rendering(config, loaded[0], rows)
    except ConfigError as error:
        raise ConfigError(f"dataset: {config.path} {error}") from None
    if held_out is None:
        train, kept_back = _hold_out(len(loaded), config.validation_fraction)
        loaded, held_out = loaded.select(train), loaded.select(kept_back)
    return TableDataset(train=loaded, validation=held_out, render=render, columns=columns)


def _open_class(config: DatasetConfig, rows: Rows) -> BaseDataset:
    """A user's own subclass: named on purpose, so its code runs."""
    source, _, name = config.path.rpartition(":")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Exception as error:  # it is the user's code that fails
        raise ConfigError(
            f"dataset.path: {source} can't be imported ({_one_line(error)}); "
            "give module:Class or path/to/file.py:Class"
        ) from error
    dataset_class = getattr(module, name, None)
    if not (isinstance(dataset_class, type) and issubclass(dataset_class, BaseDataset)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, BaseDataset) and value != BaseDataset
        ]
        raise ConfigError(
            f"dataset.path: {name!r} in {source} is not a whichlora.dataset.BaseDataset; "
            f"there are {', '.join(classes) or 'none'}"
        )
    try:
        return dataset_class()
    except TypeError as error:  # abstract methods left, or arguments wanted
        raise ConfigError(f"dataset.path: {name} can't be made: {_one_line(error)}") from error


_OPENERS: dict[str, Callable[[DatasetConfig, Rows], BaseDataset]] = {
    "counts": _open_counts,
    "file": _open_file,
    "hub": _open_hub,
    "class": _open_class,
}


def _read_examples(
    paths: Sequence[Path],
    config: DatasetConfig,
    rows: Rows,
    expected: DataFormat | None = None,
    *,
    most: int | None = None,
) -> tuple[list[Example], str]:
    """The example of every row, and the columns that it is made of, in words.

    Args:
        most: rows that are read of a file.
    """
    examples: list[Example] = []
    render: Callable[[Row], Example] | None = None
    columns = ""
    for path in paths:
        for line, row in islice(read_rows(path), most):
            try:
                if render is None:
                    render, columns = rendering(config, row, rows)
                example = audio.found_in(path.parent, found_in(path.parent, render(row)))
                expected = checked_format(example, expected)
            except ConfigError as error:
                raise DataFileError(f"{path}:{line}: {error}") from None
            examples.append(example)
    return examples, columns


def _hold_out(num_rows: int, fraction: float) -> tuple[list[int], list[int]]:
    """Indexes for training and validation: the same for the same number of rows, in order."""
    num_held_out = min(math.ceil(fraction * num_rows), num_rows - 1)
    held_out = set(random.Random(0).sample(range(num_rows), num_held_out))
    return [i for i in range(num_rows) if i not in held_out], sorted(held_out)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
