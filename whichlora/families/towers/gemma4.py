"""Gemma 4's vision tower, as one number of parameters: no image passes it yet."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.spec.architecture import Linear


def _count(vision: Fields, text: Fields) -> int:
    """Parameters of `Gemma4VisionModel` and of the projection to the text tower."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    head_dim = vision.size("head_dim")
    q_width = vision.size("num_attention_heads") * head_dim
    kv_width = vision.size("num_key_value_heads") * head_dim
    block = (
        2 * width * (q_width + kv_width)
        + 2 * head_dim  # q_norm and k_norm
        + 3 * width * wide
        + 4 * width  # norms around both halves
    )
    patch = 3 * vision.size("patch_size") ** 2
    return (
        patch * width
        + 2 * vision.size("position_embedding_size") * width  # rows and columns
        + vision.layers() * block
        + width * text.size("hidden_size")
    )


def _linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of `Gemma4VisionModel`, clipped ones under the name of what they wrap."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    q_width = vision.size("num_attention_heads") * vision.size("head_dim")
    kv_width = vision.size("num_key_value_heads") * vision.size("head_dim")
    hidden = text.size("hidden_size")
    shapes = [("linear", width, q_width), ("linear", q_width, width)]
    shapes += [("linear", width, kv_width)] * 2
    shapes += [("linear", width, wide)] * 2 + [("linear", wide, width)]
    blocks = [
        Linear(name=name, in_features=into, out_features=out, reads="tower", count=vision.layers())
        for name, into, out in shapes
    ]
    patch = 3 * vision.size("patch_size") ** 2
    return (
        Linear(name="input_proj", in_features=patch, out_features=width, reads="tower"),
        *blocks,
        Linear(name="embedding_projection", in_features=width, out_features=hidden, reads="tower"),
    )


_GEMMA4 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 10240,
}
TYPES: Mapping[str, Multimodal] = {
    "gemma4": Multimodal(
        text="gemma4_text",
        tied=True,
        causal=True,
        hands_on_cache=True,
        tower=_count,
        defaults=_GEMMA4,
        linears=_linears,
    )
}
