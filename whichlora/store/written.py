"""Files for people, of which WhichLoRA replaces and removes only what it wrote itself.

Every folder has a record: file name → digest of what was written there last, and of what is being
written. What has another digest was made or edited by somebody else. A folder of a run from before
there were records is taken as it stands.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from whichlora.errors import DataFileError
from whichlora.store.jsonfiles import read_object, write_bytes, write_object
from whichlora.store.locks import lock_file

RECORD = ".whichlora.json"
OTHER_FOLDER = "set another output_dir"
OTHER_OUTPUT = "give another --output"
# What a run writes into its folder: the answer, the job, the data and what stands beside them.
OF_A_RUN = frozenset(
    {"answer.json", "answer.md", "candidates.csv", "predicted_vs_measured.csv", "report.html"}
    | {"recipe.json", "train.py", "train.sbatch", "serve.sh", "accelerate.yaml", "deepspeed.json"}
    | {"train.jsonl", "validation.jsonl"}
)
_SCHEMA_VERSION = 1
# Keys of what only a run writes.
_MARKS: Mapping[str, Collection[str]] = {
    "run.json": ("schema_version", "run_id"),
    "answer.json": ("schema_version", "config", "gpu", "winner"),
}


def begin(folder: Path) -> None:
    """Make the record of a folder that has none, before a run writes into it.

    Whatever is put there later is not WhichLoRA's, even where the run is stopped before it writes.

    Raises:
        DataFileError: the record can't be written.
    """
    if not (folder / RECORD).is_file():
        _update(folder, {}, {})


def require_own(paths: Iterable[Path], *, instead: str) -> None:
    """Refuse before anything is written what `write_files` would refuse, all of it at once.

    Args:
        instead: where else the user may have it written, such as "give another --output".

    Raises:
        DataFileError: some of them are there, and are not as WhichLoRA wrote them.
    """
    unknown, edited = [], []
    for folder, there in _by_folder(path for path in paths if os.path.lexists(path)).items():
        recorded = _recorded(folder)
        unknown += [path for path in there if path.name not in recorded]
        edited += [path for path in there if path.name in recorded and not _is_in(recorded, path)]
    clauses = []
    if unknown:
        exists, it = ("exists", "it") if len(unknown) == 1 else ("exist", "them")
        clauses.append(f"{_listed(unknown)}: {exists}, and WhichLoRA has no record of writing {it}")
    if edited:
        was, it = ("was", "it") if len(edited) == 1 else ("were", "them")
        clauses.append(f"{_listed(edited)}: {was} edited since WhichLoRA wrote {it}")
    if clauses:
        it = "it" if len(unknown) + len(edited) == 1 else "them"
        raise DataFileError(f"{'; '.join([*clauses, instead])}, or rename {it}")


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


def write_files(contents: Mapping[Path, bytes], *, instead: str) -> None:
    """Write all files, or none where one of them is not WhichLoRA's to replace.

    A file that has the content already is not touched. A kill leaves files that are all
    WhichLoRA's: the record knows the new ones before they are there.

    Args:
        instead: as `require_own` takes it.

    Raises:
        DataFileError: as `require_own`, or the disk refused.
    """
    changed = {path: data for path, data in contents.items() if not _holds(path, data)}
    require_own(changed, instead=instead)
    announce({path: hashlib.sha256(data).hexdigest() for path, data in changed.items()})
    for path, data in changed.items():
        write_bytes(path, data)
    record(contents)


def replace_file(path: Path, new: Path) -> None:
    """Put `new`, a finished file of the same folder, in the place of `path`.

    Raises:
        DataFileError: a record or a file can't be read or written.
        OSError: the disk refused the move.
    """
    announce({path: _digest(new)})
    new.replace(path)
    record([path])


def announce(digests: Mapping[Path, str]) -> None:
    """Note what is about to be written; what the files hold until then stays known.

    Raises:
        DataFileError: a record can't be read or written.
    """
    for folder, paths in _by_folder(digests).items():
        _update(folder, {}, {path.name: digests[path] for path in paths})


def record(paths: Iterable[Path]) -> None:
    """Note that `paths` are as WhichLoRA wrote them.

    Raises:
        DataFileError: a record can't be read or written.
    """
    for folder, written in _by_folder(paths).items():
        _update(folder, {path.name: _digest(path) for path in written}, {})


def _by_folder(paths: Iterable[Path]) -> Mapping[Path, list[Path]]:
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.parent, []).append(path)
    return by_folder


def _update(folder: Path, written: Mapping[str, str], announced: Mapping[str, str]) -> None:
    """Replace the record of `folder` by one that has these digests, too."""
    path = folder / RECORD
    first = folder / next(iter({**written, **announced}), RECORD)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataFileError(
            f"{first}: can't be written ({error.strerror}); check the folder and the disk"
        ) from None
    try:
        lock_file(descriptor)  # two commands may write into one folder
        known = _recorded(folder)
        new = {name: list(digests) for name, digests in known.items() if (folder / name).is_file()}
        new |= {name: [digest] for name, digest in written.items()}
        for name, digest in announced.items():
            new[name] = list(dict.fromkeys([*known.get(name, ()), digest]))
        if new != known or not path.is_file():
            write_object(path, {"schema_version": _SCHEMA_VERSION, "files": new})
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
    return path.is_file() and _is_in(_recorded(path.parent), path)


def _is_in(recorded: Mapping[str, list[str]], path: Path) -> bool:
    return path.name in recorded and path.is_file() and _digest(path) in recorded[path.name]


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _recorded(folder: Path) -> Mapping[str, list[str]]:
    """Digests that each file may have: of what was written, and of what was about to be."""
    path = folder / RECORD
    if not path.is_file():
        return _found(folder)
    files = read_object(path).get("files")
    if not isinstance(files, dict):
        return {}
    return {name: each if isinstance(each, list) else [each] for name, each in files.items()}


def _found(folder: Path) -> Mapping[str, list[str]]:
    """What an older WhichLoRA left in the folder of a run; nothing in any other folder."""
    if not any(_has_marks(folder / name, keys) for name, keys in _MARKS.items()):
        return {}
    paths = (folder / name for name in sorted(OF_A_RUN))
    return {path.name: [_digest(path)] for path in paths if path.is_file()}


def _has_marks(path: Path, keys: Collection[str]) -> bool:
    try:
        return path.is_file() and read_object(path).keys() >= set(keys)
    except DataFileError:
        return False


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be read ({error.strerror}); check the folder and the disk"
        ) from None
