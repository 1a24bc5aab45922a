"""Read strict JSON and write JSON files atomically, for every data file of the store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from whichlora.errors import ConfigError, DataFileError
from whichlora.units import MiB, format_bytes

_SLUG = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_MAX_SLUG = 120
MAX_OBJECT_BYTES = 512 * MiB  # the answer of 100,000 candidates has less


def is_slug(text: str) -> bool:
    """Whether `text` may name a file or folder of the store; no such name leaves its folder."""
    return len(text) <= _MAX_SLUG and _SLUG.fullmatch(text) is not None


def require_slug(setting: str, text: str) -> str:
    """`text`, if it may name a file of the store.

    Raises:
        ConfigError: it has anything but lower-case letters, digits, single dots and dashes.
    """
    if not is_slug(text):
        raise ConfigError(
            f"{setting}: {text!r} can't name a folder; use lower-case letters, digits, "
            f"and single '-' or '.' between them, {_MAX_SLUG} characters at most"
        )
    return text


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Built once: json.loads with an option builds a decoder per call, which shows in 10,000 lines.
_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that `data` spells; `where` (path, or path:line) starts every message.

    Raises:
        DataFileError: not UTF-8, not JSON, NaN or Infinity, nested too deeply, or no object.
    """
    try:
        value = _decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{where}: is not valid JSON ({error}); repair or remove it") from None
    if not isinstance(value, dict):
        raise DataFileError(
            f"{where}: must hold a JSON object, got {type(value).__name__}; correct it"
        )
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        DataFileError: the file can't be read, or `parse_object` refuses it.
    """
    try:
        check_plain_file(path, MAX_OBJECT_BYTES)
        data = path.read_bytes()
    except OSError as error:
        raise DataFileError(f"{path}: can't be read ({error.strerror}); check the file") from None
    return parse_object(data, str(path))


def check_plain_file(path: Path, most_bytes: int) -> None:
    """Refuse what is no plain data file: a pipe may never end, a huge file takes all memory.

    Raises:
        DataFileError: a folder, a pipe, a device, or more than `most_bytes`.
        OSError: the path can't be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise DataFileError(f"{path}: is {kind}, not a file; remove or rename it")
    if status.st_size > most_bytes:
        raise DataFileError(
            f"{path}: has {format_bytes(status.st_size)}, at most {format_bytes(most_bytes)} are "
            "accepted; check the file"
        )


def check_schema_version(values: Mapping[str, Any], newest: int, where: str) -> None:
    """Refuse a file that is newer than this release.

    Raises:
        DataFileError: `schema_version` is missing, not a whole number, or out of range.
    """
    version = values.get("schema_version")
    if type(version) is int and 1 <= version <= newest:
        return
    if type(version) is int and version > newest:
        raise DataFileError(
            f"{where}: schema_version is {version}, this release reads 1 to {newest}; "
            "upgrade whichlora"
        )
    raise DataFileError(
        f"{where}: schema_version: must be a whole number from 1 to {newest}, got {version!r}"
    )


def check_fields(
    values: Mapping[str, Any], fields: Mapping[str, tuple[str, Callable[[Any], bool]]], where: str
) -> None:
    """Refuse what is no field, and a value that its field does not accept.

    Raises:
        DataFileError: naming the key, what is accepted and what to do.
    """
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise DataFileError(
            f"{where}: {unknown[0]}: is not a field; known are {', '.join(fields)}; correct it"
        )
    for field, (accepted, is_valid) in fields.items():
        if not is_valid(values.get(field)):
            problem = f"got {values[field]!r}" if field in values else "missing"
            raise DataFileError(f"{where}: {field}: {problem}; must be {accepted}; correct it")


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file at `path` in one step: readers see the old file or the new one, whole.

    Raises:
        DataFileError: the disk refused; the old file is untouched.
    """
    write_bytes(path, object_bytes(values))


def object_bytes(values: Mapping[str, Any]) -> bytes:
    """`values` as JSON for a file."""
    text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    # half a surrogate pair, which JSON may escape and UTF-8 can't hold, stays escaped
    return (text + "\n").encode(errors="backslashreplace")


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at `path` by `data` in one step, folders made as needed.

    Raises:
        DataFileError: the disk refused; the old file is untouched.
    """
    # The name holds the process and a random part: writers on several hosts share this folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be written ({error.strerror}); check the folder and the disk"
        ) from None
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in one step, as `write_bytes` does.

    Raises:
        DataFileError: the disk refused; the old file is untouched.
    """
    write_bytes(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Make new entries of `folder` survive a power cut; fsync of a file covers only the file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems can't; their server orders the entries.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
