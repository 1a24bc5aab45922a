"""What classes of transformers did otherwise in older releases, by type of model.

Read: the modeling files of 4.38 to 4.57.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer
from whichlora.spec.run import RunConfig

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
# The release since which `generate` gives them a cache; before, tuples, which go only as a whole.
# All others take one since 4.42 at the latest. Read: `past_key_values.update` in their files.
_TAKE_CACHES_SINCE: Mapping[str, tuple[str, ...]] = {
    "4.44": ("bloom",),
    "4.45": ("codegen", "falcon", "gpt_neo", "gpt_neox", "gptj"),
    "4.49": ("opt",),
    "4.52": ("biogpt", "gpt2"),
    "4.54": ("gpt_bigcode", "mpt", "xglm"),
}
# They cache views of the one product that makes queries, keys and values.
_CACHE_VIEWS = ("bloom", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "persimmon", "phi3")
_NARROW_KEYS_SINCE: Mapping[str, tuple[str, ...]] = {"4.45": ("gpt_neox",)}
# The release since which they score the last token of a prompt alone. Read: `logits_to_keep`.
_SCORE_LAST_SINCE: Mapping[str, tuple[str, ...]] = {
    "4.47": ("falcon",),
    "4.49": ("gpt_neox",),
    "4.53": ("gpt2",),
    "4.57": ("biogpt",),
    "5": ("bloom", "codegen", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt", "xglm"),
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
        tuples_until=_since(_TAKE_CACHES_SINCE, model.model_type),
        caches_views=model.model_type in _CACHE_VIEWS,
        wide_keys_before=_since(_NARROW_KEYS_SINCE, model.model_type),
        scores_prompt_before=_since(_SCORE_LAST_SINCE, model.model_type),
        narrow_loss_before=_since(_WIDEN_SINCE, model.model_type),
    )


def as_of_release(model: ModelSpec, run: RunConfig) -> ModelSpec:
    """`model` with attentions as its class had them in a release of transformers.

    Source: transformers 4.48 and 4.49 `OPTAttention.forward`, `OPTSdpaAttention.forward`.
    `OptFlashAttention2.forward` of 4.48 has other copies, of which autograd saves as much.
    """
    is_old = model.model_type == "opt" and run.versions.older("transformers", "4.49")
    if not is_old or run.attn == "flash_attention_2":
        return model
    fp16 = run.precision.startswith("fp16")
    return model.with_layers(partial(_as_opt_before_caches, fp16=fp16))


def _as_opt_before_caches(layer: Layer, *, fp16: bool) -> Layer:
    """`_shape` copies queries, keys and values head by head; eager scores have a lower bound."""
    attentions = (
        replace(attention, projection="contiguous", eager="bounded", wide_softmax=fp16)
        for attention in layer.attentions
    )
    return replace(layer, attentions=tuple(attentions))


def _since(releases: Mapping[str, tuple[str, ...]], model_type: str) -> str:
    return next((since for since, types in releases.items() if model_type in types), "")
