"""Rows with clips of sound: columns that hold them, how long they last, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clips import write_clip

from whichlora.dataset import count_tokens, data_format, first_format, open_dataset
from whichlora.dataset.audio import PlayedClips, clip_of, file_seconds, found_in, seconds_of
from whichlora.dataset.images import heaviest, image_tokens, sizes_of
from whichlora.errors import ConfigError, DataFileError
from whichlora.families.towers.qwen2_audio import PooledClipGrid
from whichlora.spec.data_format import AUDIO_ROWS, TEXT_ROWS, TRANSCRIPTS
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.run import RunConfig

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


USER, ANSWER = {"role": "user"}, {"role": "assistant", "content": "So."}
CLIP, TEXT = {"type": "audio"}, {"type": "text", "text": "Why?"}
BESIDE: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"question": "Why?", "answer": "So.", "audio": "a.wav"}, [CLIP, TEXT]),
    ({"question": "Why?<audio>", "answer": "So.", "audios": ["a.wav"]}, [TEXT, CLIP]),
    ({"messages": [USER | {"content": [TEXT, CLIP]}, ANSWER], "audios": ["a.wav"]}, [TEXT, CLIP]),
    (
        {"messages": [USER | {"content": [CLIP | {"audio_url": "a.wav"}, TEXT]}, ANSWER]},
        [CLIP, TEXT],
    ),
    (
        {
            "conversations": [{"from": "human", "value": "<audio>Why?"}, ANSWER],
            "wav": {"path": "a.wav", "bytes": None},
        },
        [CLIP, TEXT],
    ),
]


@pytest.mark.parametrize(("row", "user"), BESIDE)
def test_clips_beside_messages_are_read_from_a_column_or_from_parts(
    data: Callable[..., DatasetConfig], folder: Path, row: dict[str, Any], user: Any
) -> None:
    dataset = open_dataset(data(row))
    (example,) = dataset.splits()["train"]
    assert example["audios"] == [str(folder / "a.wav")]
    messages = example.get("messages", example.get("prompt"))
    assert messages[0] == {"role": "user", "content": user}
    assert data_format(dataset).media == "audios"
    assert sizes_of(example) == ((20_000, 0),)
    assert seconds_of(example) == 1.25


def test_clips_of_named_columns_stand_beside_messages(data: Callable[..., DatasetConfig]) -> None:
    row = {"Q": "Why?", "A": "So.", "clip": [IN_ROW, "a.wav"], "text": "not this"}
    names = {"prompt_column": "Q", "completion_column": "A", "audio_column": "clip"}
    dataset = open_dataset(data(row, **names))
    (example,) = dataset.splits()["train"]
    assert example["prompt"] == [USER | {"content": [CLIP, CLIP, TEXT]}]
    assert sizes_of(example) == ((8_000, 0), (20_000, 0))
    assert data_format(dataset) == replace(AUDIO_ROWS, kind="prompt-completion")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "<audio><audio>", "answer": "So.", "audio": "a.wav"},
            "has 1 audios, and its messages have 2 places for them",
        ),
        ({"question": "Q", "answer": "So.", "audio": "b.wav"}, "audio .*b.wav: is missing"),
        ({"question": "Q", "answer": "So.", "audio": 3}, ""),
        (
            {
                "messages": [USER | {"content": [CLIP, {"type": "image"}]}, ANSWER],
                "audios": ["a.wav"],
                "images": ["a.png"],
            },
            "has audios beside images",
        ),
    ],
)
def test_a_fault_of_a_clip_beside_messages_is_told(
    data: Callable[..., DatasetConfig], row: dict[str, Any], message: str
) -> None:
    if not message:  # no clip: a column that is left out
        assert data_format(open_dataset(data(row))).media == ""
        return
    with pytest.raises(DataFileError, match=message):
        open_dataset(data(row))


def test_a_run_states_the_most_clips_and_the_longest() -> None:
    grid = PooledClipGrid(positions=1500, mel_bins=128)
    rows = (((16_000, 0),), ((16_000, 0), (32_000, 0)), ((8_000, 0), (16_000, 0)))
    most = heaviest(rows, grid)
    assert most is not None
    run = most.shown(RunConfig(model="m"))
    assert (run.audios, run.audio_seconds, run.images) == (2, 2.0, 0)
    assert most.room(grid) == 2 * (50 + 2 + 1) + 2
    assert image_tokens({"audios": [IN_ROW]}, grid) == 12 + 2
    assert image_tokens({"audios": [IN_ROW]}, grid, rendered=True) == 12 - 1


def test_a_transcript_answers_its_clip_where_a_model_reads_clips_beside_messages(
    data: Callable[..., DatasetConfig], folder: Path
) -> None:
    dataset = PlayedClips(open_dataset(data({"audio": "a.wav", "text": "So."})))
    (row,) = dataset.splits()["train"]
    assert dataset.to_example(row) == {
        "prompt": [USER | {"content": [CLIP]}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": "So."}]}],
        "audios": [str(folder / "a.wav")],
    }
    assert data_format(dataset) == replace(AUDIO_ROWS, kind="prompt-completion")
    assert dataset.describe() == "audio -> text as text"
    settings = {"tokenizer": None, "offline": True, "max_length": 99}
    grid = PooledClipGrid(positions=1500, mel_bins=128)
    counted = count_tokens(dataset, grid=grid, window_s=30.0, **settings)
    assert counted.image_sizes["train"] == (((20_000, 0),),)
    with pytest.raises(ConfigError, match="no row has room within 99 tokens for its audios"):
        count_tokens(dataset, grid=grid, window_s=1.0, **settings)
    with pytest.raises(ConfigError, match="rows have audios, and those of this model are not pred"):
        count_tokens(dataset, **settings)


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
