"""Every recorded run beside a prediction that did not see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from whichlora.calibration.database import chosen_gpus
from whichlora.calibration.formula_version import formulas_digest
from whichlora.calibration.load import calibration_roots, load_calibration, model_of
from whichlora.calibration.samples import Sample, groups_of, stack_of
from whichlora.errors import CalibrationError, WhichLoraError
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.words import describe
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement, MemoryPrediction, Prediction
from whichlora.store.measurements import read_measurements
from whichlora.terminal.words import times

CURRENT = "current versions"
Bounds = tuple[float, float]
Quantity = tuple[str, str, float, float, Bounds | None]  # name, unit, measured, predicted, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity of one record.

    Args:
        run: what ran, in words; `software`: who ran it, with versions other than the current ones.
        unit: "bytes" or "s".
        bounds: of the prediction, which hold with its `confidence`; None where none are stated.
    """

    gpu: str
    software: str
    run: str
    record: str
    quantity: str
    unit: str
    measured: float
    predicted: float
    bounds: Bounds | None
    confidence: float

    @property
    def error(self) -> float:
        """Relative; positive is predicted too high."""
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured value lies within the bounds."""
        return self.bounds is not None and self.bounds[0] <= self.measured <= self.bounds[1]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "inside": self.bounds and self.is_inside}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """All rows of one accelerator.

    Args:
        num_records: that were read, failures included.
        dates: of the first and the last.
        left_out: why a record has no row, by its id or its place.
        formulas: digest of the formulas that predict.
    """

    gpu: str
    rows: Sequence[Row]
    num_records: int
    dates: tuple[str, str]
    left_out: dict[str, str]
    formulas: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [row.to_dict() for row in self.rows]}


def accuracies(gpus: Sequence[str] = (), calibration_dir: Path | None = None) -> list[Accuracy]:
    """The accuracy on the accelerators called `gpus`, or on each that has records.

    Raises:
        ConfigError: an unknown accelerator, or the library that fits is not installed.
        CalibrationError: there are no records.
    """
    return [accuracy(gpu, calibration_dir) for gpu in chosen_gpus(gpus, calibration_dir)]


def accuracy(gpu: GpuSpec, calibration_dir: Path | None = None) -> Accuracy:
    """Every record of `gpu` beside a prediction by a fit to the others.

    What ran on the same software is left out with it, as a cross-validation of the fit does; of
    fewer than three kinds of software the same model, or the same run.

    Raises:
        CalibrationError: there is no record.
    """
    left_out: dict[str, str] = {}
    records = read_measurements(
        calibration_roots(calibration_dir), gpu.key, leave_out=left_out.__setitem__
    )
    if not records:
        raise CalibrationError(
            f"no record of {gpu.key} to compare; 'whichlora calibrate show' lists what there is"
        )
    stored = load_calibration(gpu, calibration_dir)
    rows: list[Row] = []
    for fitted, held_out in _folds(records, gpu):
        calibration = _with_intervals_of(stored, fitted, gpu)
        for record in held_out:
            try:
                rows += rows_of(record, gpu, calibration)
            except WhichLoraError as error:  # a model or settings that are not known here
                left_out[record.id] = str(error)
    return Accuracy(
        gpu=gpu.key,
        rows=rows,
        num_records=len(records),
        dates=(records[0].date[:10], records[-1].date[:10]),
        left_out=left_out,
        formulas=formulas_digest(),
    )


def _folds(
    records: Sequence[Measurement], gpu: GpuSpec
) -> Iterator[tuple[Calibration, list[Measurement]]]:
    """The fit to all records but some, and these, until each was left out once."""
    from whichlora.calibration.fit import fit
    from whichlora.calibration.regression import grouped_folds

    measured = [record for record in records if record.outcome == "ok"]
    groups = groups_of(
        [
            Sample(record.run.model, {}, 0.0, record.id, stack=stack_of(record))
            for record in measured
        ]
    )
    if len(set(groups)) < 2:
        yield prior_calibration(gpu), measured
        return
    for learned, held in grouped_folds(groups).split(measured, groups=groups):
        fitted = fit([measured[i] for i in learned], gpu, model_of, held_out=False)
        yield fitted, [measured[i] for i in held]


def _with_intervals_of(stored: Calibration, fitted: Calibration, gpu: GpuSpec) -> Calibration:
    """`fitted` with the noise of the stored fit, which is from left-out runs.

    To find it anew for each part of the records would take as many cross-validations. Phases that
    the datasheet predicts better are predicted by it.
    """
    priors = prior_calibration(gpu).time
    times = {
        phase: replace(
            priors[phase] if phase in stored.by_datasheet else model,
            noise=stored.time[phase].noise,
            interval_scale=stored.time[phase].interval_scale,
            regime_scales=stored.time[phase].regime_scales,
        )
        for phase, model in fitted.time.items()
    }
    memory = replace(fitted.memory, noise=stored.memory.noise)
    return replace(fitted, time=times, memory=memory)


def rows_of(record: Measurement, gpu: GpuSpec, calibration: Calibration) -> list[Row]:
    """What `record` measured beside what `calibration` predicts of it.

    Raises:
        ConfigError: an unknown model, or settings that exclude each other.
    """
    model, run, gpu = model_of(record), record.run, record.as_set(gpu)
    prediction = predict(model, run, gpu, calibration)
    widest = replace(run, seq_len=max(record.step_lengths, default=run.seq_len))
    timed = prediction if widest == run else predict(model, widest, gpu, calibration)
    software = stack_of(record) if run.libraries else CURRENT
    return [
        Row(
            gpu=gpu.key,
            software=software,
            run=describe(run),
            record=record.id,
            quantity=quantity,
            unit=unit,
            measured=measured,
            predicted=predicted,
            bounds=bounds,
            confidence=(prediction.memory if unit == "bytes" else prediction.time).confidence,
        )
        for quantity, unit, measured, predicted, bounds in (
            *_sizes(record, prediction.memory),
            *_seconds(record, timed),
        )
        if predicted > 0  # also no time, where none is known
    ]


def _sizes(record: Measurement, memory: MemoryPrediction) -> Iterator[Quantity]:
    """The counters that were read."""
    for name, measured, predicted, bounds in (
        (
            "peak allocated",
            record.peak_allocated_bytes,
            memory.peak_allocated_bytes,
            memory.allocated_interval_bytes,
        ),
        (
            "peak reserved",
            record.peak_reserved_bytes,
            memory.peak_reserved_bytes,
            memory.reserved_interval_bytes,
        ),
        (
            "used on the device",
            record.device_used_bytes,
            memory.device_used_bytes,
            memory.interval_bytes,
        ),
    ):
        if measured:
            yield name, "bytes", float(measured), float(predicted), bounds


def _seconds(record: Measurement, prediction: Prediction) -> Iterator[Quantity]:
    """The times that were measured; of a generation per token, as its interval is."""
    time = prediction.time
    for name, predicted, measured in times(prediction, record):
        yield name, "s", measured, predicted, time.interval_s if name == "step" else None
    if record.generate_s:
        measured = median(record.generate_s) / prediction.tokens_per_generation
        yield "generation, per token", "s", measured, time.time_per_token_s, time.interval_s
