"""Multi-head latent attention in vLLM: what is cached of a latent, and held beside its weights."""

from __future__ import annotations

from dataclasses import replace

from whichlora.memory.entries import Fact
from whichlora.serving.base import Served
from whichlora.serving.indexers import attended_elements, with_attended_elements
from whichlora.serving.rank import between_latents, has_latents
from whichlora.serving.vllm_sparse import PACKED, PACKED_BYTES, cache_dtype
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Attention

# Model types whose latents it caches. Source: vLLM 0.33.0 transformers_utils/
# model_arch_config_convertor.py:294 is_deepseek_mla.
CACHES_LATENTS = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
)
EXPANDED_HEAD = 256  # width of a key that is made from a latent, before 0.7.1

ABSORBED = Fact(
    part="weights",
    what="matrices between heads and latents",
    shape="[heads, kv_lora_rank, qk_nope_head_dim + v_head_dim]",
    dtype="compute_bytes",
    count="1 for each layer; before 0.8 products with the matrices before and after them",
    why="batched products of heads have no quantised kernel",
    source="vLLM 0.33.0 layers/attention/mla_attention.py:1270 split_kv_b_proj; "
    "github.com/vllm-project/vllm/pull/14770",
)


def _is_listed(served: Served) -> bool:
    """By the type of its text: `hf_text_config`."""
    config = served.model.config
    text = config.get("text_config", config)
    return text.get("model_type", served.model.model_type) in CACHES_LATENTS


def _caches(served: Served) -> bool:
    """Whether latents are cached, and not keys and values of every head."""
    return _is_listed(served) and not served.libraries.older("vllm", "0.7.1")


def as_cached(served: Served, rank: ModelSpec) -> ModelSpec:
    """`rank` with what its class caches of latents: some keep keys and values of every head.

    Before 0.7.1 all did, padded to 256 for FlashAttention. Kind: exact. Source: `CACHES_LATENTS`;
    vLLM 0.6.3 models/deepseek_v2.py:266, :304-312; 0.33.0 models/minicpm3.py:126, :172.
    """
    if cache_dtype(served) == PACKED:
        return with_attended_elements(rank, PACKED_BYTES)
    if _caches(served):
        return rank
    is_padded = _is_listed(served)

    def expanded(attention: Attention) -> Attention:
        if not has_latents(attention):
            return attention
        width = EXPANDED_HEAD if is_padded else attention.head_dim
        return replace(attention, cache_elements=2 * attention.num_attention_heads * width)

    return rank.with_attentions(expanded)


def absorbed_bytes(served: Served, rank: ModelSpec) -> int:
    """Of `ABSORBED`: unquantised weights are views since 0.8, and take nothing.

    Kind: exact, but for scales. Source: `ABSORBED`; a log of 84.11 GiB of DeepSeek-V3 on each of
    eight GPUs, github.com/vllm-project/vllm/pull/12639 (0.7.2).
    """
    if not _caches(served):
        return 0
    materialised = served.libraries.older("vllm", "0.8")
    quant, wide = served.dtypes.quant, served.dtypes.compute_bytes
    if not materialised and not _expands(served, rank):
        return 0
    if not materialised:
        return wide * between_latents(rank)
    narrow = quant == "fp8"  # which stay beside what they were made of, in fp32
    made = sum(
        count * _materialised_bytes(attention, rank.hidden_size, 1 if narrow else wide, wide)
        for layer, count in rank.layers()
        for attention in layer.attentions
        if has_latents(attention)
    )
    return made + narrow * 4 * between_latents(rank)


def _expands(served: Served, rank: ModelSpec) -> bool:
    """Whether matrices that expand latents are quantised."""
    return any(
        linear.reads == "kv_latent" and is_quantised(linear, served.dtypes)
        for layer, _ in rank.layers()
        for attention in layer.attentions
        for linear in attention.linears
    )


def _materialised_bytes(attention: Attention, hidden_size: int, width: int, wide: int) -> int:
    """W_Q_UK, W_QR and W_UV_O: the latent of all heads, from queries and to the end.

    W_QR is never narrowed.
    """
    heads, rank = attention.num_attention_heads, attended_elements(attention) - attention.rotary_dim
    (queries,) = {
        each.in_features for each in attention.linears if each.name in ("q_proj", "q_b_proj")
    }
    rotated = queries * (attention.rotary_dim or 0)
    return heads * (width * rank * (queries + hidden_size) + wide * rotated)
