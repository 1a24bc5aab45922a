"""Databases elsewhere: any folder that fsspec reaches (a directory, s3://, hf://datasets/…)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from whichlora.calibration.share.union import (
    MAX_FILES,
    MAX_TOTAL_BYTES,
    Impossible,
    Merged,
    Placed,
    Source,
    add,
    new_records,
    packed,
    read_source,
)
from whichlora.errors import ConfigError, DataFileError, WhichLoraError
from whichlora.store.jsonfiles import is_slug, write_bytes

_CHUNK_BYTES = 1 << 20


def pull(
    url: str,
    roots: Sequence[Path],
    *,
    impossible: Impossible,
    is_known: Callable[[str], bool],
) -> Merged:
    """Merge the database at `url` into `roots[0]`.

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, or anything in it is broken; nothing is written then.
    """
    with _fetched(url) as source:
        if source is None:
            raise DataFileError(f"{url}: holds no records, or is not there; check the address")
        return add(roots, source, impossible=impossible, is_known=is_known)


def push(url: str, records: Sequence[Placed], *, impossible: Impossible) -> int:
    """Add to the database at `url` what it lacks of `records`; how many that were.

    One new file per device, named by its content: nothing there is changed or overwritten.

    Raises:
        ConfigError: no such protocol, or its library is not installed.
        DataFileError: it can't be reached, is broken, or holds another record under the same id.
    """
    with _fetched(url) as source:
        theirs = source.records if source else ()
        fresh = new_records(records, theirs, impossible)
    system, root = _connect(url)
    for gpu in sorted({record.gpu for record in fresh}):
        name, data = packed([record for record in fresh if record.gpu == gpu])
        target = f"{root.rstrip('/')}/{gpu}/measurements/{name}"
        with _reaching(url):
            if "file" in _protocols(system):  # a reader must not see half a file
                write_bytes(Path(target), data)
            elif not system.exists(target):
                system.pipe_file(target, data)
    return len(fresh)


def _connect(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"{url}: needs fsspec, which is not installed; pip install 'whichlora[cluster]'"
        ) from None
    if "::" in url:
        raise ConfigError(f"{url}: chained protocols are not accepted; give the folder itself")
    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        protocol = url.partition("://")[0]
        raise ConfigError(f"{protocol}://: its library is not installed ({error})") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    except OSError as error:  # some protocols connect here
        raise DataFileError(f"{url}: can't be reached ({error}); check the address") from None
    return system, str(root)


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Errors of a file system in one line; each protocol's library has exceptions of its own."""
    try:
        yield
    except WhichLoraError:
        raise
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DataFileError(
            f"{url}: can't be reached ({first}); check address and access"
        ) from None


@contextmanager
def _named(url: str, folder: str) -> Iterator[None]:
    """Messages that name the copy in `folder` name the address instead."""
    try:
        yield
    except DataFileError as error:
        raise DataFileError(str(error).replace(folder, url.rstrip("/"))) from None


@contextmanager
def _fetched(url: str) -> Iterator[Source | None]:
    """The database at `url`, copied and checked; None where it has no record files."""
    system, root = _connect(url)
    with tempfile.TemporaryDirectory(prefix="whichlora-") as folder:
        copy = Path(folder, PurePosixPath(root).name or "root")  # one device's folder has its name
        with _reaching(url):
            count = _copy(system, root, copy, url)
        with _named(url, str(copy)):
            yield read_source(copy) if count else None


def _copy(system: Any, root: str, copy: Path, url: str) -> int:
    """Copy all record and device files below `root`; how many record files there were."""
    if not system.exists(root):
        return 0
    listed: dict[str, dict[str, Any]] = system.find(root, detail=True)
    base = PurePosixPath(str(system._strip_protocol(root)))
    remaining_bytes = MAX_TOTAL_BYTES
    count = 0
    for number, (name, info) in enumerate(sorted(listed.items())):
        path = PurePosixPath(name)
        if path.suffix != ".jsonl" and path.name != "gpu.json":
            continue
        parts = path.relative_to(base).parts if path.is_relative_to(base) else ("..",)
        if info.get("islink") or not all(is_slug(part.lower()) for part in parts):
            raise DataFileError(f"{url}: {name!r} could lead out of the folder; remove it")
        if number >= MAX_FILES or int(info.get("size") or 0) > remaining_bytes:
            raise _too_large(url)
        target = copy.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with system.open(name, "rb") as remote, target.open("xb") as file:
            while chunk := remote.read(_CHUNK_BYTES):
                remaining_bytes -= len(chunk)  # what was announced may not be what comes
                if remaining_bytes < 0:
                    raise _too_large(url)
                file.write(chunk)
        count += path.suffix == ".jsonl"
    return count


def _too_large(url: str) -> DataFileError:
    return DataFileError(f"{url}: has more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes")
