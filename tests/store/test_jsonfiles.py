"""Strict JSON in, whole JSON out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError, DataFileError
from whichlora.store import jsonfiles
from whichlora.store.jsonfiles import (
    check_plain_file,
    check_schema_version,
    is_slug,
    parse_object,
    read_object,
    require_slug,
    write_object,
)


def test_a_file_is_written_for_people_and_diffs(tmp_path: Path) -> None:
    """Sorted, indented by two, in its own letters, and with an end of line."""
    path = tmp_path / "a.json"
    write_object(path, {"b": [1], "a": "µ"})
    text = '{\n  "a": "µ",\n  "b": [\n    1\n  ]\n}\n'
    assert path.read_bytes() == text.encode()
    write_object(path, {"a": 1})
    assert read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_is_no_json_is_not_written_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_object(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_object(path, {"a": float("nan")})
    assert read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("text", ["a", "a100-sxm-80gb", "qwen2.5", "a" * 120])
def test_a_name_of_a_folder(text: str) -> None:
    assert is_slug(text)
    assert require_slug("gpu", text) == text


@pytest.mark.parametrize("text", ["", "A", "a--b", "..", "a/b", "-a", "a.", "a" * 121, "a\n"])
def test_what_cannot_name_a_folder(text: str) -> None:
    assert not is_slug(text)
    with pytest.raises(ConfigError, match="can't name a folder"):
        require_slug("gpu", text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "must hold a JSON object, got list"),
    ],
)
def test_what_is_no_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataFileError, match=f"^where: .*{message}"):
        parse_object(data, "where")


def test_a_file_may_have_as_many_bytes_as_are_accepted_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 10)
    check_plain_file(path, 10)
    with pytest.raises(DataFileError, match="has 10 B, at most 9 B are accepted"):
        check_plain_file(path, 9)
    with pytest.raises(DataFileError, match="is a folder, not a file"):
        check_plain_file(tmp_path, 10**9)
    with pytest.raises(DataFileError, match="can't be read"):
        read_object(tmp_path / "none.json")
    assert jsonfiles.MAX_OBJECT_BYTES == 512 * 2**20


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, ""),
        (3, ""),
        (4, "schema_version is 4, this release reads 1 to 3; upgrade"),
        (0, "must be a whole number from 1 to 3, got 0"),
        (True, "got True"),
        ("2", "got '2'"),
        (None, "got None"),
    ],
)
def test_a_newer_file_asks_for_a_newer_release(version: Any, message: str) -> None:
    values = {"schema_version": version}
    if not message:
        check_schema_version(values, 3, "where")
        return
    with pytest.raises(DataFileError, match=message):
        check_schema_version(values, 3, "where")


def test_what_was_written_is_on_the_disk_before_it_takes_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "a.json"
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        place = f"/proc/self/fd/{descriptor}"
        done.append("folder" if os.path.isdir(place) else f"file of {os.stat(place).st_size}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        assert self.read_bytes() == b"text"
        done.append("replaced")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    opened = len(os.listdir("/proc/self/fd"))
    jsonfiles.write_text(path, "text")
    assert done == ["file of 4", "replaced", "folder"]
    assert len(os.listdir("/proc/self/fd")) == opened
