"""Rows with clips of sound: columns that hold them, how long they last, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clips import write_clip

from whichlora.dataset import count_tokens, data_format, first_format, open_dataset
from whichlora.dataset.audio import clip_of, file_seconds, found_in, seconds_of
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.data_format import TEXT_ROWS, TRANSCRIPTS
from whichlora.spec.plan import DatasetConfig

IN_ROW = {"path": None, "array": [0.0] * 8_000, "sampling_rate": 16_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_clip(tmp_path / "a.wav", 1.25)
    return tmp_path


@pytest.fixture
def data(folder: Path) -> Callable[..., DatasetConfig]:
    def written(*rows: dict[str, Any], **settings: Any) -> DatasetConfig:
        path = folder / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetConfig(path=str(path), validation_fraction=0.0, **settings)

    return written


@pytest.mark.parametrize(
    "row",
    [
        {"audio": "a.wav", "text": "So."},
        {"audio": {"path": "a.wav", "bytes": None}, "sentence": "So.", "locale": "en"},
        {"audio_filepath": "a.wav", "duration": 1.25, "text": "So."},
        {"path": "x.mp3", "audio": "a.wav", "transcription": "So."},
    ],
)
def test_clips_and_transcripts_are_known_by_their_columns(
    data: Callable[..., DatasetConfig], folder: Path, row: dict[str, Any]
) -> None:
    dataset = open_dataset(data(row))
    (example,) = dataset.splits()["train"]
    assert example == {"audio": str(folder / "a.wav"), "text": "So."}
    assert data_format(dataset) == TRANSCRIPTS
    assert seconds_of(example) == 1.25
    assert " -> " in dataset.describe()


def test_samples_may_stand_in_the_row(data: Callable[..., DatasetConfig]) -> None:
    (example,) = open_dataset(data({"audio": IN_ROW, "text": "So."})).splits()["train"]
    assert example["audio"] == {"array": [0.0] * 8_000, "sampling_rate": 16_000}
    assert seconds_of(example) == 0.5
    assert seconds_of({"text": "So."}) == 0.0


def test_columns_that_are_named_decide(data: Callable[..., DatasetConfig]) -> None:
    row = {"audio": "a.wav", "text": "So.", "raw": "so", "other": "a.wav"}
    assert data_format(open_dataset(data(row, text_column="text"))) == TEXT_ROWS
    named = open_dataset(data(row, audio_column="other", text_column="raw"))
    assert named.splits()["train"][0]["text"] == "so"
    with pytest.raises(DataFileError, match="audio_column: 'other' goes with its transcript"):
        open_dataset(data({"other": "a.wav", "said": "So."}, audio_column="other"))


FAULTS: dict[str, tuple[Any, str]] = {
    "missing": ("gone.wav", ":1: audio .*gone.wav: is missing; correct the path"),
    "no sound": (
        "data.jsonl",
        ":1: audio .*: is no PCM WAV .*, and soundfile, which reads other files, is not installed",
    ),
    "bytes": ({"bytes": "x", "path": None}, ":1: audio must be the path of a file, or array"),
    "an address": ("https://a.org/b.wav", ":1: audio must be a file, got 'https"),
}


@pytest.mark.parametrize(("clip", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_clip_is_told_with_its_line(
    data: Callable[..., DatasetConfig],
    monkeypatch: pytest.MonkeyPatch,
    clip: Any,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataFileError, match=message):
        open_dataset(data({"audio": clip, "text": "So."}))


def test_other_files_are_read_by_soundfile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def info(path: str) -> Any:
            if path.endswith("b.flac"):
                return type("Info", (), {"frames": 24_000, "samplerate": 16_000})
            raise RuntimeError("unknown format")

    monkeypatch.setitem(sys.modules, "soundfile", Library)
    for name in ("b.flac", "c.flac"):
        (folder / name).write_bytes(b"fLaC")
    assert file_seconds(str(folder / "b.flac")) == 1.5
    with pytest.raises(ConfigError, match=r"can't be read as sound \(unknown format\)"):
        found_in(folder, {"audio": "c.flac", "text": ""})
    assert clip_of({"path": "b.flac"}) == "b.flac"


def test_rows_that_are_too_long_are_left_out(data: Callable[..., DatasetConfig]) -> None:
    rows = [{"audio": "a.wav", "text": text} for text in ("So.", "a long one " * 9)]
    dataset = open_dataset(data(*rows))
    settings = {"tokenizer": None, "offline": True}
    counted = count_tokens(dataset, max_length=20, window_s=30.0, **settings)
    assert counted.lengths["train"] == (3,)  # one of the text, and two of the three around it
    assert "1 rows are left out: they are longer than 30 s of audio, or than 20 tokens" in (
        counted.describe()
    )
    with pytest.raises(ConfigError, match="no clip is within 1 s and its transcript within 20"):
        count_tokens(dataset, max_length=20, window_s=1.0, **settings)


def test_a_model_that_writes_no_transcripts_is_refused(
    data: Callable[..., DatasetConfig],
) -> None:
    config = data({"audio": "a.wav", "text": "So."})
    assert first_format(config.path) == TRANSCRIPTS
    settings = {"offline": True, "max_length": 20}
    with pytest.raises(ConfigError, match="org/model does not learn from; give a model such as"):
        count_tokens(open_dataset(config), tokenizer="org/model", **settings)
    with pytest.raises(ConfigError, match="weights: random has no processor for the audio"):
        count_tokens(open_dataset(config), tokenizer="bytes", window_s=30.0, **settings)
