"""GLM-4.1V's tower and GLM-4.5V's: patches of images of any size in one row, merged by a kernel."""

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
from whichlora.spec.layer import LayerGroup, Linear, Norm
from whichlora.spec.tower import ImageGrid, Tower

_MOST_LOPSIDED = 200  # ratio of the sides, beyond which `smart_resize` refuses an image
# Of both frames that an image becomes. Source: transformers 5.23 `Glm4vImageProcessor.size`
_LEAST, _MOST = 112 * 112, 28 * 28 * 15_000


def resized(height: int, width: int, *, factor: int, frames: int) -> tuple[int, int]:
    """Sides of an image after its processor: multiples of `factor`, with so many pixels.

    Kind: exact. Source: transformers 5.23 `smart_resize` of image_processing_glm4v.py.

    Raises:
        ConfigError: one side is more than 200 times the other.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MOST_LOPSIDED:
        raise ConfigError(
            f"image_size: {width}x{height} has a side more than {_MOST_LOPSIDED} times the other, "
            "which GLM's processor refuses; give another size"
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if frames * high * wide > _MOST:
        shrink = math.sqrt(frames * height * width / _MOST)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif frames * high * wide < _LEAST:
        grow = math.sqrt(_LEAST / (frames * height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return high, wide


@dataclass(frozen=True, slots=True)
class GlmGrid:
    """Patches of one image, of which `merge` squared become a token.

    Source: transformers 5.23 `Glm4vImageProcessor._preprocess`.
    """

    patch: int
    merge: int
    frames: int
    channels: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        high, wide = resized(height, width, factor=self.patch * self.merge, frames=self.frames)
        sides = high // self.patch, wide // self.patch
        patches = sides[0] * sides[1]
        values = self.channels * self.frames * self.patch**2
        return ImageGrid(
            crops=1,
            patches=patches,
            tokens=patches // self.merge**2,
            pixels=(patches, values),
            sides=sides,
        )


def glm4v(vision: Fields, text: Fields) -> Tower:
    """`Glm4vVisionModel`."""
    width, out = vision.size("hidden_size"), vision.size("out_hidden_size")
    merge, patch = vision.size("spatial_merge_size"), vision.size("patch_size")
    frames, channels = vision.size("temporal_patch_size"), vision.size("in_channels")
    wide = vision.size("intermediate_size")
    attention = packed_attention(
        vision, width, qkv_bias=vision.flag("attention_bias"), out_bias=False
    )
    layer = block(
        attention,
        width=width,
        wide=out,
        activation=vision.text("hidden_act"),
        norm="rms",
        names=("gate_proj", "up_proj", "down_proj"),
        bias=False,
    )
    kernel = Linear(
        name="downsample",
        in_features=merge**2 * width,
        out_features=out,
        reads="tower",
        bias=True,
        is_module=False,
    )
    merger = [("proj", out, out), ("gate_proj", out, wide), ("up_proj", out, wide)]
    merger += [("down_proj", wide, out)]
    places = (vision.size("image_size") // patch) ** 2
    return Tower(
        stack=stack(
            vision,
            (LayerGroup(layer=layer, count=vision.layers("depth"), stack="encoder"),),
            width=width,
            linears=(kernel, *matrices(merger, bias=False)),
            other_params=dense(channels * frames * patch**2, width)
            + places * width
            + width  # post_layernorm
            + 2 * out,  # post_projection_norm
            embeds_in_steps=True,
            embedding_norms=(Norm(name="post_conv_layernorm", kind="rms", width=width),),
        ),
        grid=GlmGrid(patch, merge, frames, channels),
        fields=("pixel_values", "image_grid_thw", "mm_token_type_ids"),
        kernel=Linear(
            name="proj",
            in_features=channels * frames * patch**2,
            out_features=width,
            reads="tower",
            is_module=False,
        ),
        projector="glm4v",
        merge=merge**2,
        num_embedded=0,
        num_returned=0,
        returned_width=out,
        table_bytes=rotation_bytes(vision, width),
        embedded=(width, 2 * width),  # normalised, and positions that `grid_sample` returns
        hooked=False,  # `Glm4vVisionModel` names no `_input_embed_layer`
    )


def glm4v_moe(vision: Fields, text: Fields) -> Tower:
    """`Glm4vMoeVisionModel`, the same.

    TRL 1.16's fused head reads `num_experts`, which this config does not have:
    `patch_fused_forward` of trl/trainer/utils.py.
    """
    return replace(glm4v(vision, text), fused_head=False)


_VISION = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
_GLM4V = Multimodal(
    text="glm4v_text", tied=False, images=glm4v, defaults=_VISION, tied_by_text=True
)
TYPES: Mapping[str, Multimodal] = {
    "glm4v": _GLM4V,
    "glm4v_moe": replace(_GLM4V, text="glm4v_moe_text", images=glm4v_moe),
}
