"""Locks that end with their process, however it ends, and the name of the holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whichlora.errors import DataFileError
from whichlora.store.jsonfiles import parse_object

LOCK_FILE = ".lock"
_OWNER_FILE = ".lock.owner"  # replaces the lock where the file system has none
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_OWNER_BYTES = 4096


def lock_file(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file for this process alone; False where its file system has no locks.

    The kernel ends the lock with the process, so that a kill leaves nothing behind. NFS has had
    these locks between hosts since Linux 2.6.12; Lustre only where it is mounted with `flock`.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def unlock_file(descriptor: int) -> None:
    """End the lock of `lock_file` before the file is closed."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep every other process out of `folder` while the block runs.

    A folder that was made for it goes where the block leaves nothing in it.

    Raises:
        DataFileError: another process is at work there, or the folder can't be written.
    """
    path = folder / LOCK_FILE
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise DataFileError(
            f"{folder}: can't be written ({error.strerror}); set output_dir to a folder of yours"
        ) from None
    owner_file = None
    try:
        try:
            if not lock_file(descriptor, wait=False):
                owner_file = folder / _OWNER_FILE
                _create_owner_file(owner_file)
        except BlockingIOError:
            raise _in_use(folder, os.pread(descriptor, _OWNER_BYTES, 0)) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_process(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        if owner_file is not None:
            owner_file.unlink(missing_ok=True)
        if is_new and [each.name for each in folder.iterdir()] == [LOCK_FILE]:
            path.unlink()
            with suppress(OSError):  # somebody else may write there by now
                folder.rmdir()
        os.close(descriptor)


def _create_owner_file(path: Path) -> None:
    """Stand in for a lock: a file that only one process can create.

    A killed process leaves it behind. Its own host can tell; another host can't, so the message
    names the file.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if content and _has_ended(_owner(content)):
        path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            file.write(_this_process())
    except FileExistsError:
        error = _in_use(path.parent, content)
        raise DataFileError(f"{error}; if it has ended, remove {path}") from None


def _this_process() -> bytes:
    pid = os.getpid()
    owner = {
        "host": platform.node(),
        "pid": pid,
        "process_start": process_start(pid),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return json.dumps(owner).encode() + b"\n"


def _owner(content: bytes) -> dict[str, Any]:
    """The holder's record; empty where it has not written one yet."""
    with suppress(DataFileError):
        return parse_object(content, "")
    return {}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote `owner` ran on this host and is gone."""
    return owner.get("host") == platform.node() and owner.get("process_start") != process_start(
        owner.get("pid", 0)
    )


def _in_use(folder: Path, content: bytes) -> DataFileError:
    owner = _owner(content)
    holder = "another process"
    if {"pid", "host", "since"} <= owner.keys():
        holder = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    return DataFileError(
        f"{folder}: another process is at work there ({holder}); wait for it, end it, or give this "
        "one an output_dir of its own"
    )


def process_start(pid: int | str) -> str:
    """When process `pid` started, in the kernel's ticks; empty where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
