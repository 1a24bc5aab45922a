"""Llama 3.2 Vision's tower: tiles of one image that attend to each other, for cross attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, matrices, self_attention, stack
from whichlora.spec.layer import LayerGroup, Norm
from whichlora.spec.tower import ImageGrid, Tower

_RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
_JOINED = (3, 7, 15, 23, 30)  # blocks whose results are joined with the last one's
_NUM_GATES = 2  # of one number each: of what attention and the MLP add
_ALIGNED = 8  # patches of a tile are filled up to a multiple of it


def arrangement(height: int, width: int, *, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of tiles that shrink an image least, or else enlarge it least.

    Among equal ones it is the smallest, then the one with the fewest rows.

    Kind: exact. Source: transformers 5.23 `get_optimal_tiled_canvas` of
    image_processing_mllama.py.
    """
    scales = {
        (rows, columns): min(side * rows / height, side * columns / width)
        for rows in range(1, most + 1)
        for columns in range(1, most // rows + 1)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    fitting = (grid for grid, scale in scales.items() if scale == chosen)
    return min(fitting, key=lambda grid: grid[0] * grid[1])


@dataclass(frozen=True, slots=True)
class PaddedTiles:
    """As many tiles as there can be, whatever the image is: those that it lacks are masked.

    One token stands in the text, which attends to all patches of all tiles.

    Args:
        patches: of a tile, with the token that stands before them.

    Kind: exact. Source: transformers 5.23 `pad_batches_and_tiles`, `MllamaProcessor.__call__`,
    `MllamaVisionModel.forward`.
    """

    side: int
    tiles: int
    channels: int
    patches: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        filled = -(-self.patches // _ALIGNED) * _ALIGNED
        return ImageGrid(
            crops=1,
            patches=self.tiles * filled,
            tokens=1,
            attended=self.tiles * self.patches,
            projected=self.tiles * filled,
            pixels=(1, self.tiles, self.channels, self.side, self.side),
            sides=arrangement(height, width, side=self.side, most=self.tiles),
            masked=self.tiles + 1,  # which tiles there are, and their arrangement
        )


def _groups(vision: Fields, width: int) -> tuple[LayerGroup, ...]:
    """Blocks of the whole image: those without gates come first."""
    attention = self_attention(
        width,
        vision.size("attention_heads"),
        qkv_bias=False,
        out_bias=False,
        adds_mask="product",
        always_masked=True,
    )
    local = block(
        attention,
        width=width,
        wide=vision.size("intermediate_size"),
        activation=vision.text("hidden_act"),
        norm="layer",
        names=("fc1", "fc2"),
    )
    gated = replace(local, gates_sums=True, other_params=_NUM_GATES)
    num_local, num_gated = vision.layers(), vision.count("num_global_layers")
    places = tuple(range(num_local)), tuple(range(num_local, num_local + num_gated))
    return tuple(
        LayerGroup(layer=layer, count=len(positions), positions=positions, stack="encoder")
        for layer, positions in zip((local, gated), places, strict=True)
        if positions
    )


def mllama(vision: Fields, text: Fields) -> Tower:
    """`MllamaVisionModel` and the matrix that projects to the text.

    Raises:
        ConfigError: a width of the result that its blocks do not have.
    """
    width, side, patch = (vision.size(name) for name in ("hidden_size", "image_size", "patch_size"))
    tiles, channels = vision.size("max_num_tiles"), vision.size("num_channels")
    patches = (side // patch) ** 2 + 1
    rows = len(vision.get("supported_aspect_ratios") or _RATIOS) + 1
    joined, out = vision.get("intermediate_layers_indices"), vision.size("vision_output_dim")
    num_joined = len(_JOINED if joined is None else joined)
    if out != width * (1 + num_joined):
        raise ConfigError(
            f"{vision.name}: vision_output_dim {out} must be hidden_size {width} of the last and "
            f"of {num_joined} blocks before it, {width * (1 + num_joined)}; correct the config"
        )
    groups = _groups(vision, width)
    before, after = (
        Norm(name=name, kind="layer", width=width, bias=True)
        for name in ("layernorm_pre", "layernorm_post")
    )
    return Tower(
        stack=stack(
            vision,
            groups,
            width=width,
            linears=matrices([("multi_modal_projector", out, text.size("hidden_size"))]),
            other_params=channels * patch**2 * width
            + width  # the token of the tile
            + (patches + rows * tiles * patches) * width
            + 2 * rows * tiles * width
            + 3  # gates of the three tables
            + 2 * width,  # layernorm_post
            embeds_in_steps=True,
            embedding_norms=(before,),
        ),
        grid=PaddedTiles(side, tiles, channels, patches),
        fields=("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"),
        projector="mllama",
        merge=1,
        strips=True,
        num_returned=0,
        copies=0,
        returned_width=out,
        num_embedded=max(1, sum(group.count for group in groups) - 1),
        named_elements=tiles * (patches - 1) * width,
        tables=((rows, tiles * patches * width), *((rows, tiles * width),) * 2),
        table_saved=tiles * (patches + 2) * width,
        # patches with the token, their sums with positions and with those of tiles, which are
        # there as they are looked up and multiplied with a gate
        embedded=(5 * width, 0),
        inner_norms=(after,),
        stacks_rows=True,
        attended=True,
        # `MllamaVisionEncoder.forward` of 4.46 to 4.54 does, that of 4.55 calls its layers alone
        checkpointed=(("0", True), ("4.55", False)),
        # `output_hidden_states` is handed to the first encoder alone until 4.54
        named_blocks=(("0", groups[0].count + 1), ("4.55", sum(group.count for group in groups))),
        num_joined=num_joined,
        # `torch.stack(all_intermediate_hidden_states)` of 4.46 is of all, of which it takes these
        stacked=(("0", groups[0].count + 1), ("4.47", num_joined)),
        holds_narrow=False,
    )


_MLLAMA = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "hidden_act": "gelu",
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
        images=mllama,
        defaults=_MLLAMA,
    )
}
