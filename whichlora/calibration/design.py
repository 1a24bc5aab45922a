"""Greedy V-optimal design: which run to measure next for a calibration.

The chosen run reduces the mean predictive variance of the targets most per second of device time.
The variance depends on the features alone, not on the measured value, so the choice is made before
anything runs.
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

# Of the mean predictive variance; a run that reduces it less is not worth a start.
LEAST_GAIN = 0.005


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
        predicted_times: the times that it would measure.
        cost_s: device time it would take.
    """

    predicted_times: tuple[PredictedTime, ...]
    cost_s: float


def relative_rows(model: TimeModel, predicted_times: Sequence[PredictedTime]) -> Array:
    """Deciding features over predicted seconds, [num_times, num_features]."""
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
    """Position of the option to measure next, None if no option fits the budget or gains enough.

    Args:
        targets: the times to predict, all of equal weight.
        models: by phase, fitted to the measurements so far.
        budget_s: remaining device time.
    """
    import numpy as np

    before = 0.0
    worth = np.zeros(len(options))
    for phase, model in models.items():
        target_rows = relative_rows(model, [time for time in targets if time.phase == phase])
        if not len(target_rows):
            continue
        covariance = np.array(model.covariance)
        projected = target_rows @ covariance
        before += float((projected * target_rows).sum()) + len(target_rows) * model.noise**2
        for i, option in enumerate(options):
            option_rows = relative_rows(
                model, [time for time in option.predicted_times if time.phase == phase]
            )
            if len(option_rows):
                error = (
                    model.noise**2 * np.eye(len(option_rows))
                    + option_rows @ covariance @ option_rows.T
                )
                cross = projected @ option_rows.T
                worth[i] += float((cross @ np.linalg.inv(error) * cross).sum())
    cost = np.array([option.cost_s for option in options])
    usable = (cost <= budget_s) & (worth >= LEAST_GAIN * before) & (worth > 0)
    if not usable.any():
        return None
    return int(np.argmax(np.where(usable, worth / np.maximum(cost, 1e-9), -1.0)))
