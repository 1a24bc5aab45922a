"""CLIP's tower before a language model: squares of one size, and a token of the whole image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import dense, matrices, stack
from whichlora.families.towers.siglip import siglip_groups
from whichlora.spec.layer import Norm
from whichlora.spec.tower import ImageGrid, Tower


@dataclass(frozen=True, slots=True)
class CroppedGrid:
    """Every image is resized and cropped to a square of `side` pixels.

    The token of the whole image passes the blocks, and is left out after them.

    Kind: exact. Source: transformers 5.23 `CLIPImageProcessor`, `LlavaProcessor.__call__`.
    """

    side: int
    patch: int
    channels: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        patches = (self.side // self.patch) ** 2
        return ImageGrid(
            crops=1,
            patches=patches + 1,
            tokens=patches,
            pixels=(1, self.channels, self.side, self.side),
        )


@dataclass(frozen=True, slots=True)
class TiledGrid:
    """An image as a whole, and once more in squares of `side` pixels.

    It is scaled into the resolution that wastes least. Vectors of the border are left out, and one
    more ends each row.

    Args:
        resolutions: height and width, of which one is chosen.

    Kind: exact. Source: transformers 5.23 `select_best_resolution`,
    `LlavaNextProcessor._get_number_of_features`.
    """

    side: int
    patch: int
    channels: int
    resolutions: tuple[tuple[int, int], ...]

    def __call__(self, height: int, width: int) -> ImageGrid:
        best_height, best_width = self._resolution(height, width)
        across = self.side // self.patch
        rows, columns = best_height // self.side, best_width // self.side
        rows, columns = across * rows, across * columns
        if width / height > columns / rows:
            rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
        else:
            columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
        crops = 1 + (best_height // self.side) * (best_width // self.side)
        return ImageGrid(
            crops=crops,
            patches=across**2 + 1,
            tokens=across**2 + rows * (columns + 1),
            pixels=(1, crops, self.channels, self.side, self.side),
            sides=(height, width),
            projected=crops * across**2,
        )

    def _resolution(self, height: int, width: int) -> tuple[int, int]:
        """The one that keeps most pixels of an image, then the one of least empty pixels."""

        def kept(sides: tuple[int, int]) -> tuple[int, int]:
            scale = min(sides[1] / width, sides[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - sides[0] * sides[1]

        return max(self.resolutions, key=kept)


def llava_next(vision: Fields, text: Fields) -> Tower:
    """LLaVA's tower over the squares of an image, and a vector that ends a row.

    Raises:
        ConfigError: as of `llava`.
    """
    tower = llava(vision, text)
    grid = tower.grid
    assert isinstance(grid, CroppedGrid)
    resolutions = tuple((high, wide) for high, wide in text.get("image_grid_pinpoints"))
    others = tower.stack.other_params + text.size("hidden_size")  # `image_newline`
    return replace(
        tower,
        stack=replace(tower.stack, other_params=others),
        grid=TiledGrid(grid.side, grid.patch, grid.channels, resolutions),
        fields=("pixel_values", "image_sizes"),
        projector="llava_next",
        joins_pixels=True,
    )


def llava(vision: Fields, text: Fields) -> Tower:
    """`CLIPVisionModel` and `LlavaMultiModalProjector`.

    Raises:
        ConfigError: another tower than CLIP's, or another layer of it than the last but one.
    """
    kind = vision.values.get("model_type", "clip_vision_model")
    layer, strategy = text.get("vision_feature_layer"), text.get("vision_feature_select_strategy")
    if (kind, layer, strategy) != ("clip_vision_model", -2, "default"):
        raise ConfigError(
            f"{vision.name}: vision tower {kind}, layer {layer!r}, strategy {strategy!r} is not "
            "known to the formulas; accepted are clip_vision_model, -2 and default"
        )
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch, side, out = (
        vision.size("patch_size"),
        vision.size("image_size"),
        text.size("hidden_size"),
    )
    channels = vision.size("num_channels")
    patches = (side // patch) ** 2
    (blocks,) = siglip_groups(vision, width, wide)
    return Tower(
        block_class="CLIPEncoderLayer",
        stack=stack(
            vision,
            (replace(blocks, count=blocks.count - 1),),
            width=width,
            linears=matrices([("linear_1", width, out), ("linear_2", out, out)]),
            other_params=dense(channels * patch**2, width)  # the token of the image for a bias
            + (patches + 1) * width,
            embeds_in_steps=True,
            embedding_norms=(Norm(name="pre_layrnorm", kind="layer", width=width, bias=True),),
        ),
        grid=CroppedGrid(side, patch, channels),
        fields=("pixel_values",),
        projector="llava",
        merge=1,
        idle=blocks.layer.linears,
        runs_idle=True,
        idle_params=blocks.layer.num_params + 2 * width,  # post_layernorm
        num_returned=2,  # the last states, and those of the layer that is read
        embedded=(3 * width, 0),  # what the kernel returns, joined, and its sum with the positions
        holds_narrow=False,
    )


_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "hidden_act": "quick_gelu",
    "image_size": 224,
    "patch_size": 32,
}
_AROUND = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
TYPES: Mapping[str, Multimodal] = {
    "llava": Multimodal(
        text="llama",
        tied=False,
        tied_by_text=True,
        images=llava,
        defaults=_CLIP,
        around=_AROUND,
    ),
    "llava_next": Multimodal(
        text="llama",
        tied=False,
        hands_on_cache=True,
        images=llava_next,
        defaults=_CLIP,
        around=_AROUND | {"image_grid_pinpoints": _RESOLUTIONS},
    ),
}
