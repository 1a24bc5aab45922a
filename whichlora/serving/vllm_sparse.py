"""Sparse attention in vLLM (DeepSeek V3.2, GLM-5): layouts of the cache, and buffers it keeps."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.serving.base import Served
from whichlora.serving.indexers import attended_elements, capability
from whichlora.serving.vllm_entries import WORKSPACE
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import is_compressed, names_fp8_cache, stored_quant
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import ceil_div
from whichlora.units import MiB

SINCE = "0.33"  # the release whose code was read; earlier ones have other defaults and buffers
BLOCK_SIZE = 64  # tokens of a page that the indexer's kernels read
PACKED = "fp8_ds_mla"  # a latent in 8 bits with four scales, its rotated part in 16 bit
PACKED_BYTES = 656
# Model types whose cache is in 8 bits on compute capability 10 where no dtype is asked for.
# Source: vLLM 0.33.0 models/config.py:89 `GlmMoeDsaForCausalLM`.
NARROW_BY_DEFAULT = ("glm_moe_dsa",)
CAPABILITIES = (9, 10, 12)
# Index keys of prompts are gathered to a workspace of 8 times so many contexts, latents in 8 bits
# are widened to one of so many. Source: config/vllm.py:1871, backends/mla/indexer.py:927.
CONTEXTS, FEWER_CONTEXTS, LONG_CONTEXT = 5, 2, 256 * 1024
GATHERED_CONTEXTS = 8
RADIX_BYTES = MiB  # of the kernel that chooses; layers/indexer_topk.py:15
SCORES_BYTES = 512 * MiB  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, envs.py:62
FLASHINFER_BYTES = 394 * MiB  # envs.py:225
PADDED_HEADS = 64  # flashmla_sparse.py:754
FEW_HEADS = 16  # of a rank, for which compute capability 10 has another kernel of 16 bit

CHOSEN = Fact(
    part="activations",
    what="places of the keys that queries see",
    shape="[max_num_batched_tokens, index_topk]",
    dtype="int32",
    why="the indexer writes them, and attention of all layers reads them",
    source="vLLM 0.33.0 models/deepseek_v32/nvidia/model.py:192 topk_indices_buffer",
)
KERNEL_BUFFER = Fact(
    part="temporary",
    what="workspace of FlashInfer's sparse attention",
    shape="[VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE]",
    dtype="int8",
    why="allocated once for all layers",
    source="vLLM 0.33.0 v1/attention/backends/mla/flashinfer_mla_sparse.py:416",
)
SCORES = Fact(
    part="activations",
    what="profile pass: scores of an indexer",
    shape="[VLLM_SPARSE_INDEXER_MAX_LOGITS_MB]",
    dtype="fp32",
    why="prompts are scored in pieces of at most so many bytes",
    source="vLLM 0.33.0 model_executor/layers/sparse_attn_indexer.py:503",
)


def reads_named_cache(served: Served) -> bool:
    """Whether the release listens to what the files name as their cache.

    Source: vLLM 0.14.0 utils/torch_utils.py `get_kv_cache_quant_algo_string`, of ModelOpt's; 0.15.0
    attention/layer.py:236, of llm-compressor's.
    """
    config = served.model.config
    since = "0.15" if is_compressed(config) else "0.14"
    return served.run.quant == stored_quant(config) and not served.libraries.older("vllm", since)


def cache_dtype(served: Served) -> str:
    """How keys, values or latents are cached: "auto" is the dtype of the model, or of the files.

    Kind: exact. Source: vLLM 0.33.0 platforms/cuda.py:83 `_get_backend_priorities`,
    layers/attention/mla_attention.py:357 `_canonicalize_sparse_mla_kv_cache_dtype`;
    `NARROW_BY_DEFAULT`, `reads_named_cache`.
    """
    stated = str(served.options["kv_cache_dtype"])
    asked = "auto" if stated == "bfloat16" else stated
    if not served.model.chooses_keys:
        is_fp8 = reads_named_cache(served) and names_fp8_cache(served.model.config)
        return "fp8" if stated == "auto" and is_fp8 else asked
    major = capability(served.gpu)
    if stated == "auto" and major == 10 and served.model.model_type in NARROW_BY_DEFAULT:
        return "fp8_e4m3"
    if major == 12 or (major == 9 and asked != "auto"):
        return PACKED
    return asked


def latent_share(served: Served) -> float:
    """Bytes of a cached latent over its elements in one byte: `PACKED` has scales beside them.

    Kind: exact.
    """
    if cache_dtype(served) != PACKED:
        return 1.0
    attention = next(each for layer, _ in served.model.layers() for each in layer.attentions)
    return PACKED_BYTES / attended_elements(attention)


def check(served: Served) -> None:
    """Refuse releases, GPUs and layouts of the cache that are not served, or not predicted.

    Raises:
        ConfigError: one line.
    """
    asked = str(served.options["kv_cache_dtype"])
    if not served.model.chooses_keys:
        if asked == PACKED:
            raise ConfigError(
                f"kv_cache_dtype: {PACKED} is a layout of sparse attention, which "
                f"{served.model.name} has not; use fp8 or auto"
            )
        return
    name = served.model.name
    if served.libraries.older("vllm", SINCE):
        raise ConfigError(
            f"serving: {served.release} is not predicted for the sparse attention of "
            f"{name}; leave libraries out, or give vllm={SINCE} or a later release"
        )
    if capability(served.gpu) not in CAPABILITIES:
        raise ConfigError(
            f"serving: vllm has no sparse attention for compute capability "
            f"{served.gpu.compute_capability}, which {name} needs; use a GPU of 9.0, 10.0 or 12.0"
        )
    if asked == "fp8_e5m2":
        raise ConfigError(
            f"kv_cache_dtype: sparse attention of {name} reads no {asked}; use fp8 or auto"
        )
    block_size = served.count("block_size") or BLOCK_SIZE
    if served.is_asked("block_size") and block_size % BLOCK_SIZE:
        raise ConfigError(
            f"block_size: {block_size} is no multiple of {BLOCK_SIZE}, which the indexer of {name} "
            "reads; leave it out"
        )


def buffer_entries(
    served: Served, rank: ModelSpec, *, tokens: int, experts_bytes: int
) -> list[Entry]:
    """What a rank keeps for sparse attention: places, and workspaces; none without it.

    Args:
        tokens: of one step at most.
        experts_bytes: that a layer of experts takes of the common workspace.

    Kind: exact. Source: `CHOSEN`, `WORKSPACE`, `KERNEL_BUFFER`.
    """
    sparse = [
        attention
        for layer, _ in rank.layers()
        for attention in layer.attentions
        if attention.sparse is not None
    ]
    if not sparse:
        return []
    first, dtype = sparse[0], cache_dtype(served)
    assert first.sparse is not None
    entries = [Entry(CHOSEN, tokens * first.sparse.top_k * 4)]
    contexts = CONTEXTS if served.context <= LONG_CONTEXT else FEWER_CONTEXTS
    gathered = GATHERED_CONTEXTS * contexts * served.context
    indexer = _aligned(gathered * first.sparse.head_dim) + _aligned(4 * gathered) + RADIX_BYTES
    backend, buffer = _backend_bytes(served, first, dtype, tokens, contexts * served.context)
    entries.append(Entry(WORKSPACE, max(indexer, backend, experts_bytes)))
    return [*entries, Entry(KERNEL_BUFFER, buffer)] if buffer else entries


def _backend_bytes(
    served: Served, attention: Attention, dtype: str, tokens: int, widened: int
) -> tuple[int, int]:
    """What the attention kernels take of the common workspace, and of their own.

    FlashAttention on compute capability 9 and FlashInfer on 10 and 12 take nothing in common.
    """
    major, heads = capability(served.gpu), attention.num_attention_heads
    if major == 12 or (major == 10 and dtype != "auto" and dtype != PACKED):
        return 0, FLASHINFER_BYTES
    if dtype == "auto" and (major == 9 or heads <= FEW_HEADS):
        return 0, 0
    element_bytes, latent = 2, attended_elements(attention)
    padded = ceil_div(heads, PADDED_HEADS) * PADDED_HEADS
    if dtype == "auto":
        return _aligned(tokens * padded * latent * element_bytes), 0
    returned = latent - (attention.rotary_dim or 0)
    shapes = (heads * latent, padded * latent, padded * returned, heads * returned)
    rows = sum(_aligned(tokens * width * element_bytes) for width in shapes)
    return rows + _aligned(widened * latent * element_bytes), 0


def _aligned(num_bytes: int) -> int:
    """Source: vLLM 0.33.0 v1/worker/workspace.py `get_simultaneous`."""
    return num_bytes + -num_bytes % 256
