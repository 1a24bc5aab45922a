"""Databases merge as sets of records: in any order, any number of times, by several at once.

What comes from elsewhere is read and checked whole before one byte is written; then every device
gets one new file, named by its content. No file is ever changed, so nothing is locked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whichlora.errors import DataFileError
from whichlora.spec.results import Measurement
from whichlora.store.gpu_file import read_gpu
from whichlora.store.jsonfiles import is_slug, write_bytes
from whichlora.store.measurements import MAX_FILE_BYTES, read_records, record_files, union
from whichlora.store.record import encode_record

MAX_FILES = 10_000
MAX_TOTAL_BYTES = (
    MAX_FILE_BYTES  # of one source: a million records, and what fits a laptop's memory
)
_PACKED = (".gz", ".zip", ".zst", ".bz2", ".xz")

Placed = tuple[Measurement, str]  # a record and its place, path:line
Impossible = Callable[[Measurement], str]  # why no device can have measured it; empty where one can


@dataclass(frozen=True, slots=True)
class Source:
    """Another database, read and checked.

    Args:
        gpus: path of the `gpu.json` of each device that it describes.
    """

    records: Sequence[Placed]
    gpus: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Merged:
    """Changes made by a merge.

    Args:
        added: number of new records by device.
        known: records that were here already.
        paths: the files that it wrote.
    """

    added: Mapping[str, int]
    known: int
    paths: Sequence[Path]


def read_source(place: Path) -> Source:
    """All records of a database folder, a folder of record files, or one `.jsonl` file.

    Raises:
        DataFileError: anything in it is broken; then nothing of it is of use.
    """
    records: list[Placed] = []
    gpus: dict[str, Path] = {}
    for path in _files(place):
        if path.name == "gpu.json":
            gpus[read_gpu(path).key] = path
            continue
        folder = path.parent
        gpu = folder.parent.name if folder.name == "measurements" else None
        for record, where in read_records(path, gpu=gpu):
            if not is_slug(record.gpu):
                raise DataFileError(f"{where}: gpu: {record.gpu!r} can't name a folder; correct it")
            records.append((record, where))
    if not records:
        raise DataFileError(f"{place}: holds no records; give a folder or a file of .jsonl")
    union(records)
    return Source(records, gpus)


def _files(place: Path) -> Iterator[Path]:
    """Record and device files below `place`, after all of them were found harmless."""
    try:
        if not place.is_dir():
            _check_plain(place)
            yield place
            return
        paths, total = [], 0
        for folder, folders, names in os.walk(place, onerror=_raise):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in folders:
                if Path(folder, name).is_symlink():
                    raise DataFileError(f"{Path(folder, name)}: is a link; only files are merged")
            for path in (Path(folder, name) for name in sorted(names)):
                if path.name.endswith(tuple(f".jsonl{end}" for end in _PACKED)):
                    raise DataFileError(f"{path}: is compressed; unpack or remove it")
                if path.suffix == ".jsonl" or path.name == "gpu.json":
                    total += _check_plain(path)
                    paths.append(path)
                if len(paths) > MAX_FILES or total > MAX_TOTAL_BYTES:
                    raise _too_large(place)
    except OSError as error:
        raise DataFileError(f"{place}: can't be read ({error.strerror}); check the path") from None
    yield from paths


def _raise(error: OSError) -> None:
    raise error


def _too_large(place: object) -> DataFileError:
    return DataFileError(
        f"{place}: has more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes; merge it in parts"
    )


def _check_plain(path: Path) -> int:
    """Bytes of `path`, a file and nothing else: a link may lead anywhere, a pipe never ends."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DataFileError(f"{path}: is a link, a pipe or a device; only files are merged")
    if status.st_size > MAX_TOTAL_BYTES:
        raise _too_large(path)
    return status.st_size


def add(
    roots: Sequence[Path],
    source: Source,
    *,
    impossible: Impossible,
    is_known: Callable[[str], bool],
) -> Merged:
    """Add to `roots[0]` what no root holds yet.

    Args:
        is_known: whether the facts of a device are at hand; the source's own are taken if not.

    Raises:
        DataFileError: an impossible record, or one id with two contents, here and there; nothing
            is written then.
    """
    fresh = {
        gpu: new_records(placed, _placed_here(roots, gpu), impossible)
        for gpu, placed in _by_gpu(source.records).items()
    }
    root = roots[0]
    written: list[Path] = []
    try:
        for gpu, records in fresh.items():
            if records:
                name, data = packed(records)
                path = root / gpu / "measurements" / name
                if not path.exists():
                    written.append(path)
                    write_bytes(path, data)
        for gpu in {path.parent.parent.name for path in written}:
            added_ids = {record.id for record in fresh[gpu]}
            # another writer may have added the same id meanwhile
            union(placed for placed in _placed_here(roots, gpu) if placed[0].id in added_ids)
    except DataFileError:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise
    for gpu, path in source.gpus.items():
        target = root / gpu / "gpu.json"
        if gpu in fresh and not is_known(gpu) and not target.exists():
            write_bytes(target, path.read_bytes())
    added = {gpu: len(records) for gpu, records in fresh.items() if records}
    distinct = len({record.id for record, _ in source.records})
    return Merged(added, distinct - sum(added.values()), written)


def _placed_here(roots: Sequence[Path], gpu: str) -> list[Placed]:
    """The records here; one that is broken hinders no merge, and whoever fits tells of it."""
    return [
        placed
        for path in record_files(roots, gpu)
        for placed in read_records(path, gpu=gpu, leave_out=lambda *_: None)
    ]


def _by_gpu(records: Iterable[Placed]) -> dict[str, list[Placed]]:
    by_gpu: dict[str, list[Placed]] = {}
    for placed in records:
        by_gpu.setdefault(placed[0].gpu, []).append(placed)
    return by_gpu


def new_records(
    theirs: Sequence[Placed], ours: Sequence[Placed], impossible: Impossible
) -> list[Measurement]:
    """Records of `theirs` that `ours` lacks, by id.

    Raises:
        DataFileError: one id with two contents, or a new record that no device can have measured.
    """
    wanted = {record.id for record, _ in theirs}
    union([*(placed for placed in ours if placed[0].id in wanted), *theirs])
    our_ids = {record.id for record, _ in ours}
    fresh = {record.id: (record, where) for record, where in theirs if record.id not in our_ids}
    for record, where in fresh.values():
        fault = impossible(record)
        if fault:
            raise DataFileError(f"{where}: {fault}; remove the record")
    return [fresh[record_id][0] for record_id in sorted(fresh)]


def packed(records: Sequence[Measurement]) -> tuple[str, bytes]:
    """File name and content of these records: the same for everybody who has the same ones."""
    data = b"".join(encode_record(record, f"record {record.id}") for record in records)
    return f"{hashlib.sha256(data).hexdigest()[:32]}.jsonl", data


def gpus_with_records(roots: Iterable[Path]) -> list[str]:
    """Keys of the devices that have a record file in any root."""
    paths = (path for root in roots for path in root.glob("*/measurements/*.jsonl"))
    return sorted({path.parent.parent.name for path in paths})
