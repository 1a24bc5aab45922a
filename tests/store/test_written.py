"""Files for people: what WhichLoRA wrote it may replace, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whichlora.errors import DataFileError
from whichlora.store import written
from whichlora.store.written import (
    OTHER_OUTPUT,
    RECORD,
    begin,
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


def test_all_files_in_the_way_are_named_at_once(tmp_path: Path) -> None:
    write(tmp_path, train="one")
    for name in ("train", "one", "two"):
        (tmp_path / f"{name}.py").write_text("mine")
    one, two, train = (tmp_path / f"{name}.py" for name in ("one", "two", "train"))
    with pytest.raises(DataFileError) as caught:
        write(tmp_path, one="new", train="new", two="new")
    assert str(caught.value) == (
        f"{one}, {two}: exist, and WhichLoRA has no record of writing them; "
        f"{train}: was edited since WhichLoRA wrote it; give another --output, or rename them"
    )


RUN_STATE = {"schema_version": 1, "run_id": "0" * 32}
ANSWER = {"schema_version": 1, "config": "plan.yaml", "gpu": "l4-24gb", "winner": None}


@pytest.mark.parametrize(("mark", "content"), [("run.json", RUN_STATE), ("answer.json", ANSWER)])
def test_what_a_run_left_before_there_were_records_is_its_own(
    mark: str, content: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / mark).write_text(json.dumps(content))
    (tmp_path / "train.jsonl").write_text("rows")
    (tmp_path / "notes.py").write_text("mine")
    write(tmp_path, train="one")
    (tmp_path / "train.jsonl").write_text("mine")  # there is a record by now
    with pytest.raises(DataFileError, match=r"train\.jsonl: was edited"):
        require_own([tmp_path / "train.jsonl"], instead=OTHER_OUTPUT)
    with pytest.raises(DataFileError, match=r"notes\.py: exists"):
        require_own([tmp_path / "notes.py"], instead=OTHER_OUTPUT)


@pytest.mark.parametrize(
    ("name", "text"), [("answer.json", '{"schema_version": 1}'), ("run.json", "{"), ("a", "")]
)
def test_a_folder_of_somebody_else_is_not_taken_for_that_of_a_run(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(DataFileError, match=r"train\.py: exists"):
        write(tmp_path, train="new")


def test_what_is_put_into_the_folder_of_a_stopped_run_is_not_its_own(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(RUN_STATE))
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(DataFileError, match=r"train\.py: exists"):
        write(tmp_path, train="new")


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_kill_between_two_writes_leaves_files_that_can_be_replaced(
    num_written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, one="old", two="old")
    left = num_written

    def killed(path: Path, data: bytes) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        path.write_bytes(data)

    def kill(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(written, "write_bytes", killed)
        patch.setattr(written, "record", kill)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, one="new", two="new")
    texts = [(tmp_path / f"{name}.py").read_text() for name in ("one", "two")]
    assert texts == ["new"] * num_written + ["old"] * (2 - num_written)
    write(tmp_path, one="newest", two="newest")
    assert (tmp_path / "two.py").read_text() == "newest"
    (tmp_path / "one.py").write_text("old")  # which is known no more
    assert not is_own(tmp_path / "one.py")
