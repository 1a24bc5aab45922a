"""Images of rows, and clips as images are: how large they are, and what they take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from whichlora.dataset.audio import length_s
from whichlora.dataset.base import Example
from whichlora.errors import ConfigError
from whichlora.extras import require
from whichlora.spec.data_format import AUDIOS, IMAGES
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import SAMPLING_RATE, ImageGrid

_TURNED = range(5, 9)  # values of EXIF's orientation that swap the sides
_ORIENTATION = 0x0112
_FINE = 1e-3  # of a side

Size = tuple[int, int]  # width and height in pixels
Grid = Callable[[int, int], ImageGrid]  # of height and width


def found_in(folder: Path, example: Example) -> Example:
    """`example` with absolute paths, which start in `folder`.

    Raises:
        ConfigError: an image is missing, or is none.
    """
    if IMAGES not in example:
        return example
    paths = [str((folder / path).absolute()) for path in example[IMAGES]]
    for path in paths:
        image_size(path)
    return {**example, IMAGES: paths}


@lru_cache(maxsize=1_000_000)
def image_size(path: str) -> Size:
    """Width and height of an image as it is shown.

    Kind: exact. Source: transformers 5.23 `load_image`, which turns it as its EXIF says.

    Raises:
        ConfigError: it is missing, can't be read, or Pillow is not installed.
    """
    require("dataset: images", "PIL", extra="images")
    images = importlib.import_module("PIL.Image")
    try:
        with images.open(path) as image:
            width, height = image.size
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
    except FileNotFoundError:
        raise ConfigError(
            f"image {path}: is missing; correct the path, which starts in the folder of the data"
        ) from None
    except Exception as error:  # Pillow raises whatever a broken file makes of its reader
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"image {path}: can't be read as an image ({reason}); write it again, or remove the row"
        ) from None
    return (height, width) if is_turned else (width, height)


def sizes_of(example: Example) -> tuple[Size, ...]:
    """Width and height of each image of `example`, or samples of each clip, whose height is 0."""
    clips = (round(length_s(clip) * SAMPLING_RATE) for clip in example.get(AUDIOS, ()))
    return (*map(image_size, example.get(IMAGES, ())), *((samples, 0) for samples in clips))


def image_tokens(example: Example, grid: Grid, *, rendered: bool = False) -> int:
    """Tokens of the images or clips of `example`, with the marks around them.

    Args:
        rendered: less what a chat template writes: one for each, and the marks of a clip.

    Kind: exact. Source: `ImageGrid`.
    """
    sizes = sizes_of(example)
    grids = [(grid(height, width), height == 0) for width, height in sizes]
    whole = sum(each.tokens + each.markers * (not (clip and rendered)) for each, clip in grids)
    return whole - rendered * len(sizes)


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images or clips of one row as a run states them: as many, all of one size."""

    images: int
    image_size: Size

    @classmethod
    def of(cls, sizes: Sequence[Size], grid: Grid) -> RowImages:
        """Images of several sizes as equal ones, which have together no more patches.

        Kind: exact where all are of one size, else an estimate from below by less than a row of
        patches of each.
        """
        number, most = len(sizes), patches(sizes, grid)
        width, height = max(sizes, key=lambda size: _weight((size,), grid))
        low, high = 0.0, 1.0
        if number * patches(((width, height),), grid) <= most:
            low = high
        while high - low > _FINE:
            middle = (low + high) / 2
            fits = number * patches((_scaled(width, height, middle),), grid) <= most
            low, high = (middle, high) if fits else (low, middle)
        return cls(number, _scaled(width, height, low))

    def shown(self, run: RunConfig) -> RunConfig:
        """`run` whose rows have them."""
        samples, height = self.image_size
        if height:
            return replace(run, images=self.images, image_size=self.image_size)
        return replace(run, audios=self.images, audio_seconds=samples / SAMPLING_RATE)

    def room(self, grid: Grid) -> int:
        """Tokens of a row that has them and a text around each, at least."""
        width, height = self.image_size
        each = grid(height, width)
        return self.images * (each.tokens + each.markers + 1) + 2


def _scaled(width: int, height: int, factor: float) -> Size:
    return max(1, round(width * factor)), max(min(1, height), round(height * factor))


def _weight(sizes: Sequence[Size], grid: Grid) -> tuple[int, int]:
    """Patches of images, then their tokens: clips have as many patches, however short."""
    tokens = sum(grid(height, width).tokens for width, height in sizes)
    return patches(sizes, grid), tokens


def patches(sizes: Sequence[Size], grid: Grid) -> int:
    """Patches of images, which a tower's bytes and work follow."""
    grids = (grid(height, width) for width, height in sizes)
    return sum(each.crops * each.patches for each in grids)


def heaviest(rows: Sequence[Sequence[Size]], grid: Grid) -> RowImages | None:
    """The images of the row with the most patches; None where no row has one.

    Kind: upper bound of a batch, whose other rows may have fewer.
    """
    most = max(rows, key=lambda sizes: _weight(sizes, grid), default=())
    return RowImages.of(most, grid) if most else None


def typical(rows: Sequence[Sequence[Size]], grid: Grid) -> RowImages | None:
    """The images of the row whose patches are nearest to the mean; None where it has none.

    Kind: estimate, of the work of all rows.
    """
    if not rows:
        return None
    numbers = [patches(sizes, grid) for sizes in rows]
    mean = sum(numbers) / len(numbers)
    nearest = min(range(len(rows)), key=lambda row: abs(numbers[row] - mean))
    return RowImages.of(rows[nearest], grid) if rows[nearest] else None


def image_of(value: Any) -> str:
    """The path that `value` is, or holds as `datasets` writes it.

    Raises:
        ConfigError: it is none, or an address.
    """
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str) or not path:
        got = type(value).__name__
        raise ConfigError(f"an image must be the path of a file, got {got}; save it as a file")
    if "://" in path or path.startswith("data:"):
        raise ConfigError(
            f"an image must be a file, got {path[:60]!r}; download it and give its path"
        )
    return path
