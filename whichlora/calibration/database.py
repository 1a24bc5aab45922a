"""What a Python user calls to fit, inspect, exchange and merge calibration databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.calibration.load import (
    calibration_roots,
    load_calibration,
    model_of,
    refit,
    stale_note,
)
from whichlora.calibration.share import remote
from whichlora.calibration.share.physics import impossible
from whichlora.calibration.share.table import format_table, read_table
from whichlora.calibration.share.union import Merged, Source, add, gpus_with_records, read_source
from whichlora.errors import CalibrationError, ConfigError, DataFileError, WhichLoraError
from whichlora.predict.coefficients import Calibration
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.store.coefficients import read_coefficients
from whichlora.store.gpus import each_once, find_gpu
from whichlora.store.host import Host, now, write_host
from whichlora.store.hub import load_model
from whichlora.store.jsonfiles import write_bytes
from whichlora.store.measurements import read_measurements, read_records, record_files
from whichlora.store.models import find_model
from whichlora.store.record import encode_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Coefficients before and after a fit; `before` is None for the first one."""

    before: Calibration | None
    after: Calibration

    def to_dict(self) -> dict[str, Any]:
        before = None if self.before is None else self.before.to_dict()
        return {"before": before, "after": self.after.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The calibration of one device and the origin of its records.

    Args:
        outcomes: number of records by how they ended.
        sources: number of records by who measured, or which table or run they are from.
        dates: of the first and the last record.
        versions: library versions of all records, and how many have each.
        stale: why the coefficients are not those of the records; empty where they are.
    """

    calibration: Calibration
    outcomes: Mapping[str, int]
    sources: Mapping[str, int]
    dates: tuple[str, str] | None
    versions: Mapping[str, int]
    stale: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "calibration": self.calibration.to_dict(),
            "outcomes": dict(self.outcomes),
            "sources": dict(self.sources),
            "dates": self.dates,
            "versions": dict(self.versions),
            "stale": self.stale.removeprefix("; "),
        }


def calibrated_gpus(calibration_dir: Path | None = None) -> list[str]:
    """Keys of the devices that somebody measured on.

    Raises:
        CalibrationError: there is none.
    """
    roots = calibration_roots(calibration_dir)
    keys = gpus_with_records(roots)
    if not keys:
        raise CalibrationError(
            f"no run was recorded yet in {roots[0]}; measure some with 'whichlora run', or add "
            "some with 'whichlora calibrate import', 'merge' or 'pull'"
        )
    return keys


def calibrate(gpu: GpuSpec, calibration_dir: Path | None = None) -> Refit:
    """Refit the predictors of `gpu`, and keep what they were to compare.

    Raises:
        CalibrationError: no record of it.
        DataFileError: a broken record file; nothing is written then.
    """
    roots = calibration_roots(calibration_dir)
    before = None
    with suppress(DataFileError):  # to be replaced, whatever is wrong with it
        if (payload := read_coefficients(roots, gpu.key)) is not None:
            before = Calibration.from_dict(payload, source="")
    after = refit(gpu, calibration_dir)
    if not after.num_records and not after.left_out:
        raise CalibrationError(
            f"no record of {gpu.key} in {' or '.join(str(root) for root in roots)}; "
            f"records are there for {', '.join(calibrated_gpus(calibration_dir))}"
        )
    return Refit(before=before, after=after)


def state_launch(gpu: str, launch_us: float, calibration_dir: Path | None = None) -> Path:
    """Keep what a launch takes on this host beside `gpu`; returns the file.

    Raises:
        ConfigError: an unknown accelerator, or no time that a launch can take.
    """
    host = Host(launch_s=launch_us * 1e-6, date=now())
    return write_host(calibration_roots(calibration_dir)[0], find_gpu(gpu).key, host)


def calibrate_all(gpus: Sequence[str] = (), calibration_dir: Path | None = None) -> list[Refit]:
    """`calibrate` for the accelerators called `gpus`, or for each one that has records."""
    return [calibrate(spec, calibration_dir) for spec in chosen_gpus(gpus, calibration_dir)]


def calibration_reports(
    gpus: Sequence[str] = (), calibration_dir: Path | None = None
) -> list[CalibrationReport]:
    """`calibration_report` for the accelerators called `gpus`, or for each that has records."""
    return [
        calibration_report(spec, calibration_dir) for spec in chosen_gpus(gpus, calibration_dir)
    ]


def chosen_gpus(gpus: Sequence[str], calibration_dir: Path | None) -> list[GpuSpec]:
    """The accelerators called `gpus`, or each that has records.

    Raises:
        ConfigError: an unknown name.
        CalibrationError: there are no records.
    """
    return each_once(map(find_gpu, gpus or calibrated_gpus(calibration_dir)))


def calibration_report(gpu: GpuSpec, calibration_dir: Path | None = None) -> CalibrationReport:
    """Everything that the database knows about `gpu`.

    Raises:
        DataFileError: a broken file.
    """
    unread: dict[str, str] = {}
    roots = calibration_roots(calibration_dir)
    records = read_measurements(roots, gpu.key, leave_out=unread.__setitem__)
    calibration = load_calibration(gpu, calibration_dir)
    calibration = replace(calibration, left_out={**unread, **calibration.left_out})
    versions: Counter[str] = Counter()
    for record in records:
        libraries = record.environment.get("libraries", record.environment.get("versions"))
        if isinstance(libraries, Mapping):
            versions.update(f"{name} {version}" for name, version in libraries.items())
    return CalibrationReport(
        calibration=calibration,
        outcomes=Counter(record.outcome for record in records),
        sources=Counter(_origin(record) for record in records),
        dates=(records[0].date, records[-1].date) if records else None,
        versions=versions,
        stale=stale_note(calibration, calibration_dir),
    )


def _origin(record: Measurement) -> str:
    for name in ("source", "measured_by", "command"):
        if record.provenance.get(name):
            return str(record.provenance[name])
    return "not stated"


def import_table(
    path: Path, *, skip_bad: bool = False, calibration_dir: Path | None = None
) -> tuple[Merged, Sequence[str]]:
    """Add the runs of a CSV table; also the rows that were refused, with line and reason.

    Args:
        skip_bad: leave out what can't be true instead of refusing the table.

    Raises:
        DataFileError: a row is refused, or none is left; nothing is added then.
    """
    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    if table.refused and not skip_bad:
        more = len(table.refused) - 1
        suffix = f" (and {more} more rows)" if more else ""
        raise DataFileError(
            f"{table.refused[0]}{suffix}; nothing was imported, --skip-bad leaves such rows out"
        )
    if not table.records:
        first = f": {table.refused[0]}" if table.refused else ""
        raise DataFileError(f"{path}: holds no run that can be used{first}; add a row for each run")
    placed = [(record, str(path)) for record in table.records]
    merged = add(
        calibration_roots(calibration_dir),
        Source(placed, {}),
        impossible=lambda _: "",  # every row was judged
        is_known=_is_known_gpu,
    )
    return merged, table.refused


def export_records(
    path: Path, gpus: Sequence[str] = (), *, calibration_dir: Path | None = None
) -> int:
    """Write all records, or those of some devices, as `.csv` or `.jsonl`; how many they are.

    Raises:
        ConfigError: another ending.
        CalibrationError: there is no record.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{path}: must end in .csv or .jsonl, which decides the format")
    roots = calibration_roots(calibration_dir)
    asked = each_once(map(find_gpu, gpus))
    keys = [spec.key for spec in asked] or calibrated_gpus(calibration_dir)
    records = [record for key in keys for record in read_measurements(roots, key)]
    if not records:
        raise CalibrationError(
            f"no record of {', '.join(keys)} to export; 'whichlora calibrate show' lists what "
            "there is"
        )
    if path.suffix == ".csv":
        data = format_table(records).encode(errors="backslashreplace")  # half a surrogate pair
    else:
        data = b"".join(encode_record(record, f"record {record.id}") for record in records)
    write_bytes(path, data)
    return len(records)


def merge_records(place: Path, *, calibration_dir: Path | None = None) -> Merged:
    """Add the records of another database, a folder of `.jsonl` files or one such file.

    Raises:
        DataFileError: anything in it is broken or can't be true; nothing is added then.
    """
    if place.suffix == ".csv":
        raise ConfigError(f"{place}: is a table; use 'whichlora calibrate import {place}'")
    roots = calibration_roots(calibration_dir)
    return add(roots, read_source(place), impossible=judge(), is_known=_is_known_gpu)


def pull_records(url: str, *, calibration_dir: Path | None = None) -> Merged:
    """Add the records of the database at `url`: a directory, s3://, hf://datasets/….

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, or is broken; nothing is added then.
    """
    roots = calibration_roots(calibration_dir)
    return remote.pull(url, roots, impossible=judge(), is_known=_is_known_gpu)


def push_records(url: str, *, calibration_dir: Path | None = None) -> int:
    """Add this user's records to the database at `url`; how many it lacked.

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, is broken, or holds another record under the same id.
    """
    roots = calibration_roots(calibration_dir)[:1]
    placed = [
        record
        for key in gpus_with_records(roots)
        for path in record_files(roots, key)
        for record in read_records(path, gpu=key)
    ]
    if not placed:
        raise CalibrationError(f"no run was recorded yet in {roots[0]}; nothing to push")
    return remote.push(url, placed, impossible=judge())


def _is_known_gpu(key: str) -> bool:
    try:
        find_gpu(key)
    except ConfigError:
        return False
    return True


def judge() -> Callable[[Measurement], str]:
    """Why no device can have measured a record; empty where one can, or it can't be judged here."""
    models: dict[str, ModelSpec | None] = {}
    gpus: dict[str, GpuSpec] = {}

    def why(measurement: Measurement) -> str:
        name = str(measurement.config.get("model", ""))
        try:
            if measurement.gpu not in gpus:
                gpus[measurement.gpu] = find_gpu(measurement.gpu)
            if measurement.model_config is not None:
                return impossible(measurement, model_of(measurement), gpus[measurement.gpu])
            if name not in models:
                models[name] = find_model(name)
            model = models[name]
            return impossible(measurement, model, gpus[measurement.gpu]) if model else ""
        except WhichLoraError:
            return ""  # a device that is not described here, or settings of a newer release

    return why
