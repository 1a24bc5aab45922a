"""Token lengths → how often each padded length comes, on average over all shuffles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from whichlora.spec.numeric import ceil_div

WIDTH_BINS = 16  # distinct batch widths that the total time is summed over
_MOST_FACTORS = 16  # of a product; beyond, gamma functions are quicker, and good to 9 digits


def expected_widths(
    lengths: Mapping[int, int], *, batch_size: int, at_once: int = 1
) -> dict[int, float]:
    """Padded length to the mean number of whole micro-batches of one epoch.

    Of those that `at_once` GPUs compute together, the widest counts, for which the others wait.
    An incomplete batch counts as its share of a whole one, as in `workload`.
    Kind: exact mean over the shuffles that `workload` draws from, collator "longest"; it needs no
    random numbers. Source: of n rows in a random order, the longest of g is among the k shortest
    with the probability C(k, g) / C(n, g).

    Args:
        lengths: tokens to the number of rows.
    """
    num_rows = sum(lengths.values())
    together = batch_size * at_once
    whole, rest = divmod(num_rows, together)
    groups = [(together, float(whole))] if whole else []
    if rest:
        share = 1.0 if not whole else min(batch_size, rest) / batch_size
        groups.append((rest, share))
    widths: Counter[int] = Counter()
    for size, number in groups:
        below, seen = 0.0, 0
        for length in sorted(lengths):
            seen += lengths[length]
            upto = _all_among(seen, num_rows, size)
            if upto > below:
                widths[length] += number * (upto - below)  # type: ignore[assignment]
            below = upto
    return dict(widths)


def _all_among(some: int, num_rows: int, size: int) -> float:
    """The chance that `size` of `num_rows` are all among `some` of them."""
    if some < size:
        return 0.0
    if some == num_rows:
        return 1.0
    if size <= _MOST_FACTORS:
        return math.prod((some - i) / (num_rows - i) for i in range(size))

    def log_ways(number: int) -> float:
        return math.lgamma(number + 1) - math.lgamma(number - size + 1)

    return math.exp(log_ways(some) - log_ways(num_rows))


def binned(widths: Mapping[int, float]) -> dict[int, float]:
    """`widths` in few bins, each at its mean width, which preserves the number of tokens."""
    size = max(1, ceil_div(max(widths), WIDTH_BINS))
    bins: dict[int, list[tuple[int, float]]] = {}
    for width in sorted(widths):
        bins.setdefault(width // size, []).append((width, widths[width]))
    summed: dict[int, float] = {}
    for pairs in bins.values():
        number = sum(each for _, each in pairs)
        mean = max(1, round(sum(width * each for width, each in pairs) / number))
        summed[mean] = summed.get(mean, 0.0) + number
    return summed
