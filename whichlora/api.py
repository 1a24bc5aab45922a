"""What a Python user calls; joins the files and devices at the edges to the formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whichlora import hub
from whichlora.architecture import ModelSpec
from whichlora.calibration import Calibration, digest_of, prior_calibration
from whichlora.errors import CalibrationError, ConfigError, DataFileError, WhichLoraError
from whichlora.prediction import predict
from whichlora.results import Measurement, Prediction
from whichlora.specs import GpuSpec, RunConfig
from whichlora.store import gpus as gpu_store
from whichlora.store import measurements as record_store
from whichlora.store import models as model_store
from whichlora.store.paths import data_folder, user_calibration_folder

if TYPE_CHECKING:
    from whichlora.sharing.union import Merged

# Settings that a phase does not read: a grid over them would only repeat itself.
_FINETUNE_ONLY = (
    "method",
    "seq_len",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "optimizer",
    "gradient_checkpointing",
    "gradient_accumulation_steps",
    "padding",
    "loss_head",
    "prepare_kbit",
)
_INFERENCE_ONLY = ("prompt_len", "max_new_tokens", "kv_cache")


def load_model(name: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """The architecture called `name`: a hub id, an alias, a local folder or `config.json`.

    Raises:
        ConfigError: unknown, and not to be found on the hub; the message has near matches.
    """
    return hub.load_model(name, trust_remote_code=trust_remote_code)


def is_known_model(name: str) -> bool:
    """Whether the database holds `name`, so that a record need not carry its config."""
    return model_store.find_model(name) is not None


def find_gpu(name: str = "auto") -> GpuSpec:
    """The accelerator called `name`: a key, an alias, a driver's name, "cpu" or "auto".

    Raises:
        ConfigError: unknown or ambiguous; the message has the candidates.
    """
    return gpu_store.find_gpu(name)


def list_gpus() -> tuple[GpuSpec, ...]:
    """Every accelerator of the catalog."""
    return gpu_store.list_gpus()


def list_models() -> tuple[model_store.ModelRecord, ...]:
    """Every model of the database."""
    return model_store.list_models()


def calibration_roots(calibration_dir: Path | None = None) -> tuple[Path, ...]:
    """Folders that hold calibrations: the user's, which goes before and is written to, and ours."""
    return (calibration_dir or user_calibration_folder(), data_folder("calibration"))


def load_calibration(gpu: GpuSpec, calibration_dir: Path | None = None) -> Calibration:
    """What runs on `gpu` taught so far; datasheet priors where there were none.

    Raises:
        DataFileError: a coefficients file that cannot be read.
    """
    roots = calibration_roots(calibration_dir)
    payload = record_store.read_coefficients(roots, gpu.key)
    if payload is None:
        return prior_calibration(gpu)
    return Calibration.from_dict(payload, source=f"calibration/{gpu.key}/coefficients.json")


def refit(gpu: GpuSpec, calibration_dir: Path | None = None) -> Calibration:
    """Fit the predictors of `gpu` to every record there is, and store the coefficients.

    Raises:
        DataFileError: a broken record file; nothing is written then.
    """
    from whichlora.fitting import fit

    roots = calibration_roots(calibration_dir)
    records = record_store.read_measurements(roots, gpu.key)
    calibration = fit(records, gpu, model_of)
    if records:
        record_store.write_coefficients(roots[0], gpu.key, calibration.to_dict())
    return calibration


def model_of(measurement: Measurement) -> ModelSpec:
    """Architecture that a record was measured on; offline.

    Raises:
        ConfigError: the record names a model that is neither in the database nor in the record.
    """
    from whichlora.families import build

    name = str(measurement.config.get("model", ""))
    if measurement.model_config is not None:
        return build(measurement.model_config, name=name)
    found = model_store.find_model(name)
    if found is None:
        raise ConfigError(f"record {measurement.id}: model {name!r} is not in the database")
    return found


def grid(settings: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig]:
    """Every combination of `settings` (a list of values by name of a `RunConfig` field).

    A setting that a phase does not read is left at its default there, so that no candidate
    appears twice.

    Raises:
        ConfigError: a value that is not accepted.
    """
    seen: set[RunConfig] = set()
    for phase in settings.get("phase", ("finetune",)):
        unread = _INFERENCE_ONLY if phase == "finetune" else _FINETUNE_ONLY
        names = [name for name in settings if name not in unread and name != "phase"]
        for values in itertools.product(*(settings[name] for name in names)):
            run = RunConfig(phase=phase, **dict(zip(names, values, strict=True)))
            if run not in seen:
                seen.add(run)
                yield run


def estimate(
    runs: Iterable[RunConfig],
    gpus: Sequence[str] = ("auto",),
    *,
    calibration_dir: Path | None = None,
) -> list[Prediction]:
    """Peak memory and time of every run on every accelerator. Nothing is run or downloaded.

    Raises:
        ConfigError: an unknown model or accelerator, or settings that exclude each other.
    """
    devices = [find_gpu(name) for name in gpus]
    calibrations = [load_calibration(gpu, calibration_dir) for gpu in devices]
    stale = [_stale(calibration, calibration_dir) for calibration in calibrations]
    models: dict[str, ModelSpec] = {}
    predictions = []
    for run in runs:
        if run.model not in models:
            models[run.model] = load_model(run.model)
        for gpu, calibration, note in zip(devices, calibrations, stale, strict=True):
            found = predict(models[run.model], run, gpu, calibration)
            predictions.append(replace(found, basis=found.basis + note))
    return predictions


# --- calibration databases ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What a fit changed: the coefficients before, None where there were none, and now."""

    before: Calibration | None
    after: Calibration

    def to_dict(self) -> dict[str, Any]:
        before = None if self.before is None else self.before.to_dict()
        return {"before": before, "after": self.after.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What is known about one device, and from whom.

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
    from whichlora.sharing.union import gpus_with_records

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
    payload = record_store.read_coefficients(roots, gpu.key)
    before = None
    if payload is not None:
        with suppress(DataFileError):  # to be replaced, whatever is wrong with it
            before = Calibration.from_dict(payload, source="")
    after = refit(gpu, calibration_dir)
    if not after.num_records:
        raise CalibrationError(
            f"no record of {gpu.key} in {' or '.join(str(root) for root in roots)}; "
            f"records are there for {', '.join(calibrated_gpus(calibration_dir))}"
        )
    return Refit(before=before, after=after)


def calibrate_all(gpu: str | None = None, calibration_dir: Path | None = None) -> list[Refit]:
    """`calibrate` for the accelerator called `gpu`, or for each one that has records."""
    return [calibrate(one, calibration_dir) for one in _chosen(gpu, calibration_dir)]


def calibration_reports(
    gpu: str | None = None, calibration_dir: Path | None = None
) -> list[CalibrationReport]:
    """`calibration_report` for the accelerator called `gpu`, or for each one that has records."""
    return [calibration_report(one, calibration_dir) for one in _chosen(gpu, calibration_dir)]


def _chosen(gpu: str | None, calibration_dir: Path | None) -> list[GpuSpec]:
    names = [gpu] if gpu else calibrated_gpus(calibration_dir)
    return [find_gpu(name) for name in names]


def calibration_report(gpu: GpuSpec, calibration_dir: Path | None = None) -> CalibrationReport:
    """Everything that the database knows about `gpu`.

    Raises:
        DataFileError: a broken file.
    """
    records = record_store.read_measurements(calibration_roots(calibration_dir), gpu.key)
    calibration = load_calibration(gpu, calibration_dir)
    versions: Counter[str] = Counter()
    for record in records:
        found = record.environment.get("versions")
        if isinstance(found, Mapping):
            versions.update(f"{name} {version}" for name, version in found.items())
    return CalibrationReport(
        calibration=calibration,
        outcomes=Counter(record.outcome for record in records),
        sources=Counter(_origin(record) for record in records),
        dates=(records[0].date, records[-1].date) if records else None,
        versions=versions,
        stale=_stale(calibration, calibration_dir),
    )


def _origin(record: Measurement) -> str:
    for name in ("source", "measured_by", "command"):
        if record.provenance.get(name):
            return str(record.provenance[name])
    return "not stated"


def _stale(calibration: Calibration, calibration_dir: Path | None) -> str:
    """What a prediction must say where its coefficients are not those of the records.

    Ids alone are read: 100,000 in 0.2 s. A refit would cost seconds and is one command away.
    """
    roots = calibration_roots(calibration_dir)
    try:
        ids = record_store.record_ids(roots, calibration.gpu)
    except DataFileError as error:
        return f"; its records can't be read: {error}"
    if not ids and not calibration.digest:
        return ""
    if digest_of(ids) == calibration.digest:
        return ""
    return (
        f"; not fitted to the {len(ids)} records there are now: "
        f"whichlora calibrate --gpu {calibration.gpu}"
    )


def import_table(
    path: Path, *, skip_bad: bool = False, calibration_dir: Path | None = None
) -> tuple[Merged, Sequence[str]]:
    """Add the runs of a CSV table; also the rows that were refused, with line and reason.

    Args:
        skip_bad: leave out what can't be true instead of refusing the table.

    Raises:
        DataFileError: a row is refused, or none is left; nothing is added then.
    """
    from whichlora.sharing.table import read_table
    from whichlora.sharing.union import Source, add

    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    if table.refused and not skip_bad:
        more = len(table.refused) - 1
        rest = f" (and {more} more rows)" if more else ""
        raise DataFileError(
            f"{table.refused[0]}{rest}; nothing was imported, --skip-bad leaves such rows out"
        )
    if not table.records:
        first = f": {table.refused[0]}" if table.refused else ""
        raise DataFileError(f"{path}: holds no run that can be used{first}")
    placed = [(record, str(path)) for record in table.records]
    merged = add(
        calibration_roots(calibration_dir),
        Source(placed, {}),
        impossible=lambda _: "",  # every row was judged
        is_known=_is_known_gpu,
    )
    return merged, table.refused


def export_records(
    path: Path, gpu: str | None = None, *, calibration_dir: Path | None = None
) -> int:
    """Write all records, or those of one device, as `.csv` or `.jsonl`; how many they are.

    Raises:
        ConfigError: another ending.
        CalibrationError: there is no record.
    """
    from whichlora.sharing.table import format_table
    from whichlora.store.jsonfiles import write_bytes

    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{path}: must end in .csv or .jsonl, which decides the format")
    roots = calibration_roots(calibration_dir)
    keys = [find_gpu(gpu).key] if gpu else calibrated_gpus(calibration_dir)
    records = [one for key in keys for one in record_store.read_measurements(roots, key)]
    if not records:
        raise CalibrationError(f"no record of {', '.join(keys)} to export")
    if path.suffix == ".csv":
        data = format_table(records).encode()
    else:
        data = b"".join(record_store.encode_record(one, f"record {one.id}") for one in records)
    write_bytes(path, data)
    return len(records)


def merge_records(place: Path, *, calibration_dir: Path | None = None) -> Merged:
    """Add the records of another database, a folder of `.jsonl` files or one such file.

    Raises:
        DataFileError: anything in it is broken or can't be true; nothing is added then.
    """
    from whichlora.sharing.union import add, read_source

    if place.suffix == ".csv":
        raise ConfigError(f"{place}: is a table; use 'whichlora calibrate import {place}'")
    roots = calibration_roots(calibration_dir)
    return add(roots, read_source(place), impossible=_judge(), is_known=_is_known_gpu)


def pull_records(url: str, *, calibration_dir: Path | None = None) -> Merged:
    """Add the records of the database at `url`: a directory, s3://, hf://datasets/….

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, or is broken; nothing is added then.
    """
    from whichlora.sharing.remote import pull

    roots = calibration_roots(calibration_dir)
    return pull(url, roots, impossible=_judge(), is_known=_is_known_gpu)


def push_records(url: str, *, calibration_dir: Path | None = None) -> int:
    """Add this user's records to the database at `url`; how many it lacked.

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, is broken, or holds another record under the same id.
    """
    from whichlora.sharing.remote import push
    from whichlora.sharing.union import gpus_with_records

    roots = calibration_roots(calibration_dir)[:1]
    placed = [
        one
        for key in gpus_with_records(roots)
        for path in record_store.record_files(roots, key)
        for one in record_store.read_records(path, gpu=key)
    ]
    if not placed:
        raise CalibrationError(f"no run was recorded yet in {roots[0]}; nothing to push")
    return push(url, placed, impossible=_judge())


def _is_known_gpu(key: str) -> bool:
    try:
        find_gpu(key)
    except ConfigError:
        return False
    return True


def _judge() -> Callable[[Measurement], str]:
    """Why no device can have measured a record; empty where one can, or it can't be judged here."""
    from whichlora.sharing.physics import impossible

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
                models[name] = model_store.find_model(name)
            model = models[name]
            return impossible(measurement, model, gpus[measurement.gpu]) if model else ""
        except WhichLoraError:
            return ""  # a device that is not described here, or settings of a newer release

    return why
