"""Batches with images: the fields that a processor makes, with pixels of no picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from whichlora.errors import MeasurementError
from whichlora.families import build, writes_transcripts
from whichlora.memory.towers import grid_of
from whichlora.methods import input_dtype
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import ImageGrid, Tower

Batch = Mapping[str, torch.Tensor]


def host_pixels(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Pixels of a batch before it is on the device: black images pass for padding (SmolVLM)."""
    return torch.ones(shape, dtype=dtype)


def image_fields(config: Any, run: RunConfig, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the processor of a model adds to the tokens of a batch; `input_ids` among it.

    Raises:
        MeasurementError: the model reads no images.
    """
    tower = build(config.to_dict(), name="profiled").tower
    if tower is None:
        raise MeasurementError(f"images: {config.model_type} is not described; leave images out")
    grid = grid_of(tower, run)
    placed = _placed(config, run, grid, input_ids)
    return {"input_ids": placed} | {
        name: _FIELDS[name](config, run, tower, grid, placed) for name in tower.fields
    }


def has_fields(config: Any, run: RunConfig) -> bool:
    """Whether a batch has images, or sound."""
    return run.images > 0 or run.audios > 0 or hears(config)


def hears(config: Any) -> bool:
    """Whether the model attends to a clip of sound, and its tokens are those of a decoder."""
    return writes_transcripts(config.to_dict())


def with_fields(config: Any, run: RunConfig, batch: Batch) -> dict[str, torch.Tensor]:
    """`batch` of texts with what a processor adds to it; of sound and labels, these alone."""
    if hears(config):
        return {**sound_fields(config, run, batch["labels"]), "labels": batch["labels"]}
    return {**batch, **image_fields(config, run, batch["input_ids"])}


def prompt_fields(config: Any, run: RunConfig, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `generate` is given beside tokens, or in their place, on their device."""
    if hears(config):
        made = {**sound_fields(config, run, ids), "decoder_input_ids": ids}
    else:
        made = image_fields(config, run, ids)
    return {name: value.to(ids.device) for name, value in made.items()}


def sound_fields(config: Any, run: RunConfig, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Frames of one clip for each of `rows`, in the dtype that the encoder's weights need.

    Source: transformers 5.23 `WhisperEncoder.forward`, which casts nothing.
    """
    tower = build(config.to_dict(), name="profiled").tower
    assert tower is not None
    grid = grid_of(tower, run)
    dtype = getattr(torch, input_dtype(run))
    frames = host_pixels((rows.shape[0] * grid.pixels[0], *grid.pixels[1:]), dtype)
    return dict.fromkeys(tower.fields, frames)


def image_span(config: Any, run: RunConfig) -> int:
    """Tokens from the first of a row to the last of its images."""
    tower = build(config.to_dict(), name="profiled").tower
    if tower is None:
        return 1
    return tower.inputs(run.images, run.audios) * (grid_of(tower, run).tokens + 1)


_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")


def _token(config: Any) -> int:
    for name in _TOKENS:
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise MeasurementError(f"images: the config of {config.model_type} names no token of them")


def _placed(config: Any, run: RunConfig, grid: ImageGrid, input_ids: torch.Tensor) -> torch.Tensor:
    """`input_ids` with the places of every image, one text token before each."""
    token = _token(config)
    placed = torch.where(input_ids == token, 0, input_ids)
    for number in range(run.images or run.audios):
        start = number * (grid.tokens + 1) + 1
        placed[:, start : start + grid.tokens] = token
    return placed


def _pixels(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    rows = ids.shape[0]
    dtype = torch.bfloat16 if tower.pixel_bytes == torch.bfloat16.itemsize else torch.float32
    if tower.stacks_rows:
        return host_pixels((rows, run.images * grid.pixels[0], *grid.pixels[1:]), dtype)
    return host_pixels((rows * run.images * grid.pixels[0], *grid.pixels[1:]), dtype)


def _frames(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    return host_pixels((ids.shape[0] * run.audios, *grid.pixels[1:]))


def _frame_mask(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    """Ones, and zeros where a clip is padded."""
    _, heard = grid.sides
    mask = torch.zeros((ids.shape[0] * run.audios, grid.pixels[-1]), dtype=torch.long)
    mask[:, :heard] = 1
    return mask


def _grid_thw(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    return torch.tensor([[1, *grid.sides]] * (ids.shape[0] * run.images), dtype=torch.long)


def _sizes(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    return torch.tensor([list(grid.sides)] * (ids.shape[0] * run.images), dtype=torch.long)


def _places(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    """Column and row of each patch, -1 where it is padding."""
    rows, columns = grid.sides
    held = torch.tensor([[column, row] for row in range(rows) for column in range(columns)])
    padding = torch.full((grid.padding, 2), -1, dtype=torch.long)
    return torch.cat([held, padding]).repeat(ids.shape[0] * run.images, 1, 1)


def _mask(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    crops, _, height, width = grid.pixels
    return torch.ones((ids.shape[0], run.images * crops, height, width), dtype=torch.long)


def _is_image(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    return (ids == _token(config)).long()


def _tiles(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    """Which of its tiles each image has."""
    _, most, *_ = grid.pixels
    has = torch.arange(most) < grid.sides[0] * grid.sides[1]
    return has.long().expand(ids.shape[0], run.images, most).contiguous()


def _ratios(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    """The number of their arrangement, from 1 on."""
    _, most, *_ = grid.pixels
    ratios = [
        (rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)
    ]
    return torch.full((ids.shape[0], run.images), 1 + ratios.index(grid.sides), dtype=torch.long)


def _attended_tiles(
    config: Any, run: RunConfig, tower: Tower, grid: ImageGrid, ids: torch.Tensor
) -> torch.Tensor:
    """Those that each token reads: of the last image before it.

    Source: transformers 5.23 `get_cross_attention_token_mask`.
    """
    seen = (ids == _token(config)).cumsum(dim=1)
    is_read = seen[:, :, None] == torch.arange(1, run.images + 1)
    tiles = _tiles(config, run, tower, grid, ids)
    return is_read[..., None].long() * tiles[:, None]


_FIELDS: Mapping[str, Callable[[Any, RunConfig, Tower, ImageGrid, torch.Tensor], torch.Tensor]] = {
    "pixel_values": _pixels,
    "input_features": _frames,
    "feature_attention_mask": _frame_mask,
    "image_grid_thw": _grid_thw,
    "image_sizes": _sizes,
    "image_position_ids": _places,
    "pixel_attention_mask": _mask,
    "aspect_ratio_ids": _ratios,
    "aspect_ratio_mask": _tiles,
    "cross_attention_mask": _attended_tiles,
    "mm_token_type_ids": _is_image,
    "token_type_ids": _is_image,
}
"""The outputs of processors by their names, which a family lists in `Tower.fields`."""
