"""Rows with images: where they stand in the messages, and how large they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from whichlora.dataset.base import Example, Row
from whichlora.dataset.columns import Columns, as_list
from whichlora.errors import ConfigError
from whichlora.extras import require
from whichlora.spec.architecture import ImageGrid
from whichlora.spec.data_format import IMAGES

PLACE = "<image>"
"""Stands in a text where an image does. Source: LLaVA's and LLaMA-Factory's data sets."""

_PATHS = ("image", "path", "url", "image_url", "base64")  # keys of a part of a message
_PARTS = ("image", "image_url")  # types of a part
_TURNED = range(5, 9)  # values of EXIF's orientation that swap the sides
_ORIENTATION = 0x0112
_FINE = 1e-3  # of a side

Size = tuple[int, int]  # width and height in pixels
Grid = Callable[[int, int], ImageGrid]  # of height and width


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image, or the place of one."""
    return part.get("type") in _PARTS


def has_images(row: Row, columns: Columns) -> bool:
    """Whether `row` names images: in a column of its own, or in its messages."""
    return columns.images is not None or any(True for _ in _parts(row, columns))


def paths_of(row: Row, columns: Columns) -> list[str]:
    """The paths of the images of `row`, in their order.

    Raises:
        ConfigError: something else than a path.
    """
    named = [part for part in map(_path_of, _parts(row, columns)) if part is not None]
    column = columns.images
    if column is None or row.get(column) is None:
        return [_checked(path) for path in named]
    if named:
        raise ConfigError(
            f"has images in the column {column!r} and in its messages; name them in one of both"
        )
    held = row[column]
    listed = as_list(held)
    return [_checked(path) for path in ([held] if listed is None else listed) if path != ""]


def in_parts(example: Example, paths: Sequence[str]) -> Example:
    """`example` with messages of parts, and its images beside them.

    Images without a place stand before the first text of the user.
    Source: TRL 1.16 `prepare_multimodal_messages`.

    Raises:
        ConfigError: another number of places than of images.
    """
    columns = [name for name, value in example.items() if isinstance(value, list)]
    messages = [message for name in columns for message in example[name]]
    places = sum(message["content"].count(PLACE) for message in messages)
    first = next((message for message in messages if message["role"] == "user"), None)
    if not places and first is not None:
        first["content"] = PLACE * len(paths) + first["content"]
        places = len(paths)
    if places != len(paths):
        raise ConfigError(
            f"has {len(paths)} images, and its messages have {places} places for them (parts of "
            f"type image, or {PLACE} in a text); give as many of both"
        )
    for message in messages:
        message["content"] = _split(message["content"])
    return {**example, IMAGES: list(paths)}


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
    """Width and height of each image of `example`."""
    return tuple(map(image_size, example.get(IMAGES, ())))


def image_tokens(example: Example, grid: Grid) -> int:
    """Tokens of the images of `example`, with the marks that the processor writes around them.

    Kind: exact. Source: `ImageGrid`.
    """
    grids = (grid(height, width) for width, height in sizes_of(example))
    return sum(each.tokens + each.markers for each in grids)


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of one row as a run states them: as many, all of one size."""

    images: int
    image_size: Size

    @classmethod
    def of(cls, sizes: Sequence[Size], grid: Grid) -> RowImages:
        """Images of several sizes as equal ones, which have together no more patches.

        Kind: exact where all are of one size, else an estimate from below by less than a row of
        patches of each.
        """
        number, most = len(sizes), patches(sizes, grid)
        width, height = max(sizes, key=lambda size: patches((size,), grid))
        low, high = 0.0, 1.0
        if number * patches(((width, height),), grid) <= most:
            low = high
        while high - low > _FINE:
            middle = (low + high) / 2
            fits = number * patches((_scaled(width, height, middle),), grid) <= most
            low, high = (middle, high) if fits else (low, middle)
        return cls(number, _scaled(width, height, low))


def _scaled(width: int, height: int, factor: float) -> Size:
    return max(1, round(width * factor)), max(1, round(height * factor))


def patches(sizes: Sequence[Size], grid: Grid) -> int:
    """Patches of images, which a tower's bytes and work follow."""
    grids = (grid(height, width) for width, height in sizes)
    return sum(each.crops * each.patches for each in grids)


def heaviest(rows: Sequence[Sequence[Size]], grid: Grid) -> RowImages | None:
    """The images of the row with the most patches; None where no row has one.

    Kind: upper bound of a batch, whose other rows may have fewer.
    """
    most = max(rows, key=lambda sizes: patches(sizes, grid), default=())
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


def _parts(row: Row, columns: Columns) -> Iterator[Mapping[str, Any]]:
    """The images among the parts of the messages of `row`, in their order."""
    for column in (columns.prompt, columns.trained):
        messages = as_list(row.get(column)) if column is not None else None
        for message in messages or ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping) and is_image(part):
                    yield part


def _path_of(part: Mapping[str, Any]) -> Any:
    """What a part says of its image; None where a column says it."""
    value = next((part[key] for key in _PATHS if part.get(key) is not None), None)
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def _checked(value: Any) -> str:
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


def _split(text: str) -> list[dict[str, str]]:
    """`text` as parts, with an image at each place."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACE)):
        parts += [{"type": "image"}] * bool(number)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts
