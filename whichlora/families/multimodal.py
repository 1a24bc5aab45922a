"""Multimodal models: the text tower in blocks, the vision tower as one number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from whichlora.architecture import ModelSpec
from whichlora.families.fields import Fields

NOTE = "text tower in blocks; the vision tower counts as {:,} further parameters, no work"
TEXT_ONLY = "text tower only: the config describes no vision tower"


def _norm(width: int) -> int:
    return 2 * width


def _dense(in_features: int, out_features: int) -> int:
    return in_features * out_features + out_features


def qwen_tower(vision: Fields, text: Fields) -> int:
    """Parameters of `Qwen3_5VisionModel`: patches, positions, blocks, and the merger."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch = vision.size("in_channels") * vision.size("temporal_patch_size")
    patch *= vision.size("patch_size") ** 2
    block = (
        2 * _norm(width)
        + _dense(width, 3 * width)
        + _dense(width, width)
        + _dense(width, wide)
        + _dense(wide, width)
    )
    merged = width * vision.size("spatial_merge_size") ** 2
    out = vision.size("out_hidden_size")
    return (
        _dense(patch, width)
        + vision.size("num_position_embeddings") * width
        + vision.size("depth") * block
        + _norm(width)
        + _dense(merged, merged)
        + _dense(merged, out)
    )


def gemma4_tower(vision: Fields, text: Fields) -> int:
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
        + vision.size("num_hidden_layers") * block
        + width * text.size("hidden_size")
    )


def siglip_tower(vision: Fields, text: Fields) -> int:
    """Parameters of Gemma 3's SigLIP encoder and of its projector."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch = vision.size("patch_size")
    block = 2 * _norm(width) + 4 * _dense(width, width) + _dense(width, wide) + _dense(wide, width)
    positions = (vision.size("image_size") // patch) ** 2
    projector = width + width * text.size("hidden_size")
    return (
        _dense(vision.size("num_channels") * patch**2, width)
        + positions * width
        + vision.size("num_hidden_layers") * block
        + _norm(width)
        + projector
    )


Tower = Callable[[Fields, Fields], int]
_QWEN = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
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
_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
# model_type -> model_type of its text tower, the head's default, its vision tower
TOWERS: Mapping[str, tuple[str, bool, Tower | None, Mapping[str, int]]] = {
    "gemma3": ("gemma3_text", True, siglip_tower, _SIGLIP),
    "gemma4": ("gemma4_text", True, gemma4_tower, _GEMMA4),
    "qwen3_5": ("qwen3_5_text", False, qwen_tower, _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", False, qwen_tower, _QWEN),
}


def with_tower(
    c: Fields, build_text: Callable[[Mapping[str, object]], ModelSpec], model_type: str
) -> ModelSpec:
    """The text tower's spec under the whole model's type, the vision tower beside it."""
    text_type, tied, tower, defaults = TOWERS[model_type]
    text_values = dict(c.part("text_config").values)
    text_values["model_type"] = text_type
    # The outer model owns the head, so it decides whether the head is tied.
    text_values["tie_word_embeddings"] = c.values.get("tie_word_embeddings", tied)
    if "dtype" not in text_values and "torch_dtype" not in text_values:
        text_values["dtype"] = c.dtype
    text = build_text(text_values)
    spec = replace(text, model_type=model_type, config=c.values)
    if tower is None or c.get("vision_config") is None:
        return replace(spec, notes=(*spec.notes, TEXT_ONLY))
    hidden = Fields(name=c.name, values={"hidden_size": text.hidden_size}, defaults={}, synonyms={})
    extra = tower(c.part("vision_config", defaults=defaults), hidden)
    return replace(spec, other_params=extra, notes=(*spec.notes, NOTE.format(extra)))
