"""What stated deviations are multiplied with, so that intervals hold of new runs what they state.

A score is the size of a held-out run's log error in stated deviations. Regimes
(`timing.regime_of`) have scales of their own: a time that the host decides errs otherwise than one
that products decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whichlora.calibration.regression import (
    PRIOR_WEIGHT,
    Array,
    conformal_scale,
    student_scale,
)

ENOUGH_HELD_OUT = 20  # scores whose quantile stands for that of a device or a regime
Scales = tuple[float, dict[str, float]]  # of all runs, and by regime


def scales_of_runs(scores: Array, regimes: Sequence[str], confidence: float) -> Scales:
    """Scales where each run is as likely as the next: of one device under one software.

    The quantile of the scores, and of those of a regime that has enough of them; others have that
    of all.

    Source: Lei et al. 2018, arXiv:1604.04173, section 5.2; by group: Vovk, Gammerman and Shafer
    2005, Algorithmic Learning in a Random World, section 4.5 (Mondrian conformal predictors).

    Args:
        regimes: of each score, of which there are `ENOUGH_HELD_OUT` at least.
    """
    by_regime = {}
    names = np.array(regimes)
    for name in sorted(set(regimes)):
        of_regime = scores[names == name]
        if len(of_regime) >= ENOUGH_HELD_OUT:
            by_regime[name] = _conformal(of_regime, confidence)
    return _conformal(scores, confidence), by_regime


def scales_of_groups(
    scores: Array, groups: Sequence[str], regimes: Sequence[str], confidence: float
) -> Scales:
    """Scales where runs of a group err alike and the next run is of a new group.

    However many runs a group has, it is one draw. Its variance is the mean square of its scores.
    The stated one, a square of 1, counts as `PRIOR_WEIGHT` groups beside them; for a regime that of
    all runs does, so that few groups move it little. What is left unknown makes the interval a
    Student's t, as where few runs told the noise (`regression.student_scale`).

    Source: Gelman et al. 2013, Bayesian Data Analysis, sections 3.3 (the predictive distribution
    of a normal whose variance has a scaled inverse chi-squared prior) and 5.4 (partial pooling).

    Args:
        groups, regimes: of each score.
    """
    pooled, scale = _of_groups(scores, groups, 1.0, confidence)
    names, labels = np.array(regimes), np.array(groups)
    by_regime = {}
    for name in sorted(set(regimes)):
        is_own = names == name
        _, by_regime[name] = _of_groups(scores[is_own], labels[is_own].tolist(), pooled, confidence)
    return scale, by_regime


def _conformal(scores: Array, confidence: float) -> float:
    scale = conformal_scale(scores, np.ones(len(scores)), confidence)
    assert scale is not None, "enough errors for the rank"
    return scale


def _of_groups(
    scores: Array, groups: Sequence[str], prior: float, confidence: float
) -> tuple[float, float]:
    """The pooled variance of scores, and the scale of its interval."""
    labels = np.array(groups)
    squares = [float(np.mean(scores[labels == name] ** 2)) for name in sorted(set(groups))]
    variance = (PRIOR_WEIGHT * prior + sum(squares)) / (PRIOR_WEIGHT + len(squares))
    return variance, variance**0.5 * student_scale(len(squares), confidence)
