"""Attention whose queries see few keys: what an indexer caches of a token beside its latent."""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import ceil_div

SCALED_ELEMENTS = 128  # of an index key, that share one scale in fp32
# Kernels of one indexer beside its products: its queries are narrowed, its key is stored, keys are
# scored, the best are chosen, and their places in the cache are looked up. Kind: estimate.
# Source: vLLM 0.33.0 layers/sparse_attn_indexer.py, models/deepseek_v32/common/kernels.py; SGLang
# 0.5.23 `_fused_q_prepare_and_store`.
INDEXER_KERNELS = 5
SCORE_BYTES = 2 * 4  # of each query and key: an fp32 score is written, and read once to choose


def capability(gpu: GpuSpec) -> int:
    """The leading number of a compute capability, for which engines choose their kernels."""
    return int(float(gpu.compute_capability or 9.0))


def index_key_bytes(attention: Attention) -> int:
    """Bytes of a token's index key in one layer: 8-bit floats and their scale, in every engine.

    Kind: exact. Source: vLLM 0.33.0 models/deepseek_v2.py:731 `Indexer.k_cache`; SGLang 0.5.23
    srt/mem_cache/memory_pool.py:5279 `DSATokenToKVPool`, model_executor/pool_configurator.py:560.
    """
    sparse = attention.sparse
    if sparse is None or not sparse.num_heads:
        return 0
    scales: int = ceil_div(sparse.head_dim, SCALED_ELEMENTS)
    return sparse.head_dim + 4 * scales


def attended_elements(attention: Attention) -> int:
    """Elements of a token's cache in one layer that attention reads, its index key left out.

    Kind: exact. Source: as of `index_key_bytes`.
    """
    sparse = attention.sparse
    return attention.cache_elements - (sparse.head_dim if sparse and sparse.num_heads else 0)


def with_attended_elements(rank: ModelSpec, elements: int) -> ModelSpec:
    """`rank` whose sparse attentions cache so many elements of a token, beside its index key."""

    def changed(attention: Attention) -> Attention:
        if attention.sparse is None:
            return attention
        more = elements - attended_elements(attention)
        return replace(attention, cache_elements=attention.cache_elements + more)

    return rank.with_attentions(changed)


def with_wide_indexers(model: ModelSpec) -> ModelSpec:
    """`model` whose indexers' keys and weights of heads are joined in 16 bit, as engines load them.

    Kind: exact. Source: vLLM 0.33.0 models/deepseek_v2.py:711 wk_weights_proj; SGLang 0.5.23
    srt/layers/attention/dsa/dsa_indexer.py:353.
    """
    if not model.chooses_keys:
        return model

    def widened(attention: Attention) -> Attention:
        linears = tuple(
            replace(linear, quantisable=False)
            if not linear.active and linear.reads == "attn_in"
            else linear
            for linear in attention.linears
        )
        return replace(attention, linears=linears)

    return model.with_attentions(widened)
