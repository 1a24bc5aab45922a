"""SigLIP's tower: images of one size, whatever they were before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, dense, matrices, self_attention, stack
from whichlora.spec.layer import LayerGroup, Linear
from whichlora.spec.tower import ImageGrid, Tower


@dataclass(frozen=True, slots=True)
class FixedGrid:
    """Every image is resized to a square of `side` pixels.

    Marks of its begin and its end, and an empty line before and after, one token each.
    Source: transformers 5.23 `Gemma3ImageProcessor._preprocess`, without pan and scan;
    `Gemma3Processor.full_image_sequence`.
    """

    side: int
    patch: int
    channels: int
    tokens: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        return ImageGrid(
            crops=1,
            patches=(self.side // self.patch) ** 2,
            tokens=self.tokens,
            markers=4,
            pixels=(1, self.channels, self.side, self.side),
        )


def siglip_groups(vision: Fields, width: int, wide: int) -> tuple[LayerGroup, ...]:
    """The blocks of `SiglipEncoder`."""
    layer = block(
        self_attention(width, vision.size("num_attention_heads"), out_name="out_proj"),
        width=width,
        wide=wide,
        activation=vision.text("hidden_act"),
        norm="layer",
        names=("fc1", "fc2"),
    )
    return (LayerGroup(layer=layer, count=vision.layers(), stack="encoder"),)


def gemma3(vision: Fields, text: Fields) -> Tower:
    """`SiglipVisionModel` and `Gemma3MultiModalProjector`, whose matrix is a parameter."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch, side = vision.size("patch_size"), vision.size("image_size")
    channels, tokens = vision.size("num_channels"), text.size("mm_tokens_per_image")
    patches = (side // patch) ** 2
    projection = Linear(
        name="mm_input_projection_weight",
        in_features=width,
        out_features=text.size("hidden_size"),
        reads="tower",
        is_module=False,
    )
    head: tuple[Linear, ...] = ()
    in_head = 0
    if vision.flag("vision_use_head"):  # pools the image into one vector; Gemma's own have none
        head = matrices([("out_proj", width, width), ("fc1", width, wide), ("fc2", wide, width)])
        in_head = width + dense(width, 3 * width) + 2 * width
    return Tower(
        block_class="SiglipEncoderLayer",
        stack=stack(
            vision,
            siglip_groups(vision, width, wide),
            width=width,
            linears=(projection, *head),
            other_params=dense(channels * patch**2, width)
            + patches * width
            + 2 * width  # post_layernorm
            + width  # mm_soft_emb_norm
            + in_head,
            embeds_in_steps=True,
        ),
        grid=FixedGrid(side, patch, channels, tokens),
        fields=("pixel_values", "token_type_ids"),
        projector="gemma3",
        merge=max(1, patches // tokens),
        copies=0,
        embedded=(2 * width, 0),  # what the kernel returns, and its sum with the positions
        holds_narrow=False,
        normalises=True,
        masks_text="all",
    )


_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
}
TYPES: Mapping[str, Multimodal] = {
    "gemma3": Multimodal(
        text="gemma3_text",
        tied=True,
        causal=True,
        images=gemma3,
        defaults=_SIGLIP,
        around={"mm_tokens_per_image": 256},
    )
}
