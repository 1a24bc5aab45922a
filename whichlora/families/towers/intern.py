"""InternViT: an image in squares of one size and once as a whole, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, dense, matrices, self_attention, stack
from whichlora.spec.layer import LayerGroup, Norm, NormKind
from whichlora.spec.tower import ImageGrid, Tower

_MOST_SQUARES = 12  # `max_patches` of published preprocessor_config.json
_NORMS: Mapping[str, NormKind] = {"layer_norm": "layer", "rms_norm": "rms"}


def arrangement(height: int, width: int, *, side: int, most: int) -> tuple[int, int]:
    """Columns and rows of squares of `side` pixels that an image is resized to.

    Those whose ratio is nearest to the image's; of equal ones the last that has less than twice
    the image's pixels.

    Kind: exact. Source: transformers 5.23 `get_optimal_tiled_canvas` of
    image_processing_got_ocr2.py.
    """
    every = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if columns * rows <= most
    ]
    chosen, nearest = (1, 1), float("inf")
    for columns, rows in sorted(every, key=lambda sides: sides[0] * sides[1]):
        off = abs(width / height - columns / rows)
        if off < nearest:
            chosen, nearest = (columns, rows), off
        elif off == nearest and height * width > 0.5 * side * side * columns * rows:
            chosen = columns, rows
    return chosen


@dataclass(frozen=True, slots=True)
class SquaresGrid:
    """Squares of `side` pixels, and where there are several the image as a whole.

    A token of the whole square passes the blocks, and is left out after them. Marks of begin and
    end stand around the tokens of an image.

    Args:
        merge: patches of one token.

    Kind: exact. Source: transformers 5.23 `GotOcr2ImageProcessor.crop_image_to_patches`,
    `InternVLProcessor.replace_image_token`.
    """

    side: int
    patch: int
    channels: int
    merge: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        columns, rows = arrangement(height, width, side=self.side, most=_MOST_SQUARES)
        squares = columns * rows
        crops = squares + (squares > 1)
        patches = (self.side // self.patch) ** 2
        return ImageGrid(
            crops=crops,
            patches=patches + 1,
            tokens=crops * (patches // self.merge),
            pixels=(crops, self.channels, self.side, self.side),
            markers=2,
        )


def _side(vision: Fields, key: str) -> int:
    """Of a square, which the config gives as one number or as two.

    Raises:
        ConfigError: it is no square.
    """
    value = vision.get(key)
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int) or sides[0] < 1:
        raise ConfigError(f"{vision.name}: {key} {value!r} is no square; correct the config")
    return int(sides[0])


def internvl(vision: Fields, text: Fields) -> Tower:
    """`InternVLVisionModel` and `InternVLMultiModalProjector`.

    Raises:
        ConfigError: another layer than the last, or a norm after it.
    """
    layer, strategy = text.get("vision_feature_layer"), text.get("vision_feature_select_strategy")
    kind = vision.text("norm_type")
    if (layer, strategy) != (-1, "default") or kind not in _NORMS:
        raise ConfigError(
            f"{vision.name}: vision_feature_layer {layer!r}, strategy {strategy!r}, norm {kind!r} "
            "are not known to the formulas; accepted are -1, default, layer_norm and rms_norm"
        )
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    side, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    channels, out = vision.size("num_channels"), text.size("hidden_size")
    merge = round(1 / (text.number_or_none("downsample_ratio") or 0.5)) ** 2
    patches = (side // patch) ** 2
    attention = self_attention(
        width,
        vision.size("num_attention_heads"),
        out_name="projection_layer",
        qkv_bias=vision.flag("attention_bias"),
        norms=tuple(Norm(name=name, kind="rms", width=width) for name in ("q_norm", "k_norm"))
        * vision.flag("use_qk_norm"),
    )
    made = block(
        attention,
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm=_NORMS[kind],
        names=("fc1", "fc2"),
    )
    made = replace(made, scales_channels=True, other_params=2 * width)
    positions = (patches + 1) * width * vision.flag("use_absolute_position_embeddings")
    normalises = not vision.flag("use_mean_pooling")
    return Tower(
        stack=stack(
            vision,
            (LayerGroup(layer=made, count=vision.layers(), stack="encoder"),),
            width=width,
            linears=matrices([("linear_1", merge * width, out), ("linear_2", out, out)]),
            other_params=dense(channels * patch**2, width)
            + width  # the token of the square
            + positions
            + 2 * width * normalises
            + 2 * merge * width,  # the projector's norm
            embeds_in_steps=True,
        ),
        grid=SquaresGrid(side, patch, channels, merge),
        fields=("pixel_values",),
        projector="internvl",
        merge=merge,
        copies=0,
        embedded=(2 * width, 0),  # joined with the token of the square, and the sum with positions
        normalises=normalises,
    )


_INTERN = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
TYPES: Mapping[str, Multimodal] = {
    "internvl": Multimodal(
        text="qwen2",
        tied=True,
        images=internvl,
        defaults=_INTERN,
        around={
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
    )
}
