"""Pyodide, CPython compiled for browsers: one pinned release, checked, kept in the user's cache."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import urllib.request
from pathlib import Path

from whichlora.errors import ConfigError, DataFileError
from whichlora.store.jsonfiles import parse_object, write_bytes
from whichlora.store.paths import cache_folder

VERSION = "314.0.7"  # CPython 3.14.2
SHA512 = (  # what https://registry.npmjs.org/pyodide/314.0.7 says of the tarball, in hex
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
URL = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
LOCK = "pyodide-lock.json"
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", LOCK)
_TIMEOUT_S = 60
_MOST_BYTES = 64 * 1024**2


def pyodide_files(source: Path | None = None) -> dict[str, bytes]:
    """The files of Pyodide that a page loads, by name.

    Args:
        source: a folder with them, or the release as npm packs it; None is the pinned release,
            from the cache or the npm registry.

    Raises:
        ConfigError: it can't be downloaded, or is not what was pinned.
        DataFileError: `source` lacks a file.
    """
    if source is not None and source.is_dir():
        return _without_packages({name: _read(source / name) for name in FILES}, source)
    path = source or cached()
    if source is None and not path.is_file():
        write_bytes(path, _checked(_download(), URL))
    data = _read(path)
    found = _unpacked(data if source is not None else _checked(data, str(path)), path)
    return _without_packages(found, path)


def cached() -> Path:
    """Where the pinned release is kept."""
    return cache_folder() / f"pyodide-{VERSION}.tgz"


def _without_packages(found: dict[str, bytes], path: Path) -> dict[str, bytes]:
    """`found`, whose list of packages is empty: predicting needs none.

    Raises:
        DataFileError: the list is none.
    """
    lock = parse_object(found[LOCK], str(path / LOCK))
    return found | {LOCK: json.dumps({"info": lock.get("info"), "packages": {}}).encode()}


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT_S) as answer:
            data: bytes = answer.read(_MOST_BYTES)
    except OSError as error:  # of the network, too
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"pyodide: {URL} can't be downloaded ({reason}); with that file from elsewhere give "
            "--pyodide FILE"
        ) from None
    return data


def _checked(data: bytes, where: str) -> bytes:
    """`data`, if it is the pinned release.

    Raises:
        ConfigError: it is not.
    """
    if hashlib.sha512(data).hexdigest() != SHA512:
        raise ConfigError(
            f"pyodide: {where} is not release {VERSION} (its SHA-512 differs); remove it and try "
            "again, or give --pyodide"
        )
    return data


def _unpacked(data: bytes, path: Path) -> dict[str, bytes]:
    """The files in a package of npm.

    Raises:
        DataFileError: no such package, or a file is missing.
    """
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as package:
            for name in FILES:
                member = package.extractfile(f"package/{name}")
                assert member is not None  # KeyError otherwise
                files[name] = member.read()
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise DataFileError(
            f"{path}: is not pyodide as npm packs it ({error}); get {URL}"
        ) from None
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be read ({error.strerror}); give the folder of the npm package "
            f"pyodide {VERSION}, or {URL}"
        ) from None
