"""What a type of models that see or hear declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whichlora.families.fields import Fields
from whichlora.spec.layer import Linear
from whichlora.spec.tower import Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """Where a multimodal type keeps its parts.

    Args:
        scores_all: its class knows no `logits_to_keep`, and shifts a copy of its logits as they
            are for its own loss.
        part: key of the tower in the config.
        text: model_type of the text tower where its config does not say.
        renamed: model_types of the text tower that its config class takes as another.
        tied: whether the head is tied where the config does not say.
        tied_by_text: a text tower's config that ties the head does so, too. Source: transformers
            5.23 `LlavaConfig.__post_init__`.
        defaults: of the vision config.
        around: keys of the outer config, or of the text's, that the tower reads, with their
            defaults.
        images: vision config, text facts -> its blocks and the matrices around them; None of a
            tower that no image passes, of which `counted` says its parameters and its matrices,
            which PEFT's all-linear and bitsandbytes reach.
        causal: `AutoModelForCausalLM` knows the type. Source: transformers 5.23
            `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        splits: that class loads the text tower alone.
        hands_on_cache: the outer model hands its own `use_cache` on to the text's.
            Source: transformers 5.23 `merge_with_config_defaults` over its forward.
    """

    text: str
    tied: bool
    defaults: Mapping[str, Any]
    images: Callable[[Fields, Fields], Tower] | None = None
    counted: Callable[[Fields, Fields], tuple[int, tuple[Linear, ...]]] = lambda *_: (0, ())
    causal: bool = False
    splits: bool = False
    tied_by_text: bool = False
    hands_on_cache: bool = False
    part: str = "vision_config"
    scores_all: bool = False
    around: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads(self) -> str:
        """What passes the tower."""
        return "audio" if self.part == "audio_config" else "image"

    @property
    def tower_name(self) -> str:
        return "audio encoder" if self.reads == "audio" else "vision tower"
