"""Pixtral's tower: images of any size in one row, which a mask divides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, matrices, self_attention, stack
from whichlora.spec.layer import LayerGroup, Norm
from whichlora.spec.tower import ImageGrid, Tower


def pixtral_grid(
    height: int, width: int, *, patch: int, merge: int, channels: int, longest: int
) -> ImageGrid:
    """An image shrunk to `longest` pixels at the most, and rounded up to whole tokens.

    A token that breaks the line stands after each row.

    Kind: exact. Source: transformers 5.23 `get_resize_output_image_size` of
    image_processing_pixtral.py, `PixtralProcessor`.
    """
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    token = patch * merge
    rows, columns = (height - 1) // token + 1, (width - 1) // token + 1
    sides = rows * token, columns * token
    return ImageGrid(
        crops=1,
        patches=rows * columns * merge**2,
        tokens=rows * columns,
        pixels=(1, channels, *sides),
        sides=sides,
        markers=rows,
    )


@dataclass(frozen=True, slots=True)
class PixtralGrid:
    """`pixtral_grid` of one checkpoint."""

    patch: int
    merge: int
    channels: int
    longest: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        return pixtral_grid(
            height,
            width,
            patch=self.patch,
            merge=self.merge,
            channels=self.channels,
            longest=self.longest,
        )


def mistral3(vision: Fields, text: Fields) -> Tower:
    """`PixtralVisionModel` and Mistral 3's projector, which has no biases."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    heads, patch = vision.size("num_attention_heads"), vision.size("patch_size")
    out, merge = text.size("hidden_size"), text.size("spatial_merge_size")
    channels = vision.size("num_channels")
    attention = self_attention(
        width,
        heads,
        qkv_bias=False,
        out_bias=False,
        position="rope",
        rotary_dim=width // heads,
        always_masked=True,
        adds_mask="stream",
    )
    layer = block(
        attention,
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm="rms",
        names=("gate_proj", "up_proj", "down_proj"),
        bias=False,
    )
    shapes = [("merging_layer", merge**2 * width, width)]
    shapes += [("linear_1", width, out), ("linear_2", out, out)]
    return Tower(
        stack=stack(
            vision,
            (LayerGroup(layer=layer, count=vision.layers(), stack="encoder"),),
            width=width,
            linears=matrices(shapes, bias=False),
            other_params=channels * patch**2 * width + width,  # the projector's norm
            embeds_in_steps=True,
            embedding_norms=(Norm(name="ln_pre", kind="rms", width=width),),
        ),
        grid=PixtralGrid(patch, merge, channels, vision.size("image_size")),
        fields=("pixel_values", "image_sizes"),
        projector="mistral3",
        merge=merge**2,
        table_bytes=2 * 2 * (width // heads),
        embedded=(3 * width, width),  # what the kernel returns, in a row, and its norm
        joined=True,
        num_embedded=2,  # what the kernel returned has views in a list
        holds_narrow=False,
    )


_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "image_size": 1540,
    "patch_size": 14,
}
TYPES: Mapping[str, Multimodal] = {
    "mistral3": Multimodal(
        text="mistral",
        tied=True,
        hands_on_cache=True,
        images=mistral3,
        defaults=_PIXTRAL,
        around={"spatial_merge_size": 2},
    )
}
