"""`DatasetConfig` → dataset: a file, a hub dataset, a user's class, or counts alone."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whichlora.dataset.base import BaseDataset, Example, Row, Split
from whichlora.dataset.files import read_rows
from whichlora.dataset.lengths import TokenLengths
from whichlora.dataset.rendering import rendering
from whichlora.errors import ConfigError, DataFileError
from whichlora.plan import DATA_FILE_SUFFIXES, DatasetConfig


def open_dataset(config: DatasetConfig) -> BaseDataset:
    """The data that `config` names.

    Raises:
        ConfigError: no such data, or no way to make text of its columns.
        DataFileError: a file that can't be read, with the line.
    """
    return _OPENERS[config.kind](config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDataset(BaseDataset):
    """Rows of columns, and one function that makes an example of each."""

    train: Sequence[Row]
    validation: Sequence[Row]
    render: Callable[[Row], Example]

    def splits(self) -> Mapping[str, Sequence[Row]]:
        return {"train": self.train, "validation": self.validation}

    def to_example(self, row: Row) -> Example:
        return self.render(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDataset(BaseDataset):
    """No data, only how much of it there is."""

    num_samples: int
    mean_tokens: float

    def splits(self) -> Mapping[str, Sequence[Row]]:
        raise ConfigError(
            "dataset: gives only counts of tokens and samples; give dataset.path to train on data"
        )

    def lengths(self, max_length: int) -> TokenLengths:
        """Sequences as equal as whole numbers allow, with the total that the user gave."""
        short = int(self.mean_tokens)
        num_longer = round((self.mean_tokens - short) * self.num_samples)
        counts = (min(short + 1, max_length),) * num_longer
        counts += (min(short, max_length),) * (self.num_samples - num_longer)
        num_truncated = num_longer if short == max_length else 0
        return TokenLengths(
            lengths={"train": counts, "validation": ()},
            max_length=max_length,
            num_truncated=self.num_samples if short > max_length else num_truncated,
            method="given: dataset.tokens and dataset.samples, all sequences equally long",
        )


def _open_counts(config: DatasetConfig) -> BaseDataset:
    if config.num_samples is None or config.mean_tokens is None:
        raise ConfigError("dataset: names no data; give path, or tokens and samples")
    return CountedDataset(num_samples=config.num_samples, mean_tokens=config.mean_tokens)


def _open_file(config: DatasetConfig) -> BaseDataset:
    path = Path(os.path.expanduser(config.path))
    held_out: Path | None = None
    if path.is_dir():
        folder = path
        found = _split_file(folder, "train")
        if found is None:
            names = ", ".join(f"train{suffix}" for suffix in DATA_FILE_SUFFIXES)
            raise DataFileError(f"{folder}: has no training file; accepted are {names}")
        path = found
        held_out = _split_file(folder, "validation")
    rows = list(_read_rows(path, config))
    if not rows:
        raise DataFileError(f"{path}: has no rows; give at least one")
    render = rendering(config, list(rows[0]))
    train, validation = _hold_out(len(rows), 0.0 if held_out else config.validation_fraction)
    return TableDataset(
        train=[rows[index] for index in train],
        validation=(
            list(_read_rows(held_out, config))
            if held_out
            else [rows[index] for index in validation]
        ),
        render=render,
    )


def _split_file(folder: Path, split: Split) -> Path | None:
    files = (folder / f"{split}{suffix}" for suffix in DATA_FILE_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _open_hub(config: DatasetConfig) -> BaseDataset:
    """A dataset of the hub, or of the cache of the `datasets` library."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"dataset.path: {config.path!r} is a Hugging Face dataset, which needs the library "
            "datasets; pip install 'whichlora[profile]', or give a local file"
        ) from None
    try:
        rows = datasets.load_dataset(config.path, config.config_name, split=config.split)
        names = datasets.get_dataset_split_names(config.path, config.config_name)
        held_out = (
            datasets.load_dataset(config.path, config.config_name, split="validation")
            if "validation" in names
            else None
        )
    except Exception as error:  # the library raises whatever lies below it
        raise ConfigError(
            f"dataset.path: {config.path!r} can't be loaded ({_one_line(error)}); check the id, "
            "config_name, split and the connection, or give a local file"
        ) from error
    if not len(rows):
        raise ConfigError(
            f"dataset.split: {config.split!r} of {config.path} has no rows; give another"
        )
    render = rendering(config, rows.column_names)
    if held_out is None:
        train, validation = _hold_out(len(rows), config.validation_fraction)
        rows, held_out = rows.select(train), rows.select(validation)
    return TableDataset(train=rows, validation=held_out, render=render)


def _open_class(config: DatasetConfig) -> BaseDataset:
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
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, BaseDataset)):
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
        return found()
    except TypeError as error:  # abstract methods left, or arguments wanted
        raise ConfigError(f"dataset.path: {name} can't be made: {_one_line(error)}") from error


_OPENERS: dict[str, Callable[[DatasetConfig], BaseDataset]] = {
    "counts": _open_counts,
    "file": _open_file,
    "hub": _open_hub,
    "class": _open_class,
}


def _read_rows(path: Path, config: DatasetConfig) -> Iterator[Row]:
    """Rows of `path` that are known to make examples."""
    render: Callable[[Row], Example] | None = None
    for line, row in read_rows(path):
        render = render or rendering(config, list(row))
        try:
            render(row)
        except ConfigError as error:
            raise DataFileError(f"{path}:{line}: {error}") from None
        yield row


def _hold_out(num_rows: int, fraction: float) -> tuple[list[int], list[int]]:
    """Indexes for training and validation: the same for the same number of rows, in order."""
    num_held_out = min(math.ceil(fraction * num_rows), num_rows - 1)
    held_out = set(random.Random(0).sample(range(num_rows), num_held_out))
    return [i for i in range(num_rows) if i not in held_out], sorted(held_out)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
