"""Which run to measure next, so that the others are known best: designed calibration.

V-optimal and greedy: of all runs, the one that takes most off the mean predictive variance of the
candidates per second of device time. What a run is worth depends on the features alone, not on
what it will measure, so the choice is made before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whichlora.timing import model as timing
from whichlora.timing.model import FEATURES, TimeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LEAST_GAIN = 0.005  # of the mean predictive variance; a run that buys less is not worth a start


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """One time that is predicted or measured.

    Args:
        features: of a step, a prompt pass or a decoding step, as `timing.features` gives them.
    """

    phase: str
    features: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Option:
    """A run that could be measured.

    Args:
        sights: the times it would show.
        cost_s: device time it would take.
    """

    predicted_times: tuple[PredictedTime, ...]
    cost_s: float


def relative_rows(model: TimeModel, predicted_times: Sequence[PredictedTime]) -> Array:
    """Deciding features over predicted seconds, [num_sights, num_features]."""
    import numpy as np

    rows = []
    for predicted_time in predicted_times:
        counted = timing.deciding(model, predicted_time.features)
        total, _ = timing.seconds(model, predicted_time.features)
        rows.append([counted[name] / float(total) for name in FEATURES])
    return np.array(rows, dtype=float).reshape(-1, len(FEATURES))


def choose(
    options: Sequence[Option],
    targets: Sequence[PredictedTime],
    models: Mapping[str, TimeModel],
    *,
    budget_s: float,
) -> int | None:
    """Position of the option to measure next; None where none fits the budget or buys anything.

    Args:
        targets: what is to be predicted, each as important as the others.
        models: by phase, as fitted to what was measured so far.
        budget_s: device time that is left.
    """
    import numpy as np

    before = 0.0
    worth = np.zeros(len(options))
    for phase, model in models.items():
        wanted = relative_rows(model, [one for one in targets if one.phase == phase])
        if not len(wanted):
            continue
        covariance = np.array(model.covariance)
        reach = wanted @ covariance
        before += float((reach * wanted).sum()) + len(wanted) * model.noise**2
        for i, option in enumerate(options):
            shown = relative_rows(
                model, [one for one in option.predicted_times if one.phase == phase]
            )
            if len(shown):
                error = model.noise**2 * np.eye(len(shown)) + shown @ covariance @ shown.T
                seen = reach @ shown.T
                worth[i] += float((seen @ np.linalg.inv(error) * seen).sum())
    cost = np.array([option.cost_s for option in options])
    usable = (cost <= budget_s) & (worth >= LEAST_GAIN * before) & (worth > 0)
    if not usable.any():
        return None
    return int(np.argmax(np.where(usable, worth / np.maximum(cost, 1e-9), -1.0)))
