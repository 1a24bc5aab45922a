"""Files for people: what WhichLoRA wrote it may replace, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from whichlora.errors import DataFileError
from whichlora.store.written import (
    OTHER_OUTPUT,
    RECORD,
    is_own,
    remove_own,
    require_own,
    write_files,
)


def write(folder: Path, **texts: str) -> None:
    files = {folder / f"{name}.py": text.encode() for name, text in texts.items()}
    write_files(files, instead=OTHER_OUTPUT)


def test_what_was_written_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, train="one")
    write(tmp_path, train="two")
    assert (tmp_path / "train.py").read_text() == "two"
    assert is_own(tmp_path / "train.py")


def test_a_file_of_the_user_stops_the_others_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    with pytest.raises(DataFileError, match=r"mine\.py: exists.*give another --output, or rename"):
        write(tmp_path, other="new", mine="new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_an_edited_file_is_kept(tmp_path: Path) -> None:
    write(tmp_path, train="one")
    (tmp_path / "train.py").write_text("one, edited")
    with pytest.raises(DataFileError, match="was edited since WhichLoRA wrote it"):
        write(tmp_path, train="two")
    with pytest.raises(DataFileError, match="was edited"):
        require_own([tmp_path / "train.py"], instead=OTHER_OUTPUT)
    assert remove_own([tmp_path / "train.py"]) == []
    assert (tmp_path / "train.py").read_text() == "one, edited"


def test_the_same_content_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one")
    before = (tmp_path / "train.py").stat().st_mtime_ns
    write(tmp_path, train="one")
    assert (tmp_path / "train.py").stat().st_mtime_ns == before


def test_a_link_and_a_folder_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "one.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "two.py").mkdir()
    for name in ("one", "two"):
        with pytest.raises(DataFileError, match="no record"):
            write(tmp_path, **{name: "new"})


def test_only_own_files_are_removed_and_then_forgotten(tmp_path: Path) -> None:
    write(tmp_path, train="one", other="two")
    (tmp_path / "mine.py").write_text("mine")
    paths = [tmp_path / f"{name}.py" for name in ("train", "mine", "absent")]
    assert remove_own(paths) == [tmp_path / "train.py"]
    write(tmp_path, other="three")
    assert "train.py" not in (tmp_path / RECORD).read_text()
