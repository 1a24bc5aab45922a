"""Images of rows that a file of another tool trains on, which it rarely says the number of."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import Imported
from whichlora.imports.spread import runs_alone
from whichlora.memory.towers import grid_of
from whichlora.parallel import get_strategy
from whichlora.predict.images import with_images
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import Tower
from whichlora.store.hub import load_model
from whichlora.trainers import get_trainer

_LONGEST_SIDE = 4096  # beyond what processors make of an image
_FIELDS = frozenset(field.name for field in fields(RunConfig))
_OPEN = frozenset({"images", "audios", "data"})  # by which the user says what rows have


def with_file_images(
    settings: Mapping[str, list[Any]], imported: Imported, stated: Collection[str]
) -> tuple[dict[str, list[Any]], tuple[str, ...]]:
    """`settings` with one image in each row where the file trains on images, and a note first.

    It is as large as the file lets it be: a row of a usual photograph is no smaller. Where the file
    has no sign of images, a model that sees gets a note alone.
    """
    sees = _tower(settings)
    if sees is None:
        return dict(settings), ()
    if _OPEN & {*stated}:
        return _with_room(sees, settings, imported, stated), ()
    plain = f"{imported.path}: no image is counted"
    ask = "--images 1 --image-size 1024x768 counts one in each row"
    if not imported.shows_images:
        return dict(settings), (f"{plain}: {ask}",)
    asked = {name: values[0] for name, values in settings.items() if name in _FIELDS and values}
    grows = "seq_len" not in (imported.settings.keys() | {*stated})
    try:
        run = _with_largest(sees, RunConfig(**{**asked, "images": 1}), grows=grows)
        with_images(load_model(run.model), run, get_trainer(run.trainer))
        _check_strategy(settings)
    except (ConfigError, TypeError) as error:
        return dict(settings), (f"{plain}, so that it may need more: {error}",)
    width, height = run.image_size
    most = run.image_max_pixels
    why = f"at most {most:,} pixels" if most else "the largest of its processor, as no limit is set"
    if not grows and _tokens(sees, run, _LONGEST_SIDE) > run.seq_len:
        why = f"the largest that {run.seq_len:,} tokens hold"
    note = (
        f"{imported.path}: one image of {width}x{height} is counted in each row, {why}; "
        "--image-size for yours, --images 0 for none"
    )
    changed = {name: [getattr(run, name)] for name in ("images", "image_size", "seq_len")}
    return {**settings, **changed}, (note,)


def _with_room(
    tower: Tower,
    settings: Mapping[str, list[Any]],
    imported: Imported,
    stated: Collection[str],
) -> dict[str, list[Any]]:
    """`settings` with rows that hold the images that the user states, where nobody says how long.

    Those of several numbers or sizes are left to the user.
    """
    says_length = {"seq_len", "data"} & {*imported.settings, *stated}
    several = any(len(settings.get(name, [0])) != 1 for name in ("images", "image_size"))
    if says_length or several:
        return dict(settings)
    asked = {name: values[0] for name, values in settings.items() if name in _FIELDS and values}
    try:
        run = RunConfig(**asked)
        grid = grid_of(tower, run)
    except (ConfigError, TypeError):  # which is said of the run itself
        return dict(settings)
    return {**settings, "seq_len": [run.seq_len + run.images * int(grid.tokens + grid.markers)]}


def leaves_images_out(
    settings: Mapping[str, list[Any]], imported: Imported, notes: Collection[str]
) -> bool:
    """Whether rows have images, as `notes` of `with_file_images` say, which are not counted."""
    return bool(notes) and imported.shows_images and not settings.get("images", [0])[0]


def _check_strategy(settings: Mapping[str, list[Any]]) -> None:
    """Raises: ConfigError: images are not predicted for the way that the model is divided."""
    name, numbers = settings.get("parallel", [None])[0], settings.get("gpus", [None])
    if name is None or get_strategy(name).takes_images:
        return
    if numbers != [1] or runs_alone(name):
        raise ConfigError(f"images are not predicted for parallel {name}")


def _tower(settings: Mapping[str, list[Any]]) -> Tower | None:
    """What sees of the only model, where it does."""
    with contextlib.suppress(ConfigError):
        (name,) = settings["model"]
        tower = load_model(name).tower
        return None if tower is None or tower.hears else tower
    return None


def _with_largest(tower: Tower, run: RunConfig, *, grows: bool) -> RunConfig:
    """`run` with the largest square that its pixels, its processor and its row allow.

    Args:
        grows: nobody says how long rows are; the tokens of the image come on top.
    """
    side = math.isqrt(run.image_max_pixels) if run.image_max_pixels else _LONGEST_SIDE
    most = _tokens(tower, run, side)
    room = most if grows else min(most, run.seq_len)
    # without a limit the smallest square of so many tokens: a larger one is shrunk to it
    low, high = (side - 1 if run.image_max_pixels and most <= room else 0), side
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _tokens(tower, run, middle) >= room else (middle, high)
    side = high if _tokens(tower, run, high) <= room else low
    length = run.seq_len + most if grows else run.seq_len
    return replace(run, image_size=(side, side), seq_len=length)


def _tokens(tower: Tower, run: RunConfig, side: int) -> int:
    """Tokens of a square image in its row."""
    grid = grid_of(tower, replace(run, image_size=(side, side)))
    return int(grid.tokens + grid.markers)
