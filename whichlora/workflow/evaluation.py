"""Where evaluations of a training, and not its steps, decide whether it fits."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import Calibration
from whichlora.predict.life import life_of
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.life import LifeConfig
from whichlora.spec.results import Prediction, Verdict
from whichlora.units import format_bytes

_EVALUATION = "evaluating"
_ORDER: tuple[Verdict, ...] = ("fits", "undecided", "fails")


def with_evaluation(
    prediction: Prediction, model: ModelSpec, gpu: GpuSpec, calibration: Calibration, rows: int
) -> Prediction:
    """`prediction`, whose verdict counts evaluations of `rows` rows, with a note where they decide.

    They are known of one GPU.
    """
    run = prediction.run
    if rows <= run.batch_size or run.phase != "finetune" or not run.parallel.is_one_device:
        return prediction
    with contextlib.suppress(ConfigError):
        lived = life_of(model, replace(run, batch_size=rows), gpu, calibration, LifeConfig())
        stages = {stage.name: stage for stage in lived.stages}
        if _EVALUATION in stages:
            most = stages[_EVALUATION]
            if most.device_used_bytes <= prediction.memory.device_used_bytes:
                return prediction
            needs = format_bytes(most.device_used_bytes)
            note = (
                f"evaluation decides: {rows} rows at once take {needs} of the device, training "
                f"{format_bytes(prediction.memory.device_used_bytes)} "
                "(per_device_eval_batch_size)"
            )
            worst = max(prediction.verdict, most.verdict, key=_ORDER.index)
            return replace(prediction, verdict=worst, notes=(note, *prediction.notes))
    return prediction
