"""Multimodal models: the text tower in blocks, and the tower that images pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from whichlora.families.fields import Fields
from whichlora.families.labels import of_decoder
from whichlora.families.towers import (
    clip,
    gemma3n,
    gemma4,
    glm,
    intern,
    kimi,
    llama4,
    mllama,
    pixtral,
    qwen,
    qwen2_audio,
    siglip,
    smolvlm,
)
from whichlora.families.towers.base import Multimodal
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import UNTIL_TODAY

TEXT_TOWER = "text tower"  # how these notes begin
NOTE = "text tower; the {} adds {:,} parameters, and no {} passes it: no activations, no work"
UNLOADED = "text tower, as AutoModelForCausalLM loads it, without the {:,} of the {}"
TEXT_ONLY = "text tower only: the config describes no {}"
TOWERS: Mapping[str, Multimodal] = {
    model_type: declared
    for module in (
        clip,
        gemma3n,
        gemma4,
        glm,
        intern,
        kimi,
        llama4,
        mllama,
        pixtral,
        qwen,
        qwen2_audio,
        siglip,
        smolvlm,
    )
    for model_type, declared in module.TYPES.items()
}


def is_image_class(config: Mapping[str, Any], *, images: bool = False) -> bool:
    """Whether `AutoModelForImageTextToText` loads a model, for texts with `images` or alone.

    Kind: exact. Source: transformers 5.23, the tables of modeling_auto.py.
    """
    kind = TOWERS.get(str(config.get("model_type")))
    return kind is not None and kind.reads == "image" and (images or not kind.causal)


def is_audio_class(config: Mapping[str, Any]) -> bool:
    """Whether `AutoModelForMultimodalLM` loads a model, which no narrower class knows.

    Kind: exact. Source: transformers 5.23, the tables of modeling_auto.py.
    """
    kind = TOWERS.get(str(config.get("model_type")))
    return kind is not None and kind.reads == "audio"


def vision_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The vision tower's part of `config`, its defaults filled in; None where a model has none."""
    kind = TOWERS.get(str(config.get("model_type")))
    stated = None if kind is None else config.get(kind.part)
    return None if kind is None or stated is None else {**kind.defaults, **stated}


def build_multimodal(
    c: Fields, build_text: Callable[[Mapping[str, Any]], ModelSpec], kind: Multimodal
) -> ModelSpec:
    """The text tower's blocks under the whole model's type, the vision tower beside them."""
    nested = c.part("text_config").values
    # Qwen2-VL's hub files hold the text tower's keys at the top, under the outer model_type.
    values = dict(nested or c.values)
    if not nested or "model_type" not in values:
        values["model_type"] = kind.text
    values["model_type"] = kind.renamed.get(values["model_type"], values["model_type"])
    # The outer model owns the head, so it decides whether the head is tied, most often alone.
    by_text = kind.tied_by_text and bool(values.get("tie_word_embeddings"))
    values["tie_word_embeddings"] = by_text or c.values.get("tie_word_embeddings", kind.tied)
    if "dtype" not in values and "torch_dtype" not in values:
        values["dtype"] = c.dtype
    text = build_text(values)
    spec = _around(c, text, kind, splits=kind.splits)
    spec = replace(spec, label_heads=of_decoder(spec))  # most outer types have no such class
    if c.get(kind.part) is None:
        note = TEXT_ONLY.format(kind.tower_name)
        return replace(spec, for_images=None, notes=(*spec.notes, note))
    if text.for_images is not None:
        for_images = _with_tower(
            c, values, _around(c, text.for_images, kind, splits=False), kind, splits=False
        )
        spec = replace(spec, for_images=for_images)
    return _with_tower(c, values, spec, kind, splits=kind.splits)


def _around(c: Fields, text: ModelSpec, kind: Multimodal, *, splits: bool) -> ModelSpec:
    return replace(
        text,
        model_type=c.text("model_type"),
        config=c.values,
        caches_in_training=not (splits or kind.hands_on_cache),
        narrow_loss_before=UNTIL_TODAY if kind.scores_all else text.narrow_loss_before,
        scores_prompt_before=UNTIL_TODAY if kind.scores_all else text.scores_prompt_before,
    )


def _with_tower(
    c: Fields, values: Mapping[str, Any], spec: ModelSpec, kind: Multimodal, *, splits: bool
) -> ModelSpec:
    """`spec` with its tower; `splits`: its class leaves the tower on the disk."""
    stated = {**values, **c.values}
    named = {key: stated[key] for key in kind.around if stated.get(key) is not None}
    facts = {**kind.around, **named, "hidden_size": spec.hidden_size}
    vision = c.part(kind.part, defaults=kind.defaults)
    around = Fields(name=c.name, values=facts, defaults={}, synonyms={})
    tower = None if kind.images is None else kind.images(vision, around)
    extra, linears = kind.counted(vision, around)
    if tower is not None:
        extra = tower.stack.num_params + tower.idle_params
        linears = (*tower.linears, *tower.idle)
    name = kind.tower_name
    note = NOTE.format(name, extra, kind.reads)
    if splits:
        note = UNLOADED.format(extra, name)
    return replace(
        spec,
        other_params=spec.other_params + extra,
        idle_params=spec.idle_params + (0 if splits else extra),
        unloaded_params=extra if splits else 0,
        idle_linears=(*spec.idle_linears, *(() if splits else linears)),
        tower=tower,
        notes=(*spec.notes, note),
    )
