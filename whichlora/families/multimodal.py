"""Multimodal models: the text tower in blocks, the vision tower as one number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from whichlora.families.fields import Fields
from whichlora.families.labels import of_decoder
from whichlora.families.towers import clip, intern, pixtral, qwen, siglip, smolvlm
from whichlora.spec.architecture import Linear, ModelSpec, Tower

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """Where a multimodal type keeps its parts.

    Args:
        text: model_type of the text tower where its config does not say.
        tied: whether the head is tied where the config does not say.
        tower: vision config, text facts -> parameters outside the text tower.
        defaults: of the vision config.
        linears: so its matrices, which PEFT's all-linear and bitsandbytes reach.
        images: so its blocks; a tower that has none of these is counted, and no image passes it.
        reads_images: False where no trace has confirmed what images do in these blocks: they are
            counted alone.
        causal: `AutoModelForCausalLM` knows the type. Source: transformers 5.23
            `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        splits: that class loads the text tower alone.
        around: keys of the outer config that the tower reads, where their defaults differ from
            `_AROUND`.
        hands_on_cache: the outer model hands its own `use_cache` on to the text's.
            Source: transformers 5.23 `merge_with_config_defaults` over its forward.
    """

    text: str
    tied: bool
    defaults: Mapping[str, Any]
    tower: Callable[[Fields, Fields], int] = lambda *_: 0
    linears: Callable[[Fields, Fields], tuple[Linear, ...]] = lambda *_: ()
    images: Callable[[Fields, Fields], Tower] | None = None
    reads_images: bool = True
    causal: bool = False
    splits: bool = False
    hands_on_cache: bool = False
    around: Mapping[str, Any] = field(default_factory=dict)


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
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "hidden_act": "gelu",
    "image_size": 1540,
    "patch_size": 14,
}
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
_SMOLVLM = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
}
_SPLIT = Multimodal(
    text="llama",
    tied=False,
    hands_on_cache=True,
    images=smolvlm.smolvlm,
    defaults=_SMOLVLM,
)
TOWERS: Mapping[str, Multimodal] = {
    "gemma3": Multimodal(
        text="gemma3_text",
        tied=True,
        causal=True,
        images=siglip.gemma3,
        defaults=_SIGLIP,
    ),
    "gemma4": Multimodal(
        text="gemma4_text",
        tied=True,
        causal=True,
        hands_on_cache=True,
        tower=gemma4_tower,
        defaults=_GEMMA4,
        linears=gemma4_tower_linears,
    ),
    "idefics3": _SPLIT,
    "internvl": Multimodal(
        text="qwen2",
        tied=True,
        images=intern.internvl,
        defaults=_INTERN,
        around={"vision_feature_layer": -1},
    ),
    "llava": Multimodal(text="llama", tied=False, images=clip.llava, defaults=_CLIP),
    "llava_next": Multimodal(
        text="llama", tied=False, hands_on_cache=True, images=clip.llava_next, defaults=_CLIP
    ),
    "mistral3": Multimodal(
        text="mistral",
        tied=True,
        hands_on_cache=True,
        images=pixtral.mistral3,
        defaults=_PIXTRAL,
    ),
    "smolvlm": _SPLIT,
    "qwen2_vl": Multimodal(
        text="qwen2_vl_text",
        tied=False,
        images=qwen.qwen2,
        defaults=_QWEN2,
    ),
    "qwen2_5_vl": Multimodal(
        text="qwen2_5_vl_text",
        tied=False,
        images=qwen.qwen2_5,
        defaults=_QWEN2_5,
    ),
    "qwen3_vl": Multimodal(
        text="qwen3_vl_text",
        tied=False,
        images=qwen.qwen3,
        defaults=_QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]},
    ),
    "qwen3_5": Multimodal(
        text="qwen3_5_text",
        tied=False,
        tower=qwen3_tower,
        defaults=_QWEN3,
        causal=True,
        splits=True,
    ),
    "qwen3_5_moe": Multimodal(
        text="qwen3_5_moe_text",
        tied=False,
        tower=qwen3_tower,
        defaults=_QWEN3,
        causal=True,
        splits=True,
    ),
}


# keys of the outer config that towers read, with the values of a config that lacks them
_AROUND: Mapping[str, Any] = {
    "spatial_merge_size": 2,
    "mm_tokens_per_image": 256,
    "downsample_ratio": 0.5,
    "scale_factor": 2,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
}


def is_image_class(config: Mapping[str, Any], *, images: bool = False) -> bool:
    """Whether `AutoModelForImageTextToText` loads a model, for texts with `images` or alone.

    Kind: exact. Source: transformers 5.23, the tables of modeling_auto.py.
    """
    kind = TOWERS.get(str(config.get("model_type")))
    return kind is not None and (images or not kind.causal)


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
    spec = replace(
        text,
        model_type=c.text("model_type"),
        config=c.values,
        caches_in_training=not (kind.splits or kind.hands_on_cache),
    )
    spec = replace(spec, label_heads=of_decoder(spec))  # most outer types have no such class
    if c.get("vision_config") is None:
        return replace(spec, notes=(*spec.notes, TEXT_ONLY))
    named = {key: c.values[key] for key in _AROUND if c.values.get(key) is not None}
    facts = {**_AROUND, **kind.around, **named, "hidden_size": text.hidden_size}
    vision = c.part("vision_config", defaults=kind.defaults)
    around = Fields(name=c.name, values=facts, defaults={}, synonyms={})
    tower = None if kind.images is None else kind.images(vision, around)
    extra, linears = kind.tower(vision, around), kind.linears(vision, around)
    if tower is not None:
        extra = tower.stack.num_params + tower.idle_params
        linears = (*tower.linears, *tower.idle)
    note = (UNLOADED if kind.splits else NOTE).format(extra)
    return replace(
        spec,
        other_params=extra,
        idle_params=0 if kind.splits else extra,
        unloaded_params=extra if kind.splits else 0,
        idle_linears=linears,
        tower=tower if kind.reads_images else None,
        notes=(*spec.notes, note),
    )
