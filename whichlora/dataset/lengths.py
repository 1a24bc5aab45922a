"""Token lengths → the batches and steps that a Trainer makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from whichlora.dataset.base import Split
from whichlora.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """Tokens of every sequence after truncation, and how they were counted.

    Args:
        lengths: split to lengths, in the order of the rows.
        max_length: where longer sequences were cut.
        num_truncated: sequences that were cut, over all splits.
        num_empty: rows left out because they have no text, over all splits.
        method: "tokenizer <name>", "bytes", or how the lengths were estimated and why.

    Raises:
        ConfigError: no sequence to train on.
    """

    lengths: Mapping[str, tuple[int, ...]]
    max_length: int
    num_truncated: int = 0
    num_empty: int = 0
    method: str

    def __post_init__(self) -> None:
        if not self.lengths.get("train"):
            raise ConfigError("dataset: has no text in its split train; give at least one row")

    def num_sequences(self, split: Split = "train") -> int:
        return len(self.lengths.get(split, ()))

    def total_tokens(self, split: Split = "train") -> int:
        """Tokens of one pass over `split`, padding left out."""
        return sum(self.lengths.get(split, ()))

    def mean(self, split: Split = "train") -> float:
        return self.total_tokens(split) / self.num_sequences(split)

    def longest(self, split: Split = "train") -> int:
        return max(self.lengths[split])

    def quantile(self, fraction: float, split: Split = "train") -> int:
        """The smallest length that `fraction` of the sequences do not exceed."""
        ordered = sorted(self.lengths[split])
        return ordered[max(math.ceil(fraction * len(ordered)), 1) - 1]

    def batches(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int = 0,
        drop_last: bool = False,
        padding: Literal["longest", "max_length"] = "longest",
    ) -> NDArray[np.int64]:
        """Padded length and number of sequences of each training batch, [num_batches, 2].

        What the Trainer's random sampler and a padding collator make of the data: a shuffle of
        its own per epoch, and the longest sequence of a batch sets its width. The shuffle is
        NumPy's, so the batches follow the same distribution, not the very order of torch.
        """
        import numpy as np

        lengths = np.asarray(self.lengths["train"], dtype=np.int64)
        shuffled = np.random.default_rng((seed, epoch)).permutation(lengths)
        starts = np.arange(0, len(shuffled), batch_size)
        widths = np.maximum.reduceat(shuffled, starts)
        sizes = np.minimum(batch_size, len(shuffled) - starts)
        if padding == "max_length":
            widths = np.full_like(widths, self.max_length)
        table = np.stack((widths, sizes), axis=1)
        return table[sizes == batch_size] if drop_last else table

    def num_steps(self, batch_size: int, accumulation: int, epochs: float) -> int:
        """Optimizer steps of the whole training.

        Kind: exact. Source: transformers 5.23, `Trainer.set_initial_training_values`: a last
        incomplete accumulation is a step of its own, and a part of an epoch is rounded up.
        """
        num_batches = math.ceil(self.num_sequences() / batch_size)
        return math.ceil(epochs * math.ceil(num_batches / accumulation))
