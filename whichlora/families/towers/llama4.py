"""Llama 4's tower: tiles of one size and the image as a whole, rotated in two dimensions."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, matrices, self_attention, stack
from whichlora.spec.layer import LayerGroup, Norm
from whichlora.spec.tower import ImageGrid, Tower

_MOST_TILES = 16  # `max_patches` of the published preprocessor_config.json
_MARKS = 3  # begin, end, and one before the image as a whole


def arrangement(height: int, width: int, *, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles that shrink an image least, or else enlarge it least.

    Among equal ones it is the smallest.

    Kind: exact. Source: transformers 5.23 `find_supported_resolutions`, `get_best_fit`.
    """
    grids = [
        (rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)
    ]
    scales = {
        grid: min(_narrow(side * grid[0] / height), _narrow(side * grid[1] / width))
        for grid in grids
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    fitting = (grid for grid, scale in scales.items() if scale == chosen)
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def _narrow(value: float) -> float:
    """`value` in fp32, in which the processor compares."""
    narrow: float = struct.unpack("f", struct.pack("f", value))[0]
    return narrow


@dataclass(frozen=True, slots=True)
class TilesGrid:
    """Tiles of `side` pixels, and where there are several the image as a whole.

    A token of each tile passes the blocks, and is left out after them. A separator stands behind
    every tile.

    Args:
        merge: patches of one token.

    Kind: exact. Source: transformers 5.23 `Llama4ImageProcessor._preprocess`,
    `Llama4Processor._prompt_split_image`.
    """

    side: int
    patch: int
    channels: int
    merge: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        rows, columns = arrangement(height, width, side=self.side, most=_MOST_TILES)
        tiles = rows * columns if rows * columns > 1 else 0
        crops = tiles + 1
        patches = (self.side // self.patch) ** 2
        return ImageGrid(
            crops=crops,
            patches=patches + 1,
            tokens=crops * (patches // self.merge),
            pixels=(crops, self.channels, self.side, self.side),
            markers=tiles + _MARKS,
        )


def llama4(vision: Fields, text: Fields) -> Tower:
    """`Llama4VisionModel` and `Llama4MultiModalProjector`.

    Raises:
        ConfigError: a shuffle of patches that the first matrix behind it can't read.
    """
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch, side = vision.size("patch_size"), vision.size("image_size")
    heads, channels = vision.size("num_attention_heads"), vision.size("num_channels")
    merge = round(1 / (vision.number_or_none("pixel_shuffle_ratio") or 0.5)) ** 2
    inner, out = vision.size("projector_input_dim"), vision.size("projector_output_dim")
    if wide != merge * width or inner != out or out != vision.size("vision_output_dim"):
        raise ConfigError(
            f"{vision.name}: intermediate_size {wide} must be {merge} times hidden_size {width}, "
            "and projector_input_dim, projector_output_dim and vision_output_dim equal; correct "
            "the config"
        )
    attention = self_attention(
        width,
        heads,
        position="rope",
        rotary_dim=width // heads,
        projection="complex_by_head",
        dropout=vision.probability("attention_dropout"),
    )
    layer = block(
        attention, width=width, wide=wide, activation="gelu", norm="layer", names=("fc1", "fc2")
    )
    around = [("linear", channels * patch**2, width), ("fc1", wide, inner), ("fc2", out, out)]
    around += [("linear_1", out, text.size("hidden_size"))]
    return Tower(
        stack=stack(
            vision,
            (LayerGroup(layer=layer, count=vision.layers(), stack="encoder"),),
            width=width,
            linears=matrices(around, bias=False),
            other_params=width  # the token of the tile
            + ((side // patch) ** 2 + 1) * width
            + 2 * width,  # layernorm_post
            embeds_in_steps=True,
            embedding_norms=(Norm(name="layernorm_pre", kind="layer", width=width, bias=True),),
        ),
        grid=TilesGrid(side, patch, channels, merge),
        fields=("pixel_values",),
        projector="llama4",
        merge=merge,
        num_returned=0,
        returned_width=out,
        fused_head=False,
        embedded=(2 * width, 0),  # joined with the token of the tile, and the sum with positions
        unfolds=True,
        pixel_bytes=2,
        holds_narrow=False,
    )


_LLAMA4 = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "attention_dropout": 0.0,
}
TYPES: Mapping[str, Multimodal] = {
    "llama4": Multimodal(
        text="llama4_text",
        tied=False,
        tied_by_text=True,
        causal=True,
        splits=True,
        hands_on_cache=True,
        images=llama4,
        defaults=_LLAMA4,
    )
}
