"""Sparse attention in SGLang (DeepSeek V3.2, GLM-5): how a latent is cached."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.serving.indexers import (
    INDEXER_KERNELS,
    attended_elements,
    capability,
    with_attended_elements,
)
from whichlora.spec.architecture import ModelSpec

PAGE_SIZE = 64  # whatever is asked for; srt/arg_groups/model_overrides/deepseek_v2.py:147
# Kernels of an indexer beside its products, before `FUSED_SINCE`: a norm, the rotation and its two
# copies, two Hadamard products, two that narrow, one that scales heads, one that stores, scores,
# and the choice; and one for keys and heads, which were two products. Kind: exact. Source: SGLang
# srt/layers/attention/nsa/nsa_indexer.py at commit 005e8bf8 `_get_q_k_bf16`, `_get_topk_paged`.
FIRST_KERNELS, FUSED_SINCE = 13, "0.5.11"
SCALED_ELEMENTS = 128  # of a latent, that share one scale in fp32
# Model types whose kernel on compute capability 12 reads scales beside a latent in 8 bits.
# Source: SGLang 0.5.23 srt/arg_groups/overrides.py:631 is_glm_sm12_fp8.
SCALED_ON_12 = ("glm_moe_dsa",)


def is_narrow(served: Served) -> bool:
    """Whether sparse attention caches latents in 8 bits: by default from compute capability 10 on.

    Kind: exact. Source: SGLang 0.5.23 srt/arg_groups/overrides.py:541.
    """
    asked = served.options["kv_cache_dtype"]
    return capability(served.gpu) >= 10 if asked == "auto" else asked == "fp8_e4m3"


def as_cached(served: Served, rank: ModelSpec) -> ModelSpec:
    """`rank` with what is cached of latents in 8 bits: with scales, and a rotated part of 16 bit.

    Kernels of TensorRT-LLM, those of compute capability 10, read plain 8 bits.
    Kind: exact. Source: SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py:3412
    `calculate_mla_kv_cache_dim`; srt/arg_groups/overrides.py:709.
    """
    if not rank.chooses_keys or not is_narrow(served):
        return rank
    return with_attended_elements(rank, _narrow_bytes(served))


def _narrow_bytes(served: Served) -> int:
    """Of a latent in 8 bits."""
    model, major = served.model, capability(served.gpu)
    attention = next(each for layer, _ in model.layers() for each in layer.attentions)
    elements, rotated = attended_elements(attention), attention.rotary_dim or 0
    is_scaled = major < 10 or (major == 12 and model.model_type in SCALED_ON_12)
    if not is_scaled:
        return elements
    latent = elements - rotated
    return latent + 4 * (latent // SCALED_ELEMENTS) + 2 * rotated


def indexer_kernels(served: Served) -> int:
    """Of one indexer, beside its products. Kind: estimate of the release. Source: above."""
    return FIRST_KERNELS if served.libraries.older("sglang", FUSED_SINCE) else INDEXER_KERNELS


def latent_share(served: Served) -> float:
    """Bytes of a cached latent over its elements of the cache's width. Kind: exact."""
    model = served.model
    if not model.chooses_keys or not is_narrow(served):
        return 1.0
    attention = next(each for layer, _ in model.layers() for each in layer.attentions)
    return _narrow_bytes(served) / attended_elements(attention)


def check(served: Served) -> None:
    """Refuse what has no kernel.

    Raises:
        ConfigError: one line.
    """
    if not served.model.chooses_keys:
        return
    name = served.model.name
    if capability(served.gpu) < 9:
        raise ConfigError(
            f"serving: sglang's sparse attention, which {name} needs, is not predicted for compute "
            f"capability {served.gpu.compute_capability}; use a GPU of 9.0 or later"
        )
    if served.options["kv_cache_dtype"] == "fp8_e5m2":
        raise ConfigError(
            f"kv_cache_dtype: sparse attention of {name} reads no fp8_e5m2; use fp8_e4m3 or auto"
        )
