"""Files for people, of which WhichLoRA replaces and removes only what it wrote itself.

Every folder has a record: file name → digest of what was written there last. What has another
digest was made or edited by somebody else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whichlora.errors import DataFileError
from whichlora.store.jsonfiles import read_object, write_bytes, write_object
from whichlora.store.locks import lock_file

RECORD = ".whichlora.json"
OTHER_FOLDER = "set another output_dir"
OTHER_OUTPUT = "give another --output"
_SCHEMA_VERSION = 1


def require_own(paths: Iterable[Path], *, instead: str) -> None:
    """Refuse before anything is written what `write_files` would refuse.

    Args:
        instead: where else the user may have it written, such as "give another --output".

    Raises:
        DataFileError: one of them is there, and is not as WhichLoRA wrote it.
    """
    for path in paths:
        if os.path.lexists(path) and not is_own(path):
            what = "exists, and WhichLoRA has no record of writing it"
            if path.name in _recorded(path.parent):
                what = "was edited since WhichLoRA wrote it"
            raise DataFileError(f"{path}: {what}; {instead}, or rename it")


def write_files(contents: Mapping[Path, bytes], *, instead: str) -> None:
    """Write all files, or none where one of them is not WhichLoRA's to replace.

    A file that has the content already is not touched.

    Args:
        instead: as `require_own` takes it.

    Raises:
        DataFileError: as `require_own`, or the disk refused.
    """
    changed = {path: data for path, data in contents.items() if not _holds(path, data)}
    require_own(changed, instead=instead)
    for path, data in changed.items():
        write_bytes(path, data)
    record(contents)


def record(paths: Iterable[Path]) -> None:
    """Note that `paths` are as WhichLoRA wrote them.

    Raises:
        DataFileError: a record can't be read or written.
    """
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.parent, []).append(path)
    for folder, written in by_folder.items():
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock_file(descriptor)  # two commands may write into one folder
            known = _recorded(folder)
            new = {name: digest for name, digest in known.items() if (folder / name).is_file()}
            new |= {path.name: _digest(path) for path in written}
            if new != known:
                write_object(folder / RECORD, {"schema_version": _SCHEMA_VERSION, "files": new})
        finally:
            os.close(descriptor)


def remove_own(paths: Iterable[Path]) -> list[Path]:
    """Remove those that are as WhichLoRA wrote them, and name them.

    Raises:
        DataFileError: one can't be removed.
    """
    removed = [path for path in paths if path.is_file() and is_own(path)]
    for path in removed:
        try:
            path.unlink()
        except OSError as error:
            raise DataFileError(f"{path}: can't be removed ({error.strerror})") from None
    return removed


def is_own(path: Path) -> bool:
    """Whether `path` is there, as WhichLoRA wrote it."""
    recorded = _recorded(path.parent).get(path.name)
    return recorded is not None and path.is_file() and recorded == _digest(path)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _recorded(folder: Path) -> Mapping[str, Any]:
    path = folder / RECORD
    files = read_object(path).get("files") if path.is_file() else None
    return files if isinstance(files, dict) else {}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be read ({error.strerror}); check the folder and the disk"
        ) from None
