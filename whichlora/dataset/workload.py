"""Batches → the workload of a candidate: widths, steps, tokens, the longest batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from whichlora.dataset.batching import batches, best_fit_decreasing
from whichlora.dataset.expected import binned
from whichlora.dataset.images import RowImages
from whichlora.dataset.lengths import TokenLengths
from whichlora.errors import ConfigError
from whichlora.spec.plan import Collator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from whichlora.trainers import Repeats

_ALTERNATIVE_Z = NormalDist().inv_cdf(0.95)  # 90 % of data sets lie between the alternatives
_MOST_SHUFFLES = 4  # epochs whose batches are drawn; the others are like them


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The batches that one candidate's training will see.

    Args:
        collator: how the batches were made.
        widths: padded length to the number of whole micro-batches over all epochs, binned; of
            those that several GPUs compute at once, that of the widest.
        longest: padded length of the longest batch, which decides the memory. Where lengths are
            assumed or estimated, its upper bound; `least_longest` is the lower one.
        is_padded: its batches carry padding.
        num_batches, num_steps: micro-batches of a GPU and optimizer steps of the whole training.
        real_tokens, padded_tokens: that it trains on, without and with padding.
        deviation: standard deviation of the logarithm of `padded_tokens`, where lengths are
            assumed or estimated.
        images: of the heaviest row, which memory and time take each row to have.
        target_len: tokens of the longest target, which they take each target to have; None where
            rows have none apart from what `widths` are of.
    """

    collator: Collator
    widths: Mapping[int, float]
    longest: int
    is_padded: bool
    num_batches: int
    num_steps: int
    real_tokens: int
    padded_tokens: int
    least_longest: int
    deviation: float = 0.0
    images: RowImages | None = None
    target_len: int | None = None

    @property
    def padding_fraction(self) -> float:
        """Share of the tokens computed that are padding."""
        return 1.0 - self.real_tokens / self.padded_tokens

    def profile_lengths(self, num_batches: int) -> tuple[int, ...]:
        """Widths to measure: the longest first, then quantiles that share the batches evenly."""
        others = (self._width_at((i + 0.5) / (num_batches - 1)) for i in range(num_batches - 1))
        return tuple(sorted((self.longest, *others), reverse=True))

    def further_lengths(self, num_batches: int) -> tuple[int, ...]:
        """Widths to measure after `profile_lengths`: any first few of them share the batches.

        They are quantiles at multiples of the golden ratio, modulo one, which lie evenly.
        """
        golden = (math.sqrt(5) - 1) / 2
        return tuple(self._width_at((i + 0.5) * golden % 1) for i in range(num_batches))

    def _width_at(self, quantile: float) -> int:
        """The width that this share of the batches does not exceed."""
        wanted, seen = quantile * sum(self.widths.values()), 0.0
        for width in sorted(self.widths):
            seen += self.widths[width]
            if seen >= wanted:
                break
        return width


def count_steps(num_batches: int, accumulation: int, epochs: float) -> tuple[int, int]:
    """Optimizer steps and micro-batches of the whole training.

    Kind: exact. Source: transformers 5.23, `Trainer.set_initial_training_values`: a last
    incomplete accumulation is a step of its own, and a part of an epoch is rounded up.
    """
    per_epoch = math.ceil(num_batches / accumulation)
    num_steps = math.ceil(epochs * per_epoch)
    whole, more = divmod(num_steps, per_epoch)
    return num_steps, whole * num_batches + min(num_batches, more * accumulation)


def workload(
    lengths: TokenLengths,
    *,
    batch_size: int,
    collator: Collator = "longest",
    seq_len: int | None = None,
    accumulation: int = 1,
    at_once: int = 1,
    epochs: float = 1.0,
    seed: int = 0,
    sequences: int = 1,
    repeats: Repeats | None = None,
) -> Workload:
    """The workload of training on `lengths` for `epochs`; widths are binned to few distinct values.

    Args:
        seq_len: rows are cut or padded to it, or filled up to it where they are packed; None is
            where the lengths were cut.
        at_once: micro-batches that GPUs compute at the same time.
        sequences: of each row; `batch_size` counts rows.
        repeats: how often a trainer comes back to the rows that it has written answers to;
            `batch_size` counts answers.

    Raises:
        ConfigError: too few tokens to pack, or too few rows to write answers to at once.
    """
    import numpy as np

    seq_len = lengths.max_length if seq_len is None else seq_len
    num_epochs, rows = min(_MOST_SHUFFLES, math.ceil(epochs)), lengths.lengths["train"]
    rows_at_once = batch_size
    if repeats is not None:
        rows_at_once = repeats.answers * at_once // repeats.per_row
        at_once = 1  # the rows of all GPUs are drawn together

    def draw_epoch(lengths: TokenLengths, epoch: int) -> NDArray[np.int64]:
        drawn = batches(
            lengths.lengths["train"],
            collator,
            batch_size=rows_at_once,
            seq_len=seq_len,
            accumulation=accumulation,
            seed=seed,
            epoch=epoch,
        )
        return drawn if repeats is None else _repeated(drawn, rows_at_once, batch_size, repeats)

    def draw(lengths: TokenLengths) -> NDArray[np.int64]:
        return np.concatenate([draw_epoch(lengths, epoch) for epoch in range(num_epochs)])

    table = draw(lengths)
    alternatives = [draw(alternative) for alternative in lengths.alternatives]
    slowest = _slowest(table, len(table) // num_epochs, at_once)
    drawn = len(slowest)
    per_epoch = drawn // num_epochs
    num_steps, num_batches = count_steps(per_epoch, accumulation, epochs)
    widths, sizes = slowest.T
    widest = int(widths.max())
    parts = _parts(sizes, batch_size, per_epoch=per_epoch)
    padded = float(table.prod(axis=1).sum()) * num_batches / drawn
    return Workload(
        collator=collator,
        widths=_binned(widths, parts * (num_batches / drawn)),
        longest=max(widest, min(lengths.longest(), seq_len)),
        is_padded=are_padded(rows, batch_size, seq_len, collator, sequences, repeats),
        num_batches=num_batches,
        num_steps=num_steps,
        real_tokens=round(
            _real_tokens(lengths, collator, seq_len)
            * (1 / per_epoch if repeats is None else batch_size / lengths.num_sequences())
            * num_batches
        ),
        padded_tokens=round(padded * sequences),
        least_longest=min(int(batch[:, 0].max()) for batch in (table, *alternatives)),
        deviation=_deviation(
            _mean_padded(lengths, table),
            list(map(_mean_padded, lengths.alternatives, alternatives)),
        ),
    )


def _repeated(
    drawn: NDArray[np.int64], rows: int, batch_size: int, repeats: Repeats
) -> NDArray[np.int64]:
    """The micro-batches that learn from answers to the rows of each of `drawn`.

    Kind: exact in number; widths are of answers that have their full length. Rows that are too few
    at the end of an epoch are left out.
    Source: TRL 1.16 `RepeatSampler` of trainer/utils.py.

    Raises:
        ConfigError: there are too few rows.
    """
    import numpy as np

    whole = drawn[drawn[:, 1] == rows]
    if not len(whole):
        raise ConfigError(
            f"dataset: has {int(drawn[:, 1].sum())} prompts, fewer than the {rows} that answers "
            "are written to at once; give more, or a smaller batch size"
        )
    whole[:, 1] = batch_size
    return np.repeat(whole, repeats.micro_batches, axis=0)


def _slowest(table: NDArray[np.int64], per_epoch: int, at_once: int) -> NDArray[np.int64]:
    """Of every `at_once` batches in a row the greatest width and size, for which all GPUs wait.

    Kind: estimate: the last ones of an epoch are filled up with its first.
    Source: accelerate 1.15 `BatchSamplerShard`, which gives each process one batch after the other.
    """
    import numpy as np

    if at_once == 1:
        return table
    starts = np.arange(0, len(table), per_epoch)[:, None] + np.arange(0, per_epoch, at_once)
    return np.asarray(np.maximum.reduceat(table, starts.ravel(), axis=0))


def evaluation_widths(
    lengths: TokenLengths, *, batch_size: int, collator: Collator, seq_len: int, at_once: int = 1
) -> dict[int, float]:
    """Padded length to the number of batches of one pass over the validation rows, binned.

    The rows come in their order. Rows that are too few to pack make no batch.

    Args:
        at_once: batches that GPUs compute at the same time.
    """
    import numpy as np

    rows = np.minimum(np.asarray(lengths.lengths.get("validation", ()), dtype=np.int64), seq_len)
    if collator == "packed":
        rows = np.full(lengths.total_tokens("validation") // seq_len, seq_len, dtype=np.int64)
    elif collator == "packed-bfd":
        rows = best_fit_decreasing(rows, seq_len)
    if not len(rows):
        return {}
    starts = np.arange(0, len(rows), batch_size)
    widths = np.maximum.reduceat(rows, starts)
    if collator == "fixed":
        widths = np.full_like(widths, seq_len)
    sizes = np.minimum(batch_size, len(rows) - starts)
    widths, sizes = _slowest(np.stack([widths, sizes], axis=1), len(starts), at_once).T
    return _binned(widths, _parts(sizes, batch_size, per_epoch=len(widths)))


def _parts(sizes: NDArray[np.int64], batch_size: int, *, per_epoch: int) -> NDArray[np.float64]:
    """Each batch as a fraction of a full one.

    The only batch of an epoch counts whole: its time hardly falls with its rows.
    """
    return sizes / (sizes if per_epoch == 1 else batch_size)


def _binned(widths: NDArray[np.int64], counts: NDArray[np.float64]) -> dict[int, float]:
    """`counts` by width, in few bins. An incomplete batch counts as a fraction."""
    import numpy as np

    distinct, place = np.unique(widths, return_inverse=True)
    summed = np.bincount(place.ravel(), weights=counts)
    return binned(dict(zip(distinct.tolist(), summed.tolist(), strict=True)))


def _mean_padded(lengths: TokenLengths, table: NDArray[np.int64]) -> float:
    """Padded tokens for each sequence of `lengths`, whose batches are `table`."""
    return float(table.prod(axis=1).sum()) / lengths.num_sequences()


def _deviation(tokens: float, alternatives: Sequence[float]) -> float:
    """Standard deviation of the log of a number of tokens; `alternatives` bound 90 % of it."""
    logs = (abs(math.log(alternative / tokens)) for alternative in alternatives)
    return max(logs, default=0.0) / _ALTERNATIVE_Z


def are_padded(
    lengths: Iterable[int],
    batch_size: int,
    seq_len: int,
    collator: Collator = "longest",
    sequences: int = 1,
    repeats: Repeats | None = None,
) -> bool:
    """Whether batches of rows of `lengths`, cut to `seq_len`, carry padding.

    A batch of one sequence has none, and its mask of ones is dropped. Answers that are written at
    once are padded to the longest of them.
    Source: transformers 5.23 `masking_utils._ignore_causal_mask_sdpa`.

    Args:
        batch_size, sequences, repeats: as of `workload`.
    """
    if collator == "packed":
        return False
    distinct = {min(length, seq_len) for length in lengths}
    if collator == "fixed":
        return distinct != {seq_len}
    together = batch_size * sequences if repeats is None else repeats.answers
    return together > 1 and len(distinct) > 1


def _real_tokens(lengths: TokenLengths, collator: Collator, seq_len: int) -> int:
    if collator == "packed":
        return lengths.total_tokens() // seq_len * seq_len
    others = sum(min(length, seq_len) for length in lengths.others.get("train", ()))
    return others + sum(min(length, seq_len) for length in lengths.lengths["train"])
