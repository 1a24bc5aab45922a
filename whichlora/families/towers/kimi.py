"""Kimi K2.5's tower of images, as a number of parameters: no image passes it yet."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import dense, matrices
from whichlora.spec.layer import Linear

_CHANNELS = 3


def _merged(vision: Fields) -> int:
    """Elements of the patches that become one token."""
    height, width = vision.items("merge_kernel_size", length=2) or (1, 1)
    return int(vision.size("hidden_size") * height * width)


def _linears(vision: Fields, around: Fields) -> tuple[Linear, ...]:
    """Those of the blocks, then of `Kimi_K25MultimodalProjection`."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    merged = _merged(vision)
    inside = [(name, width, width) for name in ("q_proj", "k_proj", "v_proj", "proj")]
    inside += [("fc1", width, wide), ("fc2", wide, width)]
    behind = [("in_proj", merged, merged), ("out_proj", merged, around.size("hidden_size"))]
    return (*matrices(inside, count=vision.layers()), *matrices(behind))


def _count(vision: Fields, around: Fields) -> int:
    """`Kimi_K25VisionModel`: patches, their places, blocks with two norms; its projection."""
    width = vision.size("hidden_size")
    places = vision.size("pos_emb_height") * vision.size("pos_emb_width") * width
    patches = dense(_CHANNELS * vision.size("patch_size") ** 2, width)
    norms = 2 * width * (2 * vision.layers() + 1) + 2 * around.size("projection_hidden_size")
    return places + patches + norms + sum(x.num_params for x in _linears(vision, around))


TYPES: Mapping[str, Multimodal] = {
    "kimi_k25": Multimodal(
        text="deepseek_v3",
        renamed={"kimi_k2": "deepseek_v3"},
        tied=True,
        counted=lambda vision, around: (_count(vision, around), _linears(vision, around)),
        # The hub's keys begin with `vt_`, which the class does not read: it takes these.
        defaults={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "merge_kernel_size": [2, 2],
        },
        around={"projection_hidden_size": 1152},
    )
}
