"""Clips of a tone, as samples and as WAV files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> Any:
    """Samples of a tone, from -1 to 1."""
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate) / 2


def write_clip(
    path: Path, seconds: float, *, rate: int = 16_000, channels: int = 1, width: int = 2
) -> Path:
    """A WAV file of a tone, in `width` bytes a sample."""
    levels = np.round(tone(seconds, rate) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    levels += 128 * (width == 1)
    wide = np.repeat(levels, channels).astype("<i8").view(np.uint8).reshape(-1, 8)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(wide[:, :width].tobytes())
    return path
