"""A profile of a few batches → seconds of the whole training, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.repeated_times import REPEATABILITY, batch_variance, log_ratios
from whichlora.search.feasibility import Quantity
from whichlora.spec.numeric import TWO_SIDED_Z

# What a first step takes beyond the others, or evaluations take, may differ by this. Kind: estimate
WARM_UP_REACH = 2.0


def profiled_total(
    steps: Mapping[int, float],
    predicted_s: Mapping[int, float],
    profile: Sequence[tuple[int, float]],
    *,
    warm_up_s: float = 0.0,
    evaluation_s: float = 0.0,
    deviation: float = 0.0,
    repeatability: float = REPEATABILITY,
) -> Quantity:
    """Predicted step times over all widths, scaled to those measured, and the warm-up.

    The interval holds three errors: run-to-run noise, the scatter of the profiled steps around
    their common factor, and an error of the same size for each width that was not measured.

    Args:
        steps: optimizer steps by padded length.
        predicted_s: seconds of one step, by padded length, those profiled among them.
        profile: padded length and seconds of each step that was timed.
        evaluation_s: predicted seconds of all evaluations, which a profile does not measure.
        warm_up_s: seconds of the profile's first step, at its longest length; 0 is not recorded.
        deviation: standard deviation of the logarithm of the work, where lengths are assumed.
        repeatability: standard deviation of the logarithm of a run's time when it is repeated.
    """
    scale = sum(step_s for _, step_s in profile) / sum(predicted_s[width] for width, _ in profile)
    by_width = {width: count * scale * predicted_s[width] for width, count in steps.items()}
    steady = sum(by_width.values())
    errors = log_ratios([step_s for _, step_s in profile], [predicted_s[w] for w, _ in profile])
    scatter = batch_variance(errors)
    measured = {width for width, _ in profile}
    shares = (by_width[width] / steady for width in steps if width not in measured)
    variance = (
        deviation**2
        + repeatability**2
        + scatter * (1 / len(errors) + sum(share * share for share in shares))
    )
    reach = math.exp(TWO_SIDED_Z[TIME_CONFIDENCE] * math.sqrt(variance))
    more = max(0.0, warm_up_s - scale * predicted_s[max(measured)]) + evaluation_s
    return Quantity(
        value=steady + more,
        low=steady / reach + more / WARM_UP_REACH,
        high=steady * reach + more * WARM_UP_REACH,
        measured=True,
        confidence=TIME_CONFIDENCE,
    )
