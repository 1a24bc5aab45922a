"""SigLIP's tower over an image in squares and once as a whole (SmolVLM, Idefics 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import dense, matrices, stack
from whichlora.families.towers.siglip import siglip_groups
from whichlora.spec.tower import ImageGrid, Tower

_SQUARES = 4  # `size` over `max_image_size` of published preprocessor_config.json: longest edges
_LONGEST = 4096  # pixels, `MAX_IMAGE_SIZE`


def resized(height: int, width: int, *, side: int) -> tuple[int, int]:
    """Sides of an image in whole squares of `side` pixels, the longer one four of them.

    Kind: exact. Source: transformers 5.23 `get_resize_output_image_size`,
    `SmolVLMImageProcessor.resize_for_vision_encoder`.
    """
    ratio = width / height
    longest = _SQUARES * side
    if width >= height:
        height, width = _even(int(longest / ratio)), longest
    else:
        height, width = longest, _even(int(longest * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio, most = width / height, max(height, width)
    if most > _LONGEST:
        height, width = (
            (int(_LONGEST / ratio), _LONGEST)
            if width == most
            else (
                _LONGEST,
                int(_LONGEST * ratio),
            )
        )
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
    if width >= height:
        width = _whole(width, side)
        return _whole(int(width / ratio), side), width
    height = _whole(height, side)
    return height, _whole(int(height * ratio), side)


def _even(length: int) -> int:
    return length + length % 2


def _whole(length: int, side: int) -> int:
    return math.ceil(length / side) * side


@dataclass(frozen=True, slots=True)
class SplitGrid:
    """Every image is resized to whole squares, each of which passes the tower, as it does itself.

    Two marks stand before a square, a line break ends each row of them, and four marks are around
    the image as a whole.

    Kind: exact. Source: transformers 5.23 `SmolVLMImageProcessor.split_images`,
    `get_image_prompt_string`.
    """

    side: int
    patch: int
    channels: int
    merge: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        high, wide = resized(height, width, side=self.side)
        rows, columns = high // self.side, wide // self.side
        if rows * columns == 1:
            rows, columns = 0, 0
        crops = rows * columns + 1
        patches = (self.side // self.patch) ** 2
        return ImageGrid(
            crops=crops,
            patches=patches,
            tokens=crops * (patches // self.merge),
            pixels=(crops, self.channels, self.side, self.side),
            markers=2 * rows * columns + rows + 3,
            masked=crops * self.side**2,
        )


def smolvlm(vision: Fields, text: Fields) -> Tower:
    """`SmolVLMVisionTransformer` and `SmolVLMConnector`."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    side, patch = vision.size("image_size"), vision.size("patch_size")
    channels, merge = vision.size("num_channels"), text.size("scale_factor") ** 2
    return Tower(
        splits_blocks=True,
        stack=stack(
            vision,
            siglip_groups(vision, width, wide),
            width=width,
            linears=matrices([("proj", merge * width, text.size("hidden_size"))], bias=False),
            other_params=dense(channels * patch**2, width)
            + (side // patch) ** 2 * width
            + 2 * width,  # post_layernorm
        ),
        grid=SplitGrid(side, patch, channels, merge),
        fields=("pixel_values", "pixel_attention_mask"),
        projector="smolvlm",
        merge=merge,
        embedded=(3 * width, 0),  # what the kernel returns, the positions, and their sum
        copies_pixels=True,
        normalises=True,
        stacks_rows=True,
    )


_SMOLVLM = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
}
_SPLIT = Multimodal(
    text="llama",
    tied=False,
    hands_on_cache=True,
    images=smolvlm,
    defaults=_SMOLVLM,
    around={"scale_factor": 2},
)
TYPES: Mapping[str, Multimodal] = {"idefics3": _SPLIT, "smolvlm": _SPLIT}
