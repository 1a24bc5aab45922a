"""What a predicted run takes of money and electricity for as long as it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whichlora.serving import get_engine
from whichlora.spec.costs import Grid, Offer, RunningCost, cheapest
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.timing.model import power_w


def running_cost(
    prediction: Prediction, gpu: GpuSpec, offers: Sequence[Offer], grid: Grid | None
) -> RunningCost | None:
    """The price and the power of all GPUs of a run; None where its time is not known.

    Args:
        offers: prices of an hour of `gpu`.
    """
    time, run, serving = prediction.time, prediction.run, prediction.serving
    tokens_per_s = time.tokens_per_s
    breakdown = time.breakdown
    if serving is not None:
        served = serving.time
        tokens_per_s = math.nan if served is None else served.output_tokens_per_s
        breakdown = {} if served is None else served.step_parts_s
    if not tokens_per_s > 0:
        return None
    engine = get_engine(run.serving)
    gpus, stages = run.parallel.gpus * engine.num_gpus(run), engine.num_stages(run)
    power = power_w(gpu, run.product_dtype, breakdown)
    if power is not None and stages > 1:  # as many work at once as batches are under way
        at_once = min(stages, run.batch_size) if engine.fills_stages else 1
        if run.request_rate is not None:
            at_once = 1
        power = at_once / stages * power[0], power[1]
    return RunningCost(
        num_gpus=gpus,
        offer=cheapest(offers, gpus),
        spot=cheapest(offers, gpus, spot=True),
        power_w=None if power is None else (gpus * power[0], gpus * power[1]),
        grid=grid,
        tokens_per_s=tokens_per_s,
    )
