"""One start at a time in an output folder, whatever becomes of the other."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whichlora.errors import DataFileError
from whichlora.store.locks import LOCK_FILE, hold_folder, lock_file, unlock_file

HOLDER = """
import sys, time
from pathlib import Path
from whichlora.store.locks import LOCK_FILE, hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_second_start_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "out")
    try:
        with pytest.raises(DataFileError) as refused, hold_folder(tmp_path / "out"):
            pass
    finally:
        holder.kill()
        holder.wait()
    host = re.escape(os.uname().nodename)
    assert re.fullmatch(
        rf".*/out: another process is at work there \(process {holder.pid} on {host}, since \S+\); "
        "wait for it, end it, or give this one an output_dir of its own",
        str(refused.value),
    )


def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with hold_folder(tmp_path):
        pass


def test_a_folder_is_free_after_its_block_and_after_an_error_in_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_folder(tmp_path):
        raise ZeroDivisionError
    with hold_folder(tmp_path), pytest.raises(DataFileError), hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path):
        pass


def test_without_locks_a_file_names_the_holder_and_one_left_by_a_kill_here_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        hold_folder(tmp_path),
        pytest.raises(DataFileError, match=rf"process {os.getpid()} on .* if it has ended, remove"),
        hold_folder(tmp_path),
    ):
        pass
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = {"host": os.uname().nodename, "pid": ended.pid, "process_start": "1", "since": ""}
    (tmp_path / ".lock.owner").write_text(json.dumps(owner))
    with hold_folder(tmp_path):
        pass
    assert not (tmp_path / ".lock.owner").exists()


def test_without_locks_nobody_can_tell_of_a_process_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".lock.owner").write_text('{"host": "node7", "pid": 5, "since": "yesterday"}')
    with pytest.raises(DataFileError, match="process 5 on node7"), hold_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFileError, match="set output_dir to a folder of yours"):
        hold_folder(tmp_path / "file" / "out").__enter__()


def test_the_holder_is_named_in_the_file_while_it_holds_it_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("x" * 1000)
    with hold_folder(tmp_path):
        owner = json.loads((tmp_path / LOCK_FILE).read_bytes())
        assert owner["pid"] == os.getpid()
        assert owner["host"] == os.uname().nodename
        assert owner["process_start"]
    assert (tmp_path / LOCK_FILE).read_bytes() == b""


def test_a_lock_waits_for_whoever_holds_it_unless_it_is_told_not_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    holder, waiter = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        assert lock_file(holder)
        with pytest.raises(BlockingIOError):
            lock_file(waiter, wait=False)
        release = threading.Timer(0.1, unlock_file, [holder])
        release.start()
        assert lock_file(waiter)
        release.join()
    finally:
        os.close(holder)
        os.close(waiter)


def test_a_folder_that_was_held_leaves_no_open_file_and_no_owner(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with hold_folder(tmp_path):
        assert (tmp_path / LOCK_FILE).read_bytes()
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_folder_that_was_made_for_nothing_goes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), hold_folder(tmp_path / "made"):
        raise ValueError("refused")
    assert not (tmp_path / "made").exists()
    with hold_folder(tmp_path / "used"):
        (tmp_path / "used" / "answer.json").write_text("{}")
    assert (tmp_path / "used" / "answer.json").is_file()
    (tmp_path / "old").mkdir()
    with hold_folder(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()
