"""Multimodal models: the text tower in blocks, the vision tower as one number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from whichlora.families.fields import Fields
from whichlora.spec.architecture import Linear, ModelSpec

NOTE = (
    "text tower in blocks; the vision tower counts as {:,} further parameters, stored and adapted "
    "as its matrices are, but no image passes it: no activations, no work"
)
UNLOADED = "text tower, as AutoModelForCausalLM loads it, without the {:,} of the vision tower"
TEXT_ONLY = "text tower only: the config describes no vision tower"


def _matrices(
    shapes: Iterable[tuple[str, int, int]], *, count: int = 1, bias: bool = True
) -> tuple[Linear, ...]:
    """Matrices of a tower by name, input and output, `count` of each."""
    return tuple(
        Linear(name=name, in_features=into, out_features=out, reads="tower", count=count, bias=bias)
        for name, into, out in shapes
    )


def _norm(width: int) -> int:
    return 2 * width


def _dense(in_features: int, out_features: int) -> int:
    return in_features * out_features + out_features


def _qwen_merger(vision: Fields, width: int, out: int, *, norm: int) -> int:
    merged = width * vision.size("spatial_merge_size") ** 2
    return norm + _dense(merged, merged) + _dense(merged, out)


def _qwen_patch(vision: Fields) -> int:
    """Elements of one patch over its frames and channels."""
    frames = vision.size("in_channels") * vision.size("temporal_patch_size")
    return frames * vision.size("patch_size") ** 2


def qwen2_tower(vision: Fields, text: Fields) -> int:
    """Parameters of `Qwen2VisionTransformerPretrainedModel`."""
    width = vision.size("embed_dim")
    wide = int(width * (vision.number_or_none("mlp_ratio") or 4))
    block = 2 * _norm(width) + _dense(width, 3 * width) + _dense(width, width)
    block += _dense(width, wide) + _dense(wide, width)
    merger = _qwen_merger(vision, width, vision.size("hidden_size"), norm=_norm(width))
    return _qwen_patch(vision) * width + vision.layers("depth") * block + merger


def qwen2_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of `Qwen2VisionTransformerPretrainedModel`; its patches go through a kernel."""
    width = vision.size("embed_dim")
    wide = int(width * (vision.number_or_none("mlp_ratio") or 4))
    block = [("qkv", width, 3 * width), ("proj", width, width)]
    block += [("fc1", width, wide), ("fc2", wide, width)]
    merged = width * vision.size("spatial_merge_size") ** 2
    merger = [("0", merged, merged), ("2", merged, vision.size("hidden_size"))]
    return _matrices(block, count=vision.layers("depth")) + _matrices(merger)


def qwen2_5_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of `Qwen2_5_VisionTransformerPretrainedModel`."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    block = [("qkv", width, 3 * width), ("proj", width, width)]
    block += [("gate_proj", width, wide), ("up_proj", width, wide), ("down_proj", wide, width)]
    merged = width * vision.size("spatial_merge_size") ** 2
    merger = [("0", merged, merged), ("2", merged, vision.size("out_hidden_size"))]
    return _matrices(block, count=vision.layers("depth")) + _matrices(merger)


def qwen3_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of `Qwen3VLVisionModel`, one merger after the last block and some between."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    block = [("qkv", width, 3 * width), ("proj", width, width)]
    block += [("linear_fc1", width, wide), ("linear_fc2", wide, width)]
    merged = width * vision.size("spatial_merge_size") ** 2
    mergers = 1 + len(vision.indices("deepstack_visual_indexes"))
    merger = [("linear_fc1", merged, merged)]
    merger += [("linear_fc2", merged, vision.size("out_hidden_size"))]
    return _matrices(block, count=vision.layers("depth")) + _matrices(merger, count=mergers)


def pixtral_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of `PixtralVisionModel` and of Mistral 3's projector."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    out, merge = text.size("hidden_size"), text.size("spatial_merge_size")
    block = [(f"{name}_proj", width, width) for name in "qkvo"]
    block += [("gate_proj", width, wide), ("up_proj", width, wide), ("down_proj", wide, width)]
    around = [("merging_layer", merge**2 * width, width)]
    around += [("linear_1", width, out), ("linear_2", out, out)]
    return _matrices(block, count=vision.layers(), bias=False) + _matrices(around, bias=False)


def siglip_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
    """The matrices of Gemma 3's SigLIP encoder; the projection to the text is a parameter."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    block = [(f"{name}_proj", width, width) for name in ("k", "v", "q", "out")]
    block += [("fc1", width, wide), ("fc2", wide, width)]
    head: tuple[Linear, ...] = ()
    if vision.flag("vision_use_head"):
        head = _matrices([("out_proj", width, width), ("fc1", width, wide), ("fc2", wide, width)])
    return _matrices(block, count=vision.layers()) + head


def qwen2_5_tower(vision: Fields, text: Fields) -> int:
    """Parameters of `Qwen2_5_VisionTransformerPretrainedModel`: RMS norms and a gated MLP."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    block = 2 * width + _dense(width, 3 * width) + _dense(width, width)
    block += 2 * _dense(width, wide) + _dense(wide, width)
    merger = _qwen_merger(vision, width, vision.size("out_hidden_size"), norm=width)
    return _qwen_patch(vision) * width + vision.layers("depth") * block + merger


def qwen3_tower(vision: Fields, text: Fields) -> int:
    """Parameters of `Qwen3VLVisionModel` and `Qwen3_5VisionModel`.

    Qwen3-VL also merges the output of a few blocks in between ("deep stack").
    """
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    block = 2 * _norm(width) + _dense(width, 3 * width) + _dense(width, width)
    block += _dense(width, wide) + _dense(wide, width)
    out, merged = vision.size("out_hidden_size"), width * vision.size("spatial_merge_size") ** 2
    deep = len(vision.indices("deepstack_visual_indexes"))
    return (
        _dense(_qwen_patch(vision), width)
        + vision.size("num_position_embeddings") * width
        + vision.layers("depth") * block
        + _qwen_merger(vision, width, out, norm=_norm(width))
        + deep * _qwen_merger(vision, width, out, norm=_norm(merged))
    )


def pixtral_tower(vision: Fields, text: Fields) -> int:
    """Parameters of `PixtralVisionModel` and of Mistral 3's projector, which has no biases."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    out, merge = text.size("hidden_size"), text.size("spatial_merge_size")
    patch = vision.size("num_channels") * vision.size("patch_size") ** 2
    block = 4 * width**2 + 3 * width * wide + 2 * width
    projector = width + merge**2 * width**2 + width * out + out**2
    return patch * width + width + vision.layers() * block + projector


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
        + vision.layers() * block
        + width * text.size("hidden_size")
    )


def gemma4_tower_linears(vision: Fields, text: Fields) -> tuple[Linear, ...]:
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


def siglip_tower(vision: Fields, text: Fields) -> int:
    """Parameters of Gemma 3's SigLIP encoder and of the projector."""
    width, wide = vision.size("hidden_size"), vision.size("intermediate_size")
    patch = vision.size("patch_size")
    block = 2 * _norm(width) + 4 * _dense(width, width) + _dense(width, wide) + _dense(wide, width)
    positions = (vision.size("image_size") // patch) ** 2
    projector = width + width * text.size("hidden_size")
    head = 0
    if vision.flag("vision_use_head"):  # pools the image into one vector; Gemma's own have none
        head = width + _dense(width, 3 * width) + _dense(width, width) + _norm(width)
        head += _dense(width, wide) + _dense(wide, width)
    return (
        _dense(vision.size("num_channels") * patch**2, width)
        + positions * width
        + vision.layers() * block
        + _norm(width)
        + head
        + projector
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """Where a multimodal type keeps its parts.

    Args:
        text: model_type of the text tower where its config does not say.
        tied: whether the head is tied where the config does not say.
        tower: vision config, text facts -> parameters outside the text tower.
        defaults: of the vision config.
        linears: so its matrices, which PEFT's all-linear and bitsandbytes reach.
        splits: `AutoModelForCausalLM` loads the text tower alone. Source: transformers 5.23
            `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
    """

    text: str
    tied: bool
    tower: Callable[[Fields, Fields], int]
    defaults: Mapping[str, Any]
    linears: Callable[[Fields, Fields], tuple[Linear, ...]] = lambda *_: ()
    splits: bool = False


_QWEN2 = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5 = _QWEN2 | {"intermediate_size": 3420, "out_hidden_size": 3584}
_QWEN3 = {
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
    "vision_use_head": True,
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_channels": 3,
    "patch_size": 14,
}
TOWERS: Mapping[str, Multimodal] = {
    "gemma3": Multimodal(
        text="gemma3_text",
        tied=True,
        tower=siglip_tower,
        defaults=_SIGLIP,
        linears=siglip_linears,
    ),
    "gemma4": Multimodal(
        text="gemma4_text",
        tied=True,
        tower=gemma4_tower,
        defaults=_GEMMA4,
        linears=gemma4_tower_linears,
    ),
    "mistral3": Multimodal(
        text="mistral",
        tied=True,
        tower=pixtral_tower,
        defaults=_PIXTRAL,
        linears=pixtral_linears,
    ),
    "qwen2_vl": Multimodal(
        text="qwen2_vl_text",
        tied=False,
        tower=qwen2_tower,
        defaults=_QWEN2,
        linears=qwen2_linears,
    ),
    "qwen2_5_vl": Multimodal(
        text="qwen2_5_vl_text",
        tied=False,
        tower=qwen2_5_tower,
        defaults=_QWEN2_5,
        linears=qwen2_5_linears,
    ),
    "qwen3_vl": Multimodal(
        text="qwen3_vl_text",
        tied=False,
        tower=qwen3_tower,
        defaults=_QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]},
        linears=qwen3_linears,
    ),
    "qwen3_5": Multimodal(
        text="qwen3_5_text", tied=False, tower=qwen3_tower, defaults=_QWEN3, splits=True
    ),
    "qwen3_5_moe": Multimodal(
        text="qwen3_5_moe_text", tied=False, tower=qwen3_tower, defaults=_QWEN3, splits=True
    ),
}


def build_multimodal(
    c: Fields, build_text: Callable[[Mapping[str, Any]], ModelSpec], kind: Multimodal
) -> ModelSpec:
    """The text tower's blocks under the whole model's type, the vision tower beside them."""
    nested = c.part("text_config").values
    # Qwen2-VL's hub files hold the text tower's keys at the top, under the outer model_type.
    values = dict(nested or c.values)
    if not nested or "model_type" not in values:
        values["model_type"] = kind.text
    # The outer model owns the head, so it decides whether the head is tied.
    values["tie_word_embeddings"] = c.values.get("tie_word_embeddings", kind.tied)
    if "dtype" not in values and "torch_dtype" not in values:
        values["dtype"] = c.dtype
    text = build_text(values)
    spec = replace(text, model_type=c.text("model_type"), config=c.values)
    if c.get("vision_config") is None:
        return replace(spec, notes=(*spec.notes, TEXT_ONLY))
    facts = {
        "hidden_size": text.hidden_size,
        "spatial_merge_size": c.values.get("spatial_merge_size", 2),
    }
    vision = c.part("vision_config", defaults=kind.defaults)
    around = Fields(name=c.name, values=facts, defaults={}, synonyms={})
    extra = kind.tower(vision, around)
    note = (UNLOADED if kind.splits else NOTE).format(extra)
    return replace(
        spec,
        other_params=extra,
        idle_params=0 if kind.splits else extra,
        unloaded_params=extra if kind.splits else 0,
        idle_linears=kind.linears(vision, around),
        notes=(*spec.notes, note),
    )
