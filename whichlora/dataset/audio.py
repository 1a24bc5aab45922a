"""Rows with sound: where a clip is, and how long it lasts."""

from __future__ import annotations

import importlib
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from whichlora.dataset.base import BaseDataset, Example, Row
from whichlora.errors import ConfigError
from whichlora.spec.data_format import ARRAY, AUDIO, AUDIOS, RATE


def clip_of(value: Any) -> Any:
    """The path of a clip, or its samples and their rate, as a row or `datasets` spells it.

    Raises:
        ConfigError: neither is there.
    """
    if isinstance(value, Mapping):
        array, rate = value.get(ARRAY), value.get(RATE)
        if array is not None and isinstance(rate, int | float) and rate > 0:
            return {ARRAY: [float(sample) for sample in array], RATE: int(rate)}
        value = value.get("path")
    if not isinstance(value, str) or not value:
        got = type(value).__name__
        raise ConfigError(
            f"audio must be the path of a file, or {ARRAY} and {RATE}, got {got}; save it as a file"
        )
    if "://" in value:
        raise ConfigError(
            f"audio must be a file, got {value[:60]!r}; download it and give its path"
        )
    return value


@dataclass(frozen=True, slots=True)
class PlayedClips(BaseDataset):
    """Clips with transcripts as chats: a user plays one, and the transcript is the answer."""

    rows: BaseDataset

    def splits(self) -> Mapping[str, Sequence[Row]]:
        return self.rows.splits()

    def to_example(self, row: Row) -> Example:
        example = self.rows.to_example(row)
        answer = [{"type": "text", "text": example["text"]}]
        return {
            "prompt": [{"role": "user", "content": [{"type": "audio"}]}],
            "completion": [{"role": "assistant", "content": answer}],
            AUDIOS: [example[AUDIO]],
        }

    def describe(self) -> str:
        return self.rows.describe()


def found_in(folder: Path, example: Example) -> Example:
    """`example` with the absolute paths of its clips, which start in `folder`.

    Raises:
        ConfigError: a clip is missing, or can't be read.
    """

    def absolute(clip: Any) -> Any:
        path = str((folder / clip).absolute()) if isinstance(clip, str) else None
        if path is None:
            return clip
        file_seconds(path)
        return path

    clips = {AUDIO: absolute(example[AUDIO])} if AUDIO in example else {}
    if AUDIOS in example:
        clips[AUDIOS] = list(map(absolute, example[AUDIOS]))
    return {**example, **clips}


def seconds_of(example: Example) -> float:
    """How long the longest clip of `example` lasts; 0 where it has none."""
    clips = example.get(AUDIOS, ()) if example.get(AUDIO) is None else (example[AUDIO],)
    return max(map(length_s, clips), default=0.0)


def length_s(clip: Any) -> float:
    """Seconds of a clip, whatever holds it."""
    return file_seconds(clip) if isinstance(clip, str) else len(clip[ARRAY]) / float(clip[RATE])


@lru_cache(maxsize=1_000_000)
def file_seconds(path: str) -> float:
    """Seconds of a file of sound, of which the header alone is read.

    Kind: exact. Source: `wave` of the standard library, for PCM; soundfile's `info` else.

    Raises:
        ConfigError: it is missing, or can't be read.
    """
    try:
        with wave.open(path, "rb") as clip:
            return clip.getnframes() / clip.getframerate()
    except FileNotFoundError:
        raise ConfigError(
            f"audio {path}: is missing; correct the path, which starts in the folder of the data"
        ) from None
    except (wave.Error, EOFError, OSError, ZeroDivisionError) as error:
        return _seconds_by_library(path, str(error))


def _seconds_by_library(path: str, why: str) -> float:
    """Seconds of a file that is no WAV of PCM."""
    try:
        soundfile = importlib.import_module("soundfile")
    except ImportError:
        raise ConfigError(
            f"audio {path}: is no PCM WAV ({why or 'it is cut off'}), and soundfile, which reads "
            "other files, is not installed; pip install soundfile, or save it as WAV"
        ) from None
    try:
        info = soundfile.info(path)
        return float(info.frames / info.samplerate)
    except Exception as error:  # soundfile raises what its library tells
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"audio {path}: can't be read as sound ({reason}); write it again, or remove the row"
        ) from None
