"""What llama.cpp holds on a device, as it prints it."""

from __future__ import annotations

from whichlora.memory.entries import Fact

LAYERS = Fact(
    part="weights",
    what="tensors of the layers in the device's memory",
    shape="[out_features, in_features] of every matrix, norms",
    dtype="file_type; norms and biases in fp32",
    why="loaded from the file; the last n_gpu_layers lie on the GPU",
    source="llama.cpp 0c1e570 src/llama-quant.cpp:717 llama_tensor_get_type",
)
OUTPUT = Fact(
    part="weights",
    what="output matrix, and token embeddings of a CPU",
    shape="[vocab_size, hidden_size]",
    dtype="file_type",
    why="token embeddings stay on the host: a head tied to them is a second copy on the GPU",
    source="llama.cpp 0c1e570 src/llama-model.cpp load_tensors, TENSOR_DUPLICATED",
)
KV_CACHE = Fact(
    part="kv_cache",
    what="cache of all slots",
    shape="[layers, slots, context, keys and values]",
    dtype="cache_type_k, cache_type_v",
    why="allocated at the start for the whole context, with the layers it belongs to",
    source="llama.cpp 0c1e570 src/llama-kv-cache.cpp:66",
)
COMPUTE = Fact(
    part="activations",
    what="buffer for computing one micro-batch",
    shape="[ubatch_size, widths of a layer]",
    dtype="fp32",
    why="reserved once for the largest graph, by ggml's allocator",
    source="llama.cpp 0c1e570 src/llama-context.cpp:615 sched_reserve; serving.ggml_graph",
)
