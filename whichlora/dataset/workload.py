"""Token lengths → the batches that one candidate's training will see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.dataset.lengths import TokenLengths

WIDTH_BINS = 16  # distinct batch widths that the total time is summed over


@dataclass(frozen=True, slots=True)
class Workload:
    """The batches that one candidate's training will see.

    Args:
        widths: padded length to the number of micro-batches over all epochs, binned.
        longest: padded length of the longest batch: what memory is judged on.
        varied: batches hold sequences of different lengths, so that they carry padding.
    """

    widths: Mapping[int, float]
    longest: int
    varied: bool

    def profile_lengths(self, num_batches: int) -> tuple[int, ...]:
        """Widths to measure: the longest first, then quantiles that share the batches evenly."""
        ordered = sorted(self.widths)
        total = sum(self.widths.values())
        chosen = [self.longest]
        for i in range(num_batches - 1):
            wanted, seen = (i + 0.5) / (num_batches - 1) * total, 0.0
            for width in ordered:
                seen += self.widths[width]
                if seen >= wanted:
                    chosen.append(width)
                    break
        return tuple(sorted(chosen, reverse=True))


def workload(lengths: TokenLengths, *, batch_size: int, epochs: float, seed: int) -> Workload:
    """Batches of `epochs` passes over the data, widths binned to few distinct values."""
    table = lengths.batches(batch_size, seed=seed)
    counts = Counter(table[:, 0].tolist())
    longest = min(lengths.max_length, lengths.longest())
    step = max(1, -(-longest // WIDTH_BINS))
    # the mean width of a bin stands for it, so that the tokens stay what they are
    sums: dict[int, tuple[float, int]] = {}
    for width, count in counts.items():
        tokens, seen = sums.get(width // step, (0.0, 0))
        sums[width // step] = (tokens + width * count, seen + count)
    widths: dict[int, float] = {}
    for tokens, seen in sums.values():
        mean = max(1, round(tokens / seen))
        widths[mean] = widths.get(mean, 0.0) + seen * epochs
    varied = batch_size > 1 and len(set(lengths.lengths["train"])) > 1
    return Workload(widths=widths, longest=longest, varied=varied)
