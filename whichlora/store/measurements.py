"""Measured runs, append-only, and what was fitted to them: `calibration/<gpu>/`."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from whichlora.errors import ConfigError, DataFileError
from whichlora.results import SCHEMA_VERSION, Measurement, Outcome
from whichlora.specs import RunConfig
from whichlora.store.compiled import MAX_BYTES, MAX_SECONDS, parse_record
from whichlora.store.jsonfiles import (
    check_schema_version,
    parse_object,
    read_object,
    require_slug,
    sync_folder,
    write_object,
)

COEFFICIENTS_SCHEMA_VERSION = 1
MAX_LINE_BYTES = 1 << 20
_ID = re.compile(rb'\{"schema_version": \d+, "id": "([ !#-\[\]-~]+)"')  # as our writer begins


@dataclass(frozen=True, slots=True)
class MeasurementLog:
    """The file that one profiling run writes: `<root>/<gpu>/measurements/<run_id>.jsonl`.

    One writer per file, so nothing is locked: cluster file systems lock badly, and files of
    different runs merge by lying side by side.

    Raises:
        ConfigError: `gpu` or `run_id` can't name a file.
    """

    root: Path
    gpu: str
    run_id: str

    def __post_init__(self) -> None:
        require_slug("gpu", self.gpu)
        require_slug("run_id", self.run_id)

    @property
    def path(self) -> Path:
        return self.root / self.gpu / "measurements" / f"{self.run_id}.jsonl"

    def append(self, measurement: Measurement) -> None:
        """Add one record; when this returns, it is on the disk, whole.

        Raises:
            DataFileError: a reader would refuse the record, or the disk refuses it.
        """
        where = f"{self.path}: record {measurement.id}"
        line = encode_record(measurement, where)
        if measurement.gpu != self.gpu:
            raise DataFileError(
                f"{where}: gpu: is {measurement.gpu!r} in the folder of {self.gpu!r}"
            )
        try:
            self._append(line)
        except OSError as error:
            raise DataFileError(
                f"{self.path}: can't be written ({error.strerror}); check the folder and the disk"
            ) from None

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            _end_last_line(descriptor, size)
            if os.write(descriptor, line) < len(line):  # the next append cuts it off
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if size == 0:  # a new file is there after a power cut only if its folders say so
            for folder in (self.path.parent, self.root / self.gpu, self.root):
                sync_folder(folder)


def _end_last_line(descriptor: int, size: int) -> None:
    """Cut off the torn record of a writer that was killed, so the next one starts a line."""
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    start = max(0, size - MAX_LINE_BYTES)
    _, newline, last = os.pread(descriptor, size - start, start).rpartition(b"\n")
    if start > 0 and not newline:  # no writer of ours leaves that, so what it is stays
        raise OSError(errno.EFBIG, "its last line is longer than a record")
    if _is_torn(last):
        os.ftruncate(descriptor, size - len(last))
    else:
        os.write(descriptor, b"\n")


def _is_torn(last: bytes) -> bool:
    """Whether a last line without newline is the beginning of a record, not a whole one.

    An object ends with its closing brace, so no beginning of one is valid JSON.
    """
    try:
        parse_object(last, "")
    except DataFileError:
        return True
    return False


def read_measurements(roots: Iterable[Path], gpu: str) -> tuple[Measurement, ...]:
    """All records of `gpu` in all `roots`, each once, by date; the order of roots is no matter.

    A last line that a killed writer left unfinished is not a record yet and is passed over.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: a broken line or record (path:line: key: …), or two records of one id.
    """
    with _collector_paused():
        return union(
            placed for path in record_files(roots, gpu) for placed in read_records(path, gpu=gpu)
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Many new objects and no cycles among them: the collector would only walk them repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record_files(roots: Iterable[Path], gpu: str) -> list[Path]:
    """The files that hold the records of `gpu`."""
    require_slug("gpu", gpu)
    return [
        path for root in roots for path in sorted((root / gpu / "measurements").glob("*.jsonl"))
    ]


def read_records(path: Path, *, gpu: str | None = None) -> Iterator[tuple[Measurement, str]]:
    """Every record of one file and its place, path:line.

    Args:
        gpu: the accelerator that all of them must be of; None is what each says itself.

    Raises:
        DataFileError: a broken line or record.
    """
    for line, where in _lines(path):
        found = _checked(line, where)
        if gpu is not None and found.gpu != gpu:
            raise DataFileError(
                f"{where}: gpu: is {found.gpu!r} in the folder of {gpu!r}; move the record"
            )
        yield found, where


def _checked(line: bytes, where: str) -> Measurement:
    """The record in `line`: compiled checks accept it, or those in Python decide and explain.

    Raises:
        DataFileError: starting with `where` and the key.
    """
    found = parse_record(line)
    if found is None or not _is_name(found.id) or not _is_date(found.date):
        found = _measurement(line, where)
    _check_plausible(found, where)
    return found


def union(records: Iterable[tuple[Measurement, str]]) -> tuple[Measurement, ...]:
    """Each record once, by date, whatever their order.

    Raises:
        DataFileError: two records of one id, naming both places.
    """
    found: dict[str, tuple[Measurement, str]] = {}
    for measurement, where in records:
        known, first = found.setdefault(measurement.id, (measurement, where))
        if known is not measurement and known != measurement:
            raise DataFileError(
                f"{where}: id: {measurement.id!r} is another record at {first}; "
                "records never change, so remove the wrong one"
            )
    each = (measurement for measurement, _ in found.values())
    return tuple(sorted(each, key=lambda record: (record.date, record.id)))


def record_ids(roots: Iterable[Path], gpu: str) -> set[str]:
    """Ids of all records of `gpu`, nothing else of them read or checked: 50 times as fast.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: a line that is no record.
    """
    ids = set()
    for path in record_files(roots, gpu):
        for line, where in _lines(path):
            match = _ID.match(line)
            found = match[1].decode() if match else parse_object(line, where).get("id")
            if not isinstance(found, str):
                raise DataFileError(f"{where}: id: missing; must be {_CHECKS['id'][0]}")
            ids.add(found)
    return ids


def encode_record(measurement: Measurement, where: str) -> bytes:
    """The line of one record.

    Raises:
        DataFileError: a reader would refuse it; starting with `where` and the key.
    """
    line = json.dumps(measurement.to_dict()).encode()
    # What can't be read back must not be written; this also refuses NaN.
    _checked(line, where)
    if len(line) >= MAX_LINE_BYTES:
        raise DataFileError(
            f"{where}: has {len(line) + 1} bytes, at most {MAX_LINE_BYTES} are accepted; "
            "shorten its detail or environment"
        )
    return line + b"\n"


def _lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Each whole line of `path` and its place, path:line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise DataFileError(
                        f"{path}:{number}: is longer than {MAX_LINE_BYTES} bytes, "
                        "which no record is; remove the line"
                    )
                if not line.endswith(b"\n") and _is_torn(line):
                    return
                yield line, f"{path}:{number}"
    except OSError as error:
        raise DataFileError(f"{path}: can't be read ({error.strerror}); check the file") from None


def _measurement(line: bytes, where: str) -> Measurement:
    """The record in `line`, every field checked, and explained where it is wrong.

    Raises:
        DataFileError: starting with `where` and the key.
    """
    values = parse_object(line, where)
    check_schema_version(values, SCHEMA_VERSION, where)
    del values["schema_version"]
    for key, value in values.items():
        check = _CHECKS.get(key)
        if check is None:
            raise DataFileError(
                f"{where}: {key}: is not a field; known are {', '.join(_CHECKS)}; "
                "remove it, or upgrade whichlora"
            )
        accepted, is_valid = check
        if not is_valid(value):
            raise DataFileError(
                f"{where}: {key}: got {_shortened(value)}; must be {accepted}; remove the record"
            )
        if type(value) is list:
            values[key] = tuple(value)
    for key in _REQUIRED:
        if key not in values:
            raise DataFileError(f"{where}: {key}: missing; must be {_CHECKS[key][0]}")
    measurement = Measurement(**values)
    try:
        RunConfig.from_dict(measurement.config)
    except (ConfigError, TypeError) as error:
        raise DataFileError(f"{where}: config: {error}") from None
    return measurement


def _check_plausible(measurement: Measurement, where: str) -> None:
    allocated, reserved = measurement.peak_allocated_bytes, measurement.peak_reserved_bytes
    counted = (allocated, reserved, measurement.device_used_bytes)
    if measurement.outcome == "ok" and 0 in counted:
        raise DataFileError(
            f"{where}: peak_allocated_bytes, peak_reserved_bytes, device_used_bytes: a run that "
            "ended ok used more than 0 bytes; write null where nothing was counted"
        )
    if allocated is not None and reserved is not None and allocated > reserved:
        raise DataFileError(
            f"{where}: peak_allocated_bytes: {allocated} is more than the {reserved} that the "
            "allocator had reserved; remove the record"
        )


def read_coefficients(roots: Iterable[Path], gpu: str) -> dict[str, Any] | None:
    """What was fitted for `gpu`, from the first of `roots` that has it; None where none has.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: the file is broken, or newer than this release.
    """
    require_slug("gpu", gpu)
    paths = (root / gpu / "coefficients.json" for root in roots)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    values = read_object(path)
    check_schema_version(values, COEFFICIENTS_SCHEMA_VERSION, str(path))
    return values


def write_coefficients(root: Path, gpu: str, payload: Mapping[str, Any]) -> Path:
    """Replace the coefficients of `gpu` below `root` in one step; the path they are at.

    Raises:
        ConfigError: `gpu` can't name a folder.
    """
    path = root / require_slug("gpu", gpu) / "coefficients.json"
    write_object(path, {**payload, "schema_version": COEFFICIENTS_SCHEMA_VERSION})
    return path


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def _is_date(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_seconds(value: object) -> bool:
    # By type, since bool is an int in Python; the comparison refuses NaN.
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS  # type: ignore[operator]


def _are_seconds(value: object) -> bool:
    return type(value) is list and all(map(_is_seconds, value))


def _are_durations(value: object) -> bool:
    return _are_seconds(value) and 0 not in value  # type: ignore[operator]


def _are_lengths(value: object) -> bool:
    return type(value) is list and all(type(item) is int and 0 < item < 10**9 for item in value)


def _is_bytes_or_null(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < MAX_BYTES)


def _are_bytes(value: object) -> bool:
    return type(value) is list and all(
        item is not None and _is_bytes_or_null(item) for item in value
    )


def _are_bytes_by_name(value: object) -> bool:
    return isinstance(value, dict) and _are_bytes(list(value.values()))


_SECONDS = f"from 0 to {MAX_SECONDS} seconds"
_BYTES = f"a whole number of bytes from 0 to below {MAX_BYTES}, or null"
_COUNTS = f"whole numbers of bytes from 0 to below {MAX_BYTES}"

# What each field of a record must hold, in words and as a check.
_CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "id": ("a printable text of 1 to 200 characters", _is_name),
    "gpu": ("the name of the folder", _is_name),
    "date": ("a date in ISO 8601", _is_date),
    "config": ("an object", _is_object),
    "outcome": (f"one of {', '.join(get_args(Outcome))}", get_args(Outcome).__contains__),
    "model_config": ("an object, or null", lambda value: value is None or _is_object(value)),
    "detail": ("a text", lambda value: isinstance(value, str)),
    "step_s": (f"a list of numbers {_SECONDS}, none of them 0", _are_durations),
    "batch_seq_len": ("a list of whole numbers above 0", _are_lengths),
    "generate_s": (f"a list of numbers {_SECONDS}, none of them 0", _are_durations),
    "prefill_s": (f"a list of numbers {_SECONDS}", _are_seconds),
    "decode_s_per_token": (f"a list of numbers {_SECONDS}", _are_seconds),
    "peak_allocated_bytes": (_BYTES, _is_bytes_or_null),
    "peak_reserved_bytes": (_BYTES, _is_bytes_or_null),
    "device_used_bytes": (_BYTES, _is_bytes_or_null),
    "moment_peak_bytes": (f"an object of {_COUNTS}", _are_bytes_by_name),
    "largest_blocks_bytes": (f"a list of {_COUNTS}", _are_bytes),
    "device_s": (f"a number {_SECONDS}", _is_seconds),
    "warm_up_s": (f"a number {_SECONDS}", _is_seconds),
    "environment": ("an object", _is_object),
    "provenance": ("an object", _is_object),
}
_REQUIRED = tuple(
    field.name
    for field in fields(Measurement)
    if field.default is MISSING and field.default_factory is MISSING
)
assert set(_CHECKS) == {field.name for field in fields(Measurement)}
