"""Llama 3.2 Vision's tower, as one number of parameters: no image passes it yet."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import dense

_RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


def _count(vision: Fields, text: Fields) -> int:
    """Parameters of `MllamaVisionModel` and of the projection to the text."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch, tiles = vision.size("patch_size"), vision.size("max_num_tiles")
    patches = (vision.size("image_size") // patch) ** 2 + 1
    num_global = vision.size("num_global_layers")
    rows = len(vision.get("supported_aspect_ratios") or _RATIOS) + 1
    block = 4 * width**2 + dense(width, wide) + dense(wide, width) + 4 * width
    return (
        vision.size("num_channels") * patch**2 * width
        + width  # the token of the tile
        + (patches + rows * tiles * patches) * width
        + 2 * rows * tiles * width
        + 3  # gates of the three tables
        + 4 * width  # layernorm_pre and layernorm_post
        + (vision.layers() + num_global) * block
        + 2 * num_global  # gates of the global blocks
        + dense(vision.size("vision_output_dim"), text.size("hidden_size"))
    )


_MLLAMA = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "num_channels": 3,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "max_num_tiles": 4,
}
TYPES: Mapping[str, Multimodal] = {
    "mllama": Multimodal(
        text="mllama_text_model",
        tied=False,
        causal=True,
        splits=True,
        tower=_count,
        defaults=_MLLAMA,
    )
}
