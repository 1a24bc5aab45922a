"""Parse and format bytes, seconds and counts: the only place where units turn into text."""

from __future__ import annotations

import math
import re

from whichlora.errors import ConfigError

KiB = 1024
MiB = 1024**2
GiB = 1024**3
_ROUNDS_UP = 0.9995  # from here on, three digits round up to the next unit
MAX_BYTES = 10**18  # no device, but a slipped unit

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KiB,
    "MIB": MiB,
    "GIB": GiB,
    "TIB": 1024**4,
}
LENGTHS = "4096 or 4k"  # as `parse_tokens` reads them
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, *, setting: str = "size") -> int:
    """Bytes meant by `text`: '24GiB' is 24 * 2**30, '24GB' is 24 * 10**9, a bare number is bytes.

    Raises:
        ConfigError: not a number, or an unknown unit.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or (unit and unit not in _BYTE_UNITS):
        raise ConfigError(
            f"{setting}: {text!r} is not a size; write a number with a unit such as 24GiB or 24GB"
        )
    size = float(match.group(1)) * _BYTE_UNITS.get(unit, 1)
    if size > MAX_BYTES:
        raise ConfigError(f"{setting}: {text[:40]!r} is more than any device has; at most 1EB")
    return int(size)


def parse_tokens(text: str, *, setting: str = "length") -> int:
    """A number of tokens: "4096", or "8k" for 8 x 1024, as people call lengths.

    Raises:
        ConfigError: no such number.
    """
    word = text.strip().lower()
    try:
        return int(word[:-1]) * 1024 if word.endswith("k") else int(word)
    except ValueError:
        raise ConfigError(
            f"{setting}: {text.strip()[:40]!r} is no number of tokens; give such as {LENGTHS}"
        ) from None


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` as people read it, in binary units: 1.50 GiB, 12.0 MiB, 512 B."""
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    for unit, scale in (("TiB", 1024**4), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= scale:
            value = size / scale
            return f"{sign}{value:.2f} {unit}" if value < 100 else f"{sign}{value:.1f} {unit}"
    return f"{sign}{int(size)} B"


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def rows_are(count: int, done: str, which: str = "") -> str:
    """What is done to rows: "1 row is cut", "2,000 rows without text are left out"."""
    return f"1 row{which} is {done}" if count == 1 else f"{count:,} rows{which} are {done}"


def format_seconds(seconds: float) -> str:
    """`seconds` as people read it: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min, 3 d 04 h; - for NaN."""
    if math.isnan(seconds):
        return "-"
    if seconds < _ROUNDS_UP * 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < _ROUNDS_UP:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {whole_seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def format_count(count: float) -> str:
    """`count` with the field's suffixes: 8.03B, 135M, 12.5k, 2.2; - for NaN."""
    if math.isnan(count):
        return "-"
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= _ROUNDS_UP * scale:
            return f"{count / scale:.3g}{suffix}"
    return f"{count:.2g}" if abs(count) < 10 else f"{count:.0f}"
