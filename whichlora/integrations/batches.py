"""A training dataloader → the widths of its batches, without taking a batch from it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whichlora.dataset import TokenLengths, workload
from whichlora.errors import ConfigError

_NUM_PROBES = 16  # rows that tell one rule of padding from another
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The micro-batches of the whole training.

    Args:
        widths: padded length to the expected number of micro-batches, binned.
        longest: padded length of the longest one.
        median: median length of a sequence.
        longest_row: number of the row that makes it.
        padded: whether batches carry padding.
    """

    widths: Mapping[int, float]
    longest: int
    median: int
    longest_row: int
    padded: bool


def read_batches(
    dataloader: Any, *, batch_size: int, num_micro_steps: int, seed: int, grouped: bool = False
) -> Batches:
    """What `dataloader` will hand out.

    Lengths are read from the dataset; what the collator makes of them is found by collating a few
    rows of all lengths, with all random states put back.

    Args:
        num_micro_steps: micro-batches of the whole training.
        grouped: rows of similar length share a batch.

    Raises:
        ConfigError: no lengths to read, or a collator whose widths follow no known rule.
    """
    dataset = dataloader.dataset
    lengths = _row_lengths(dataset)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    padded_lengths = _padded_lengths(dataloader, lengths, order, batch_size)
    load = workload(
        TokenLengths(
            lengths={"train": tuple(padded_lengths)},
            max_length=max(padded_lengths),
            method="the trainer's own rows",
        ),
        batch_size=batch_size,
        collator="grouped" if grouped else "longest",
        seed=seed,
    )
    scale = num_micro_steps / sum(load.widths.values())
    varied = batch_size > 1 and len(set(lengths)) > 1
    return Batches(
        widths={width: count * scale for width, count in load.widths.items()},
        longest=load.longest,
        median=lengths[order[len(order) // 2]],
        longest_row=order[-1],
        padded=varied or any(a != b for a, b in zip(lengths, padded_lengths, strict=True)),
    )


def _row_lengths(dataset: Any) -> list[int]:
    """Tokens of every row.

    Raises:
        ConfigError: a stream, no rows, or rows without input_ids.
    """
    if not hasattr(dataset, "__len__"):
        raise ConfigError("the dataset is a stream, whose lengths nobody knows before it ends")
    if not len(dataset):
        raise ConfigError("the dataset has no rows")
    columns = getattr(dataset, "column_names", None)
    plain = getattr(dataset, "format", {}).get("type") != "custom"  # else rows are made on demand
    lengths: list[int] = []
    if columns is not None and plain and "input_ids" in columns:
        arrow = dataset.select_columns(["input_ids"]).with_format("arrow")
        for table in arrow.iter(batch_size=10_000):
            for chunk in table["input_ids"].chunks:
                lengths += chunk.value_lengths().to_pylist()
    else:
        for number in range(len(dataset)):
            row = dataset[number]
            if not isinstance(row, Mapping) or "input_ids" not in row:
                raise ConfigError(f"row {number} of the dataset has no input_ids to count")
            lengths.append(len(row["input_ids"]))
    return lengths


def _padded_lengths(
    dataloader: Any, lengths: Sequence[int], order: Sequence[int], batch_size: int
) -> list[int]:
    """Width that each row would give a batch that it is the longest of.

    Raises:
        ConfigError: the collator joins rows, or follows no rule that we know.
    """
    picked = [order[i * (len(order) - 1) // (_NUM_PROBES - 1)] for i in range(_NUM_PROBES)]
    with _random_states_kept():
        _collated_width(dataloader, order[-batch_size:])  # several rows stay several
        widths = {lengths[row]: _collated_width(dataloader, [row]) for row in dict.fromkeys(picked)}
    if all(width == length for length, width in widths.items()):
        return list(lengths)
    if len(set(widths.values())) == 1 and max(widths) <= min(widths.values()):
        return [min(widths.values())] * len(lengths)
    for multiple in _MULTIPLES:
        if all(width == _rounded_up(length, multiple) for length, width in widths.items()):
            return [_rounded_up(length, multiple) for length in lengths]
    length, width = max(widths.items())
    raise ConfigError(
        f"the collator makes {width} tokens of a row of {length}; padding to the longest, to a "
        "multiple or to one length is known"
    )


def _rounded_up(length: int, multiple: int) -> int:
    return multiple * math.ceil(length / multiple)


def _collated_width(dataloader: Any, rows: Sequence[int]) -> int:
    batch = dataloader.collate_fn([dataloader.dataset[row] for row in rows])
    ids = batch["input_ids"] if isinstance(batch, Mapping) else None
    shape = tuple(getattr(ids, "shape", ()))
    if len(shape) != 2 or shape[0] != len(rows):
        raise ConfigError(
            f"the collator makes input_ids of shape {shape} of {len(rows)} rows: joined rows "
            "(packing without padding) are not modelled"
        )
    return int(shape[1])


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Training goes on as if nothing had been drawn."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
