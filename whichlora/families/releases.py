"""What classes of transformers did otherwise in older releases, by type of model.

Read: the modeling files of 4.38 to 4.57.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whichlora.spec.architecture import ModelSpec

# The release since which they return a cache; before, tuples of keys and values, also in training:
# `return_legacy_cache`, or `presents` before it. Gemma 2 and Nemotron never do in training.
_CACHES_SINCE: Mapping[str, tuple[str, ...]] = {
    "4.48": (
        *("cohere", "gemma", "glm", "granite", "llama", "mistral", "mixtral"),
        *("olmo", "olmo2", "phi", "phi3", "qwen2", "starcoder2"),
    ),
    "4.49": ("gpt_neox",),
    "4.54": (
        *("bloom", "codegen", "dbrx", "falcon", "gpt_neo", "gptj", "granitemoe"),
        *("granitemoeshared", "olmoe", "opt", "persimmon", "phimoe", "qwen2_moe", "stablelm"),
    ),
    "4.56": ("biogpt", "gpt2", "mpt"),
}
# The release since which they call `ForCausalLMLoss`, which widens logits; before, none does.
_WIDEN_SINCE: Mapping[str, tuple[str, ...]] = {
    "4.48.3": ("bloom", "falcon", "gpt2", "gpt_bigcode", "mpt", "opt", "persimmon", "stablelm"),
    "4.49": ("gpt_neox",),
}


def with_older_releases(model: ModelSpec) -> ModelSpec:
    """`model` with the releases until which its class trained otherwise."""
    if model.task != "causal-lm":
        return model
    return replace(
        model,
        returns_keys_before=_since(_CACHES_SINCE, model.model_type),
        narrow_loss_before=_since(_WIDEN_SINCE, model.model_type),
    )


def _since(releases: Mapping[str, tuple[str, ...]], model_type: str) -> str:
    return next((since for since, types in releases.items() if model_type in types), "")
