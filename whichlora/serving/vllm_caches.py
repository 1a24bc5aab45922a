"""Caches of keys and values in 8 bits under vLLM: which cards have attention that reads them."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.serving.product_dtypes import BF16_CAPABILITY
from whichlora.serving.quant_cards import check_named_cache
from whichlora.serving.rank import has_latents
from whichlora.serving.vllm_settings import FP8_CACHES, capability
from whichlora.serving.vllm_sparse import cache_dtype, reads_named_cache
from whichlora.spec.layer import Attention

SECOND_ENGINE_ALONE = "0.11"  # before, kernels of the first one widen 8 bits on every card
FP8_CAPABILITY = 8.9  # of Triton's kernels, whose type fp8e4nv older cards lack
# The oldest card of heads that FlashInfer has kernels for: its own, since it is chosen by itself.
FLASHINFER_CARDS = (("0", FP8_CAPABILITY), ("0.11.1", 7.5), ("0.24", 8.0))
FLASHINFER_HEADS = (("0", (64, 128, 256)), ("0.22", (64, 128, 256, 512)))


def check(served: Served) -> None:
    """Refuse a cache whose dtype no attention of the release reads on the GPU.

    FlashAttention reads 8 bits on compute capability 9.0 and 10, Triton's kernels from 8.9 on;
    below, FlashInfer does, without sinks and latents. FlexAttention never does. Sparse attention
    has layouts of its own (`vllm_sparse`).
    Source: vLLM 0.11.0 platforms/cuda.py:360; 0.11.1 to 0.33.0 `supports_compute_capability` and
    `get_supported_head_sizes` of v1/attention/backends/flashinfer.py, fa_utils.py
    `flash_attn_supports_kv_cache_dtype`; 0.24.0 triton_attn.py:472, 0.33.0 :514, mla/triton_mla.py:
    203. Before 0.24 Triton's compiler refuses what later releases do.

    Raises:
        ConfigError: one line.
    """
    if reads_named_cache(served):
        check_named_cache(served)
    asked = str(served.options["kv_cache_dtype"])
    asked = cache_dtype(served) if asked == "auto" else asked
    if asked == "auto" or served.model.chooses_keys:
        return
    if asked in FP8_CACHES and served.libraries.older("vllm", SECOND_ENGINE_ALONE):
        return
    needed = BF16_CAPABILITY if asked == "bfloat16" else _fp8_capability(served)
    if capability(served) >= needed:
        return
    raise ConfigError(
        f"kv_cache_dtype: {served.release} has no attention that reads {asked} on "
        f"{served.gpu.key} for {served.model.name}: it needs compute capability {needed} or newer; "
        f"give {'bfloat16' if served.options['kv_cache_dtype'] == 'auto' else 'auto'}"
    )


def _fp8_capability(served: Served) -> float:
    """The oldest card with attention of the model over 8 bits: FlashInfer's, or Triton's."""
    fits = _has_heads(served)
    return served.libraries.value_of("vllm", FLASHINFER_CARDS) if fits else FP8_CAPABILITY


def _has_heads(served: Served) -> bool:
    """Whether FlashInfer has kernels for the heads of every layer."""
    heads = served.libraries.value_of("vllm", FLASHINFER_HEADS)
    attentions = [each for layer, _ in served.model.layers() for each in layer.attentions]
    return all(_fits(each, heads) for each in attentions if each.kind == "softmax")


def reads_by_flashinfer(served: Served) -> bool:
    """Whether FlashInfer's own kernels read a cache in 8 bits: where FlashAttention's do not.

    Kind: exact. Source: vLLM 0.20.0 platforms/cuda.py:137 `_get_backend_priorities`,
    v1/attention/backends/fa_utils.py `flash_attn_supports_fp8`, utils/flashinfer.py:299
    `supports_trtllm_attention`.
    """
    asked = str(served.options["kv_cache_dtype"])
    asked = cache_dtype(served) if asked == "auto" else asked
    if asked not in FP8_CACHES or served.libraries.older("vllm", SECOND_ENGINE_ALONE):
        return False
    on_card = capability(served)
    is_others = 9.0 <= on_card < 11.0
    return not is_others and _has_heads(served) and on_card >= _fp8_capability(served)


def _fits(attention: Attention, heads: tuple[int, ...]) -> bool:
    has_sinks = attention.eager == "sinks"
    return attention.head_dim in heads and not has_sinks and not has_latents(attention)
