"""Many candidates judged at once: what `prediction.predict` says of one run, for arrays of runs.

A block is everything that is one setting outside (model, method, stack, device) and arrays inside:
batch size, length and rank in fine-tuning; batch size, prompt and new tokens in inference. The
arrays broadcast, so that an open mesh (`numpy.ix_`) is counted along its axes where it can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whichlora.predict.coefficients import Calibration
from whichlora.predict.predict import judged_memory, judged_time, num_tokens
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import Count, Real

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrediction:
    """The numbers of `Prediction` for every run of a block, bytes and seconds as floats.

    Args:
        least_bytes: lower bound of live tensors and context: what a run cannot do without.
        time_s: one optimizer step; inference: one generated token.
    """

    peak_allocated_bytes: Array
    device_used_bytes: Array
    low_bytes: Array
    high_bytes: Array
    least_bytes: Array
    time_s: Array
    low_s: Array
    high_s: Array


def predict_block(
    job: ResolvedRun, calibration: Calibration, axes: Mapping[str, Count]
) -> BlockPrediction:
    """Judge every run of a block; equal to `prediction.predict` run by run.

    Args:
        axes: integer arrays that broadcast; what is not named has the value of `job.run`.
    """
    import numpy as np

    sizes = {name: np.asarray(values, dtype=np.float64) for name, values in axes.items()}
    shape = np.broadcast_shapes(*(values.shape for values in sizes.values()))

    def whole(values: Real) -> Array:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), shape)

    memory = judged_memory(job, calibration, **sizes)
    least, low, high = memory.bounds()
    time = judged_time(job, calibration, **sizes)
    low_s, high_s = time.interval()
    of_time = 1.0 if job.run.phase == "finetune" else num_tokens(job, **sizes)
    return BlockPrediction(
        peak_allocated_bytes=whole(memory.peak_allocated_bytes),
        device_used_bytes=whole(memory.device_used_bytes),
        low_bytes=whole(low),
        high_bytes=whole(high),
        least_bytes=whole(least),
        time_s=whole(time.total_s / of_time),
        low_s=whole(low_s / of_time),
        high_s=whole(high_s / of_time),
    )
