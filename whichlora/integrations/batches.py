"""A training dataloader → the widths of its batches, without taking a batch from it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whichlora.dataset import TokenLengths, workload
from whichlora.dataset.workload import are_padded
from whichlora.errors import ConfigError
from whichlora.trainers import Trainer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """How a trainer turns rows into sequences.

    Args:
        trainer: whose rows they are.
        longest: tokens to which its collator cuts a row; None cuts none.
        tokenizer: of prompts that it tokenizes as it goes.
        answered: tokens that it adds to each of these.
    """

    trainer: Trainer
    longest: int | None = None
    tokenizer: Any = None
    answered: int = 0


def read_batches(
    dataloader: Any,
    *,
    reader: RowReader,
    batch_size: int,
    num_micro_steps: int,
    seed: int,
    grouped: bool = False,
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
    lengths = _row_lengths(dataset, reader)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    padded_lengths = lengths
    if not reader.trainer.writes_answers:
        per_row = reader.trainer.rows_per_example
        padded_lengths = _padded_lengths(dataloader, lengths, order, batch_size, per_row)
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
    varied = are_padded(lengths, batch_size=batch_size, seq_len=max(lengths))
    return Batches(
        widths={width: count * scale for width, count in load.widths.items()},
        longest=load.longest,
        median=lengths[order[len(order) // 2]],
        longest_row=order[-1],
        padded=varied or any(a != b for a, b in zip(lengths, padded_lengths, strict=True)),
    )


def _row_lengths(dataset: Any, reader: RowReader) -> list[int]:
    """Tokens of every row, of the longer one of a pair.

    Raises:
        ConfigError: a stream, no rows, or rows without token ids.
    """
    if not hasattr(dataset, "__len__"):
        raise ConfigError("the dataset is a stream, whose lengths nobody knows before it ends")
    if not len(dataset):
        raise ConfigError("the dataset has no rows")
    if reader.trainer.writes_answers:
        rows = (dataset[number] for number in range(len(dataset)))
        return [_prompt_tokens(row, reader.tokenizer) + reader.answered for row in rows]
    columns = getattr(dataset, "column_names", None)
    plain = getattr(dataset, "format", {}).get("type") != "custom"  # else rows are made on demand
    counts = _token_columns(columns or (), reader.trainer) if plain else {}
    lengths: list[int] = []
    if counts:
        arrow = dataset.select_columns(list(counts)).with_format("arrow")
        for table in arrow.iter(batch_size=10_000):
            chunked = [
                [n for chunk in table[name].chunks for n in chunk.value_lengths().to_pylist()]
                for name in counts
            ]
            lengths += [
                _sequence_tokens(dict(zip(counts, row, strict=True)))
                for row in zip(*chunked, strict=True)
            ]
    else:
        for number in range(len(dataset)):
            row = dataset[number]
            named = _token_columns(row, reader.trainer) if isinstance(row, Mapping) else {}
            if not named:
                raise ConfigError(f"row {number} of the dataset has no input_ids to count")
            lengths.append(_sequence_tokens({name: len(row[name]) for name in named}))
    return [min(length, reader.longest or length) for length in lengths]


# Columns of token ids, as TRL's trainers and others name them; of one sequence together, of pairs
# the longer one counts
_WHOLE = (("input_ids",), ("chosen_input_ids", "rejected_input_ids"))
_AFTER_PROMPT = (("chosen_ids", "rejected_ids"), ("completion_ids",))
_PROMPT = "prompt_ids"
_OF_PREFERENCES = ("kl_input_ids", "KL_input_ids", "KL_completion_ids", "rejected_input_ids")


def _token_columns(columns: Iterable[str], trainer: Trainer) -> dict[str, None]:
    """Those of `columns` that a sequence is made of; empty for none.

    Raises:
        ConfigError: preferences, in a trainer that is known as one of texts.
    """
    known = set(columns)
    odd = sorted(known & set(_OF_PREFERENCES))
    if odd and trainer.rows == "texts":
        raise ConfigError(f"rows with {odd[0]} are those of preferences: its trainer is not known")
    for names in (*_WHOLE, *_AFTER_PROMPT):
        if set(names) <= known:
            joined = (_PROMPT,) if names in _AFTER_PROMPT and _PROMPT in known else ()
            return dict.fromkeys((*joined, *names))
    return {}


def _sequence_tokens(counts: Mapping[str, int]) -> int:
    """Of a row whose columns have so many tokens."""
    return counts.get(_PROMPT, 0) + max(n for name, n in counts.items() if name != _PROMPT)


def _prompt_tokens(row: Any, tokenizer: Any) -> int:
    """Of a prompt as text or as messages.

    Raises:
        ConfigError: there is none, or nothing that tokenizes it.
    """
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if tokenizer is None or not isinstance(prompt, str | list):
        raise ConfigError("rows have no prompt that the trainer's tokenizer could count")
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _padded_lengths(
    dataloader: Any, lengths: Sequence[int], order: Sequence[int], batch_size: int, per_row: int
) -> list[int]:
    """Width that each row would give a batch that it is the longest of.

    Args:
        per_row: sequences of a row.

    Raises:
        ConfigError: the collator joins rows, or follows no rule that we know.
    """
    picked = [order[i * (len(order) - 1) // (_NUM_PROBES - 1)] for i in range(_NUM_PROBES)]
    with _random_states_kept():
        _collated_width(dataloader, order[-batch_size:], per_row)  # several rows stay several
        widths = {
            lengths[row]: _collated_width(dataloader, [row], per_row)
            for row in dict.fromkeys(picked)
        }
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


def _collated_width(dataloader: Any, rows: Sequence[int], per_row: int) -> int:
    batch = dataloader.collate_fn([dataloader.dataset[row] for row in rows])
    made = batch if isinstance(batch, Mapping) else {}
    names = next((names for names in _WHOLE if set(names) <= set(made)), ())
    shapes = [tuple(getattr(made[name], "shape", ())) for name in names]
    if not shapes or any(len(shape) != 2 for shape in shapes):
        raise ConfigError(f"the collator makes no input_ids of rows and columns: {shapes}")
    if sum(shape[0] for shape in shapes) != len(rows) * per_row:
        raise ConfigError(
            f"the collator makes input_ids of shape {shapes[0]} of {len(rows)} rows: joined rows "
            "(packing without padding) are not modelled"
        )
    return max(int(shape[1]) for shape in shapes)


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
