"""Measured runs, append-only: `calibration/<gpu>/measurements/`, one file per profiling run."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from whichlora.errors import DataFileError
from whichlora.spec.results import Measurement
from whichlora.store.jsonfiles import check_plain_file, parse_object, require_slug, sync_folder
from whichlora.store.locks import lock_file, unlock_file
from whichlora.store.record import MAX_LINE_BYTES, decode_record, encode_record, id_of_record
from whichlora.units import GiB

MAX_FILE_BYTES = GiB  # a million records
LOG_ID = "log-"  # how ids of records of engines' logs begin


@dataclass(frozen=True, slots=True)
class MeasurementLog:
    """The file that one profiling run writes: `<root>/<gpu>/measurements/<run_id>.jsonl`.

    Files of different runs merge by lying side by side. Several writers of one file take turns
    by its lock. Where the file system has no locks, writers only append; cluster tasks and
    `hold_folder` ensure one writer per file.

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

    def prepare(self) -> None:
        """Make the folder, before device time is spent on records that can't be written.

        Raises:
            DataFileError: it can't be made or written.
        """
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise DataFileError(
                f"{folder}: can't be written ({error.strerror}); set calibration_dir, or "
                "$WHICHLORA_CALIBRATION, to a folder of yours"
            ) from None

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
            is_locked = lock_file(descriptor)
            size = os.fstat(descriptor).st_size
            if is_locked:
                _end_last_line(descriptor, size)
            elif not _ends_a_line(descriptor, size):
                line = b"\n" + line  # its writer may be at work, so nothing is cut off
            if os.write(descriptor, line) < len(line):  # the next append cuts it off
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_locked:  # writers that wait for the disk wait together
                unlock_file(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if size == 0:  # a new file is there after a power cut only if its folders say so
            for folder in (self.path.parent, self.root / self.gpu, self.root):
                sync_folder(folder)


def _ends_a_line(descriptor: int, size: int) -> bool:
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _end_last_line(descriptor: int, size: int) -> None:
    """Cut off the torn record of a writer that was killed, so the next one starts a line.

    Only under the file's lock: a record that is still being written looks torn, too.
    """
    if _ends_a_line(descriptor, size):
        return
    start = max(0, size - MAX_LINE_BYTES)
    _, newline, last = os.pread(descriptor, size - start, start).rpartition(b"\n")
    if start > 0 and not newline:  # our writers leave no such line, so it stays
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


LeaveOut = Callable[[str, str], None]
"""Takes the place (path:line) of an unreadable record, and the reason."""


def read_measurements(
    roots: Iterable[Path], gpu: str, *, leave_out: LeaveOut | None = None
) -> tuple[Measurement, ...]:
    """All records of `gpu` in all `roots`, each once, by date; the order of roots does not matter.

    A last line that a killed writer left unfinished is not a record yet and is skipped.

    Args:
        leave_out: called with each broken record, which is skipped; without it the first broken
            record is an error.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: a broken line or record (path:line: key: …), or two records of one id.
    """
    with _collector_paused():
        placed = (
            placed
            for path in record_files(roots, gpu)
            for placed in read_records(path, gpu=gpu, leave_out=leave_out)
        )
        return union(placed, leave_out=leave_out)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Many new objects without cycles: the collector would walk them again and again."""
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


def read_records(
    path: Path, *, gpu: str | None = None, leave_out: LeaveOut | None = None
) -> Iterator[tuple[Measurement, str]]:
    """Every record of one file and its place, path:line.

    Args:
        gpu: the accelerator of all records; None accepts any.
        leave_out: as of `read_measurements`.

    Raises:
        DataFileError: a broken line or record.
    """
    for line, where in _lines(path, leave_out):
        try:
            record = decode_record(line, where)
            if gpu is not None and record.gpu != gpu:
                raise DataFileError(
                    f"{where}: gpu: is {record.gpu!r} in the folder of {gpu!r}; move the record"
                )
        except DataFileError as error:
            _refuse(error, where, leave_out)
        else:
            yield record, where


def _refuse(error: DataFileError, where: str, leave_out: LeaveOut | None) -> None:
    if leave_out is None:
        raise error
    leave_out(where, str(error).removeprefix(f"{where}: "))


def union(
    records: Iterable[tuple[Measurement, str]], *, leave_out: LeaveOut | None = None
) -> tuple[Measurement, ...]:
    """Each record once, by date, whatever their order.

    Args:
        leave_out: as of `read_measurements`; of two records of one id, neither is taken.

    Raises:
        DataFileError: two records of one id, naming both places.
    """
    placed: dict[str, tuple[Measurement, str]] = {}
    refused: set[str] = set()
    for measurement, where in records:
        earlier, place = placed.setdefault(measurement.id, (measurement, where))
        if earlier is not measurement and not _agree(earlier, measurement):
            error = DataFileError(
                f"{where}: id: {measurement.id!r} is another record at {place}; "
                "records never change, so remove the wrong one"
            )
            _refuse(error, where, leave_out)
            refused.add(measurement.id)
    accepted = (record for record, _ in placed.values() if record.id not in refused)
    return tuple(sorted(accepted, key=lambda record: (record.date, record.id)))


def _agree(a: Measurement, b: Measurement) -> bool:
    """Whether both records are equal; one imported from a table names defaults that others lack."""
    return a == b or replace(a, config=a.run.to_dict()) == replace(b, config=b.run.to_dict())


def record_ids(roots: Iterable[Path], gpu: str) -> set[str]:
    """Ids of all records of `gpu`, without reading the rest of them: 50 times as fast.

    Broken lines are skipped; `read_measurements` reports them.

    Raises:
        ConfigError: `gpu` can't name a folder.
    """
    ids = set()
    for path in record_files(roots, gpu):
        for line, where in _lines(path, lambda *_: None):
            with suppress(DataFileError):
                ids.add(id_of_record(line, where))
    return ids


def is_of_log(record_id: str) -> bool:
    """Whether a record is what an engine's log states: compared with a prediction, never fitted."""
    return record_id.startswith(LOG_ID)


def _lines(path: Path, leave_out: LeaveOut | None) -> Iterator[tuple[bytes, str]]:
    """Each whole line of `path` and its place, path:line."""
    try:
        check_plain_file(path, MAX_FILE_BYTES)
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise DataFileError(
                        f"{path}:{number}: is longer than {MAX_LINE_BYTES} bytes, "
                        "which no record is; remove the line"
                    )
                if not line.endswith(b"\n") and _is_torn(line):
                    if leave_out is not None:
                        reason = "is not finished; its writer was killed, or is at work"
                        leave_out(f"{path}:{number}", reason)
                    return
                yield line, f"{path}:{number}"
    except DataFileError as error:
        _refuse(error, str(path), leave_out)
    except OSError as error:
        refusal = DataFileError(f"{path}: can't be read ({error.strerror}); check the file")
        _refuse(refusal, str(path), leave_out)
