"""Where something beside the steps of a training, such as evaluations, decides whether it fits."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import Calibration
from whichlora.predict.evaluation_and_saving import evaluation_of_ranks
from whichlora.predict.life import life_of
from whichlora.predict.predict import verdict
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.life import LifeConfig
from whichlora.spec.results import EvaluationMemory, Prediction, Verdict
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes

_EVALUATION = "evaluating"
_ORDER: tuple[Verdict, ...] = ("fits", "undecided", "fails")


def with_evaluation(
    prediction: Prediction, model: ModelSpec, gpu: GpuSpec, calibration: Calibration, rows: int
) -> Prediction:
    """`prediction`, whose verdict counts evaluations of `rows` rows, with a note of them."""
    if not _reads_more(prediction.run, rows):
        return prediction
    known = _evaluating(prediction.run, model, gpu, calibration, rows)
    if known is None:
        return with_uncounted(prediction, rows)
    most, fits = known
    if most.device_used_bytes <= prediction.memory.device_used_bytes:
        note = f"{_read(prediction.run, rows)}; the verdict counts it"
        return replace(prediction, notes=(*prediction.notes, note))
    note = (
        f"evaluation decides: {rows} rows at once take {format_bytes(most.device_used_bytes)} of "
        f"the device, training {format_bytes(prediction.memory.device_used_bytes)}"
    )
    return replace(
        prediction,
        verdict=max(prediction.verdict, fits, key=_ORDER.index),
        fits=prediction.fits and fits == "fits",
        evaluation=most,
        notes=(*prediction.notes, note),
    )


def with_uncounted(prediction: Prediction, rows: int) -> Prediction:
    """`prediction` with the note of `uncounted`."""
    return replace(prediction, notes=(*prediction.notes, *uncounted(prediction.run, rows)))


def at_least(prediction: Prediction) -> Prediction:
    """`prediction` of a run that takes more than is counted, which so never surely fits."""
    ways = tuple(replace(way, is_lower_bound=True) for way in prediction.ways_out)
    if prediction.verdict != "fits":
        return replace(prediction, ways_out=ways)
    return replace(prediction, verdict="undecided", fits=False)


def uncounted(run: RunConfig, rows: int) -> tuple[str, ...]:
    """A note where evaluations read more rows at once than `run`, and nobody counts them."""
    return (f"{_read(run, rows)}, which is not counted here",) if _reads_more(run, rows) else ()


def _reads_more(run: RunConfig, rows: int) -> bool:
    return run.phase == "finetune" and rows > run.batch_size


def _read(run: RunConfig, rows: int) -> str:
    return f"evaluation reads {rows} rows at once, training {run.batch_size}"


def _evaluating(
    run: RunConfig, model: ModelSpec, gpu: GpuSpec, calibration: Calibration, rows: int
) -> tuple[EvaluationMemory, Verdict] | None:
    """What evaluations of `rows` rows take, and whether they fit; None where it is not known."""
    run = replace(run, batch_size=rows)
    with contextlib.suppress(ConfigError):
        if not run.parallel.is_one_device:
            judged = evaluation_of_ranks(resolve(model, run, gpu), calibration)
            least, low, high = (int(bound) for bound in judged.bounds())
            used = int(judged.device_used_bytes)
            return _memory(rows, used, (low, high)), verdict(least, high, gpu.memory_bytes)
        lived = life_of(model, run, gpu, calibration, LifeConfig())
        for stage in lived.stages:
            if stage.name == _EVALUATION:
                return _memory(rows, stage.device_used_bytes, stage.interval_bytes), stage.verdict
    return None


def _memory(rows: int, used: int, interval: tuple[int, int]) -> EvaluationMemory:
    return EvaluationMemory(batch_size=rows, device_used_bytes=used, interval_bytes=interval)
