"""Qwen's vision towers: images of any size, cut into patches that stand in one row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import (
    block,
    dense,
    matrices,
    packed_attention,
    rotation_bytes,
    stack,
)
from whichlora.spec.layer import Layer, LayerGroup
from whichlora.spec.tower import ImageGrid, Tower

_MOST_LOPSIDED = 200  # ratio of the sides, beyond which `smart_resize` refuses an image
# Pixels that a published checkpoint's preprocessor_config.json allows: at least, at most
QWEN2_PIXELS = (56 * 56, 16384 * 28 * 28)
QWEN3_PIXELS = (65_536, 16_777_216)


_FIELDS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")


def resized(height: int, width: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Sides of an image after its processor: multiples of `factor`, with so many pixels.

    Kind: exact. Source: transformers 5.23 `smart_resize` of image_processing_qwen2_vl.py.

    Raises:
        ConfigError: one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > _MOST_LOPSIDED:
        raise ConfigError(
            f"image_size: {width}x{height} has a side more than {_MOST_LOPSIDED} times the other, "
            "which Qwen's processor refuses; give another size"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > most:
        shrink = math.sqrt((height * width) / most)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < least:
        grow = math.sqrt(least / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def qwen_grid(
    height: int, width: int, *, patch: int, merge: int, values: int, least: int, most: int
) -> ImageGrid:
    """Patches of one image, of which `merge` squared become a token.

    Kind: exact. Source: transformers 5.23 `Qwen2VLImageProcessor._preprocess`.
    """
    new_height, new_width = resized(height, width, factor=patch * merge, least=least, most=most)
    sides = new_height // patch, new_width // patch
    patches = sides[0] * sides[1]
    return ImageGrid(
        crops=1, patches=patches, tokens=patches // merge**2, pixels=(patches, values), sides=sides
    )


@dataclass(frozen=True, slots=True)
class QwenGrid:
    """`qwen_grid` of one checkpoint: its patches, and how many pixels its processor allows."""

    patch: int
    merge: int
    values: int
    least: int
    most: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        return qwen_grid(
            height,
            width,
            patch=self.patch,
            merge=self.merge,
            values=self.values,
            least=self.least,
            most=self.most,
        )


def _grid(vision: Fields, pixels: tuple[int, int]) -> QwenGrid:
    merge = vision.size("spatial_merge_size")
    return QwenGrid(vision.size("patch_size"), merge, _patch(vision), *pixels)


def _patch(vision: Fields) -> int:
    """Elements of one patch over its frames and channels."""
    frames = vision.size("in_channels") * vision.size("temporal_patch_size")
    return frames * vision.size("patch_size") ** 2


def qwen2(vision: Fields, text: Fields) -> Tower:
    """`Qwen2VisionTransformerPretrainedModel`."""
    width = vision.size("embed_dim")
    wide = int(width * (vision.number_or_none("mlp_ratio") or 4))
    merged = width * vision.size("spatial_merge_size") ** 2
    layer = block(
        packed_attention(vision, width),
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm="layer",
        names=("fc1", "fc2"),
    )
    return Tower(
        checkpointed=(("0", False), ("4.47", True)),  # read: the forward of 4.46.3 and 4.47.1
        stack=stack(
            vision,
            (LayerGroup(layer=layer, count=vision.layers("depth"), stack="encoder"),),
            width=width,
            linears=matrices([("0", merged, merged), ("2", merged, vision.size("hidden_size"))]),
            other_params=_patch(vision) * width + 2 * width,
        ),
        grid=_grid(vision, QWEN2_PIXELS),
        fields=_FIELDS,
        num_embedded=0,
        projector="qwen2",
        merge=vision.size("spatial_merge_size") ** 2,
        table_bytes=rotation_bytes(vision, width),
    )


def qwen2_5(vision: Fields, text: Fields) -> Tower:
    """`Qwen2_5_VisionTransformerPretrainedModel`: RMS norms, a gated MLP, windows."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    merged = width * vision.size("spatial_merge_size") ** 2
    depth = vision.layers("depth")
    full = vision.indices("fullatt_block_indexes")
    window = vision.size("window_size") // vision.size("patch_size")
    return Tower(
        stack=stack(
            vision,
            tuple(
                LayerGroup(
                    layer=_gated(vision, width, wide, segment=segment),
                    count=len(places),
                    positions=places,
                    stack="encoder",
                )
                for segment, places in (
                    (window**2, tuple(n for n in range(depth) if n not in full)),
                    (0, tuple(n for n in range(depth) if n in full)),
                )
                if places
            ),
            width=width,
            linears=matrices(
                [("0", merged, merged), ("2", merged, vision.size("out_hidden_size"))]
            ),
            other_params=_patch(vision) * width + width,
            embeds_in_steps=True,  # patches are sorted by windows first
        ),
        grid=_grid(vision, QWEN2_PIXELS),
        fields=_FIELDS,
        num_embedded=0,
        projector="qwen2_5",
        merge=vision.size("spatial_merge_size") ** 2,
        table_bytes=rotation_bytes(vision, width),
    )


def _gated(vision: Fields, width: int, wide: int, *, segment: int) -> Layer:
    return block(
        packed_attention(vision, width, segment=segment),
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm="rms",
        names=("gate_proj", "up_proj", "down_proj"),
    )


def qwen3(vision: Fields, text: Fields) -> Tower:
    """`Qwen3VLVisionModel`, which also merges what a few blocks in between return.

    `Qwen3_5VisionModel` merges the last block's alone.
    """
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    merged = width * vision.size("spatial_merge_size") ** 2
    deep = len(vision.indices("deepstack_visual_indexes"))
    out = vision.size("out_hidden_size")
    layer = block(
        packed_attention(vision, width),
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm="layer",
        names=("linear_fc1", "linear_fc2"),
    )
    shapes = [("linear_fc1", merged, merged), ("linear_fc2", merged, out)]
    return Tower(
        stack=stack(
            vision,
            (LayerGroup(layer=layer, count=vision.layers("depth"), stack="encoder"),),
            width=width,
            linears=matrices(shapes, count=1 + deep),
            other_params=dense(_patch(vision), width)
            + vision.size("num_position_embeddings") * width
            + 2 * width
            + deep * 2 * merged,
        ),
        grid=_grid(vision, QWEN3_PIXELS),
        fields=_FIELDS,
        num_embedded=0,
        projector="qwen3",
        merge=vision.size("spatial_merge_size") ** 2,
        table_bytes=rotation_bytes(vision, width),
        hooked=False,  # `Qwen3VLVisionModel` names no `_input_embed_layer`
        copies=1 + 2 * deep,
        deep=deep,
        # four rows of the table of positions around each patch, times their fp32 weights
        embedded=(5 * width, 4 * width),
        positions=width,
    )


_QWEN2 = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "in_channels": 3,
    "num_heads": 16,
    "hidden_act": "quick_gelu",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5 = _QWEN2 | {
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3 = {
    "depth": 27,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_QWEN3_5 = Multimodal(
    text="qwen3_5_text",
    tied=False,
    images=qwen3,
    defaults=_QWEN3,
    causal=True,
    splits=True,
)
_QWEN3_VL = Multimodal(
    text="qwen3_vl_text",
    tied=False,
    images=qwen3,
    defaults=_QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]},
)
TYPES: Mapping[str, Multimodal] = {
    "qwen2_vl": Multimodal(text="qwen2_vl_text", tied=False, images=qwen2, defaults=_QWEN2),
    "qwen2_5_vl": Multimodal(text="qwen2_5_vl_text", tied=False, images=qwen2_5, defaults=_QWEN2_5),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, text="qwen3_vl_moe_text"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, text="qwen3_5_moe_text"),
}
