"""`calibrate contribute`: this user's records, without what tells of the user, to be reviewed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whichlora.calibration.database import chosen_gpus, judge
from whichlora.calibration.load import calibration_roots, load_calibration
from whichlora.calibration.share.contribution import (
    NotPublicError,
    public_record,
    require_public_model,
)
from whichlora.calibration.share.union import packed
from whichlora.errors import CalibrationError, ConfigError, DataFileError, WhichLoraError
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.store.jsonfiles import write_bytes
from whichlora.store.measurements import read_measurements, record_ids
from whichlora.store.models import find_model
from whichlora.store.paths import data_folder
from whichlora.terminal import as_markdown, contribution_document
from whichlora.workflow.accuracy import Row, rows_of

REPORT = "REPORT.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What was written, and what not.

    Args:
        records: by accelerator.
        rows: the records beside what this release predicts.
        left_out: why, and how many records.
        known: records that the shipped database has already.
    """

    folder: Path
    records: Mapping[str, Sequence[Measurement]]
    rows: Sequence[Row]
    left_out: Mapping[str, int]
    known: int

    @property
    def num_records(self) -> int:
        return sum(map(len, self.records.values()))


def contribute(
    folder: Path, gpus: Sequence[str] = (), calibration_dir: Path | None = None
) -> Contribution:
    """Write to `folder` the records of this user that may be published, and a report on them.

    Raises:
        ConfigError: `folder` holds something, or an unknown accelerator.
        CalibrationError: no record may be published.
        DataFileError: `folder` can't be written.
    """
    _require_empty(folder)
    roots = calibration_roots(calibration_dir)
    impossible = judge()
    records: dict[str, list[Measurement]] = {}
    left_out: Counter[str] = Counter()
    num_shipped = 0
    for gpu in chosen_gpus(gpus, calibration_dir):
        unread: dict[str, str] = {}
        shipped = record_ids(roots[1:], gpu.key)
        measured = read_measurements(roots[:1], gpu.key, leave_out=unread.__setitem__)
        left_out["can't be read"] += len(unread)
        for record in measured:
            if record.id in shipped:
                num_shipped += 1
                continue
            try:
                public = _public(record, gpu, impossible(record))
            except NotPublicError as error:
                left_out[str(error)] += 1
                continue
            except WhichLoraError:  # whose message may quote the record
                left_out["this release can't predict it"] += 1
                continue
            if public.id in shipped:
                num_shipped += 1
            else:
                records.setdefault(gpu.key, []).append(public)
    rows = [
        row
        for key, of_gpu in records.items()
        for row in _beside_predictions(of_gpu, folder, key, calibration_dir)
    ]
    contribution = Contribution(
        folder=folder, records=records, rows=rows, left_out=+left_out, known=num_shipped
    )
    if not (records or contribution.left_out or num_shipped):
        raise CalibrationError(f"no run was recorded yet in {roots[0]}; nothing to contribute")
    if not records:
        reasons = ", ".join(f"{why} ({count})" for why, count in contribution.left_out.items())
        raise CalibrationError(
            f"{roots[0]}: no record to contribute: {num_shipped} are in the shipped database"
            + (f"; left out: {reasons}" if reasons else "")
        )
    for key, of_gpu in records.items():
        name, data = packed(sorted(of_gpu, key=lambda record: record.id))
        write_bytes(folder / key / "measurements" / name, data)
    report = as_markdown(contribution_document(contribution))
    write_bytes(folder / REPORT, report.encode())
    return contribution


def _require_empty(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; name a new folder for the contribution")
    except OSError as error:
        raise DataFileError(f"{folder}: can't be read ({error.strerror})") from None


def _public(record: Measurement, gpu: GpuSpec, fault: str) -> Measurement:
    """`record` as it may be published.

    Raises:
        NotPublicError: it may not, or can't be true.
        WhichLoraError: this release does not know its settings.
    """
    if not (data_folder("calibration") / gpu.key / "gpu.json").is_file():
        raise NotPublicError("its device is not in the shipped catalog")
    if fault:
        raise NotPublicError(f"can't be true: {fault}")
    model = require_public_model(record, find_model(str(record.config.get("model", ""))))
    return public_record(record, model, gpu)


def _beside_predictions(
    records: Sequence[Measurement], folder: Path, key: str, calibration_dir: Path | None
) -> list[Row]:
    """What this release predicts of `records`, without the user's own coefficients."""
    (gpu,) = chosen_gpus([key], calibration_dir)
    calibration = load_calibration(gpu, folder)
    return [
        row
        for record in records
        if record.outcome == "ok"
        for row in rows_of(record, gpu, calibration)
    ]
