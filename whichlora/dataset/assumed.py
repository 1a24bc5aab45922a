"""Assumed token lengths where only the size of the data is known, from public instruction data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist, median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RELATIVE_DEVIATIONS: Mapping[str, float] = {
    "openai/grade-school-math, train": 0.396,
    "teknium1/GPTeacher, codegen": 0.424,
    "teknium1/GPTeacher, roleplay": 0.281,
    "teknium1/GPTeacher, toolformer": 0.252,
    "hiyouga/LLaMA-Factory, alpaca_en_demo": 0.842,
    "hiyouga/LLaMA-Factory, alpaca_zh_demo": 0.668,
    "hiyouga/LLaMA-Factory, glaive_toolcall_en_demo": 1.104,
    "hiyouga/LLaMA-Factory, v1_sft_demo": 0.933,
    "hiyouga/LLaMA-Factory, dpo_en_demo": 0.826,
    "hiyouga/LLaMA-Factory, dpo_zh_demo": 0.666,
    "hiyouga/LLaMA-Factory, kto_en_demo": 0.973,
    "anthropics/hh-rlhf, harmless-base test": 0.835,
    "bigcode-project/octopack, oasst": 0.643,
    "yizhongw/self-instruct, user-oriented": 0.957,
    "yizhongw/self-instruct, seed tasks": 1.286,
    "MaziyarPanahi/Llama-Nemotron-Post-Training-Dataset-v1-ShareGPT": 1.246,
}
"""Standard deviation of the lengths of public instruction data over their mean.

Kind: measured, in bytes, which tokens are proportional to; the last one published, in tokens.
Source: `benchmarks/public_lengths.py` over the named repositories on GitHub; the data set card on
the Hugging Face hub (mean 528.10, standard deviation 657.89).
"""


def spreads(relative_deviations: Iterable[float]) -> tuple[float, float, float]:
    """Standard deviations of the logarithm: the median, and the bounds of the middle 90 %.

    Kind: exact of a log-normal. Source: its squared deviation over its mean is exp(s²) - 1.
    """
    shapes = [math.sqrt(math.log1p(ratio**2)) for ratio in relative_deviations]
    narrow, *_, wide = quantiles(shapes, n=20, method="inclusive")
    return median(shapes), narrow, wide


TYPICAL, NARROW, WIDE = spreads(RELATIVE_DEVIATIONS.values())

_MOST_DISTINCT = 10_000  # quantiles; more samples repeat them


def lengths_of(
    num_samples: int, mean_tokens: float, *, spread: float, max_length: int
) -> NDArray[np.int64]:
    """Lengths of `num_samples` sequences, log-normal around their mean, in random order.

    Before the longest are cut they add up to `num_samples * mean_tokens`.
    Kind: fitted. Source: the logarithm of the lengths of `RELATIVE_DEVIATIONS` is skewed by -1.1
    to 1.0, in the median -0.2: nearly symmetric, as that of a normal distribution.

    Args:
        spread: standard deviation of the logarithm, such as `TYPICAL`.
        max_length: longer ones are cut to it.
    """
    import numpy as np

    distinct = min(num_samples, _MOST_DISTINCT)
    normal = NormalDist()
    logs = [normal.inv_cdf((i + 0.5) / distinct) for i in range(distinct)]
    shape = np.exp(spread * np.array(logs))
    exact = np.resize(shape, num_samples)  # repeats them until there are enough
    exact *= num_samples * mean_tokens / exact.sum()
    exact = np.random.default_rng(0).permutation(exact)
    ends = np.rint(np.cumsum(exact)).astype(np.int64)  # rounding carries over, so nothing is lost
    return np.asarray(np.clip(np.diff(ends, prepend=0), 1, max_length), dtype=np.int64)
