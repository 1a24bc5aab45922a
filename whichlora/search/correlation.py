"""Residual correlation: how the errors that coefficients do not explain go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whichlora.predict.resolve import ResolvedRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Shares of the residual variance that two runs have in common: those of the same model, of the same
# method, of both, and of equal settings. The last two fall with every doubling of the batch size.
# Kind: fitted, `benchmarks/search shares`, which cannot tell the last two apart. The fall with
# every doubling of the rank is an estimate.
MODEL_SHARE, METHOD_SHARE, VARIANT_SHARE, SETTINGS_SHARE = 0.27, 0.02, 0.52, 0.17
CORRELATION_PER_DOUBLING, CORRELATION_PER_RANK_DOUBLING = 0.43, 0.9

# Settings in which two runs of one method may differ.
_ANY: dict[str, Any] = {
    "model": "any",
    "batch_size": 1,
    "seq_len": 1,
    "r": 1,
    "lora_alpha": 1,
    "prompt_len": 1,
    "max_new_tokens": 1,
    "padding": "none",
}


def residual_correlation(jobs: Sequence[ResolvedRun]) -> Array:
    """Correlation of the residuals of every two candidates, shape [num_jobs, num_jobs]."""
    import numpy as np

    model = _codes([job.run.model for job in jobs])
    method = _codes([(job.run.phase, job.run.method) for job in jobs])
    settings = _codes([replace(job.run, **_ANY) for job in jobs])
    phase = _codes([job.run.phase for job in jobs])
    doublings = np.log2([job.run.batch_size for job in jobs])
    same_phase = phase[:, None] == phase
    same_model = (model[:, None] == model) & same_phase
    same_method = (method[:, None] == method) & same_phase
    closeness = CORRELATION_PER_DOUBLING ** np.abs(doublings[:, None] - doublings)
    rank = np.log2([job.run.r for job in jobs])
    closeness = closeness * CORRELATION_PER_RANK_DOUBLING ** np.abs(rank[:, None] - rank)
    shares = (
        MODEL_SHARE * same_model
        + METHOD_SHARE * same_method
        + VARIANT_SHARE * (same_model & same_method) * closeness
        + SETTINGS_SHARE * (same_model & (settings[:, None] == settings)) * closeness
    )
    np.fill_diagonal(shares, 1.0)
    return np.asarray(shares)


def _codes(values: Sequence[object]) -> NDArray[np.int64]:
    import numpy as np

    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])
