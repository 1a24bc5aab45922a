"""What vLLM holds beside weights and a forward, as entries of its start."""

from __future__ import annotations

from whichlora.memory.entries import Fact

COUNTS = Fact(
    part="logits_and_loss",
    what="counts of tokens for penalties",
    shape="[max_num_seqs, vocab_size]",
    dtype="int32, and a bit",
    why="one row for each sequence that may run, allocated at the start",
    source="vLLM 0.33.0 v1/worker/gpu/sample/penalties.py:41 output_bin_counts",
)
KERNELS = Fact(
    part="temporary",
    what="kernels and libraries that the first forward loads",
    shape="-",
    dtype="bytes",
    why="outside of the allocator, and counted with what the engine uses",
    source="vLLM 0.33.0 utils/mem_utils.py:331 total_consumed; published logs",
    kind="estimate",
)
HOST = Fact(
    part="temporary",
    what="memory of the host's processes",
    shape="-",
    dtype="bytes",
    why="processor and GPU share one memory, so that what the host takes meanwhile counts as used",
    source="vLLM 0.13.0 utils/mem_utils.py:86 psutil.virtual_memory().available; published logs",
    kind="estimate",
)
COMMUNICATOR = Fact(
    part="temporary",
    what="buffers of NCCL",
    shape="[channels]",
    dtype="bytes",
    why="the ranks of one model add up their parts of every layer",
    source="parallel.communicators; 0.41 GiB more on two H100 (logs of 0.11.0)",
    kind="estimate",
)
KEPT = Fact(
    part="temporary",
    what="profile pass: results of all-reduces",
    shape="[2 x num_hidden_layers + 1, max_num_batched_tokens, hidden_size]",
    dtype="compute_bytes",
    why="NCCL's stream has them until the pass ends, so that none is used again",
    source="vLLM 0.2.5; github.com/vllm-project/vllm/issues/2150",
    kind="upper bound",
)
GRAPHS = Fact(
    part="temporary",
    what="CUDA graphs",
    shape="[sizes of a batch, pieces between attentions]",
    dtype="bytes",
    why="captured once for every size, and reserved before blocks are counted",
    source="vLLM 0.33.0 v1/worker/gpu_worker.py:717 cudagraph_memory_estimate; published logs",
    kind="estimate",
)
STATE_KERNELS = Fact(
    part="temporary",
    what="what the first graph of recurrent layers loads",
    shape="-",
    dtype="bytes",
    why="outside of the allocator, it stays when graphs are dropped again: counted as in use, too",
    source="vLLM 0.20.0 v1/worker/gpu_worker.py, profile_cudagraph_memory within memory_profiling; "
    "logs of Qwen3.6-35B-A3B with 1 to 6 graphs, and of an eager one, on an RTX 5090; three of "
    "Qwen3.5 on Ada, without FlashInfer's attention, have none",
    kind="estimate",
)
EXPANDED = Fact(
    part="temporary",
    what="profile pass: a quantised matrix in 16 bit",
    shape="[out_features, in_features]",
    dtype="compute_bytes",
    count="1; of experts all of a layer",
    why="bitsandbytes multiplies more than one row by the expanded matrix",
    source="vLLM 0.27.1 model_executor/layers/quantization/bitsandbytes.py:597; bitsandbytes "
    "0.50.2 autograd/_functions.py MatMul4Bit.forward",
)
SWIZZLED_EXPONENTS = Fact(
    part="weights",
    what="exponents of experts as Triton's kernels read them",
    shape="[num_experts, in_features / 32, out_features rounded up to 256]",
    dtype="uint8",
    why="laid out anew in tiles of 256 outputs; before 0.25 those of the file are kept beside them",
    source="vLLM 0.11.0 model_executor/layers/quantization/mxfp4.py `process_weights_after_loading`"
    ", 0.25.0 fused_moe/oracle/mxfp4.py:1155; triton_kernels HopperMXScaleLayout.swizzle_data",
)
KV_POOL = Fact(
    part="kv_cache",
    what="pool of blocks",
    shape="[num_blocks, block_size, keys and values of a group of layers]",
    dtype="kv_cache_dtype",
    why="takes all that is left of the engine's share of the GPU",
    source="vLLM 0.33.0 v1/core/kv_cache_planning.py:642 get_kv_cache_config_from_groups",
)
WORKSPACE = Fact(
    part="temporary",
    what="workspace of indexers, sparse attention and experts",
    shape="the largest of what each asks for",
    dtype="bytes",
    why="one buffer for all of them, which is never freed",
    source="vLLM 0.33.0 v1/worker/workspace.py `WorkspaceManager`; "
    "layers/sparse_attn_indexer.py:484, v1/attention/backends/mla/flashmla_sparse.py:793, "
    "fused_moe/modular_kernel.py:1207",
)
DRAFT_BUFFERS = Fact(
    part="temporary",
    what="states and rows of tokens that what drafts reads",
    shape="2 x [max_num_batched_tokens, hidden_size]",
    dtype="compute_bytes",
    why="CUDA graphs of what drafts read them at fixed places",
    source="vLLM 0.33.0 v1/spec_decode/llm_base_proposer.py:211, :245",
)
