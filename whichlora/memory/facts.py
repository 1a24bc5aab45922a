"""What every entry of the ledger is: shape, dtype, why it is alive, kind and source.

Shapes are in the names of `specs` and `architecture`; `trained_params` is what gets a gradient.
Versions are those of `docs/memory.md`. Bytes are computed in `memory.ledger` and
`memory.generation`.
"""

from __future__ import annotations

from whichlora.memory.entries import Fact

# --- what is there before a step --------------------------------------------------------------

LAYER_WEIGHTS = Fact(
    part="weights",
    what="weights of the layers",
    shape="[out_features, in_features] of every matrix",
    dtype="quant",
    count="num_hidden_layers",
    why="loaded; frozen or trained, they stay to the end",
    source="config.json; memory.weights.linear_bytes",
)
EMBEDDING_WEIGHTS = Fact(
    part="weights",
    what="embeddings and head",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    count="1 or 2",
    why="loaded; never quantised, and one tensor where they are tied",
    source="config.json; transformers get_keys_to_not_convert",
)
OTHER_WEIGHTS = Fact(
    part="weights",
    what="other weights",
    shape="norms after the layers, poolers, towers",
    dtype="base_bytes",
    why="loaded, outside of the layers",
    source="config.json",
)
BUFFERS = Fact(
    part="weights",
    what="buffers",
    shape="[max_position_embeddings, head_dim]",
    dtype="compute_bytes",
    why="registered by modules: causal masks, rotary tables of older versions",
    source="transformers modeling_*.register_buffer",
)
WEIGHTS = {
    "layers": LAYER_WEIGHTS,
    "embeddings": EMBEDDING_WEIGHTS,
    "other": OTHER_WEIGHTS,
    "buffers": BUFFERS,
}
ADAPTERS = Fact(
    part="adapters",
    what="adapter weights",
    shape="[trained_params]",
    dtype="adapter_bytes",
    why="trained beside the frozen weights",
    source="peft LoraLayer.update_layer",
)
FROZEN_ADAPTERS = Fact(
    part="adapters",
    what="frozen matrices of the adapters",
    shape="",
    dtype="adapter_bytes",
    why="read by the adapters, and not trained",
    source="the method's own file",
)
SAVED_MODULES = Fact(
    part="adapters",
    what="trained copies of modules",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    count="len(modules_to_save)",
    why="modules_to_save: trained as a whole, beside the frozen original",
    source="peft ModulesToSaveWrapper",
)
OPTIMIZER_STATES = Fact(
    part="optimizer_states",
    what="optimizer states",
    shape="[trained_params]",
    dtype="of the optimizer",
    count="states per parameter",
    why="made by the first step, kept between steps",
    source="torch.optim, bitsandbytes.optim: init_state",
)
INPUTS = Fact(
    part="activations",
    what="token ids, labels, mask, rotary tables",
    shape="[batch_size, seq_len]",
    dtype="int64",
    count="3",
    why="the batch, and cosines and sines that all layers share",
    source="transformers Trainer._prepare_inputs; RotaryEmbedding.forward",
)

# --- training: gradients ----------------------------------------------------------------------

ACCUMULATED = Fact(
    part="gradients",
    what="accumulated gradients",
    shape="[trained_params]",
    dtype="of the parameter",
    why="earlier micro-steps of this optimizer step left them",
    source="torch AccumulateGrad",
)
LAST_LAYERS_GRADIENTS = Fact(
    part="gradients",
    what="gradient of the head",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="backward starts at the head",
    source="torch AccumulateGrad",
)
LATER_LAYERS_GRADIENTS = Fact(
    part="gradients",
    what="gradients of all layers but the first",
    shape="[params of the head and of all layers but one]",
    dtype="of the parameter",
    why="the first layer goes backward last",
    source="torch AccumulateGrad",
)
ALL_GRADIENTS = Fact(
    part="gradients",
    what="all gradients",
    shape="[trained_params]",
    dtype="of the parameter",
    why="backward is done, the optimizer reads them",
    source="torch AccumulateGrad",
)
TIED_GRADIENTS = Fact(
    part="gradients",
    what="parts of the tied embedding's gradient, and their sum",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    count="2, and 1 where an encoder's is added in place",
    why="autograd holds the head's until the embedding's is there; their sum is a third",
    source="torch InputBuffer::accumulate; peaks of T5 and BART on a CPU",
)

# --- training: activations --------------------------------------------------------------------

CHECKPOINTS = Fact(
    part="activations",
    what="checkpoints",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    count="num_hidden_layers",
    why="each layer's input, from which backward recomputes it",
    source="torch.utils.checkpoint; saved-tensor hooks",
)
AROUND_LAYERS = Fact(
    part="activations",
    what="kept before the first layer",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="the embedding's norm, dropout and rows go backward last",
    source="saved-tensor hooks on transformers and peft",
)
HELD_INPUTS = Fact(
    part="activations",
    what="inputs that quantised matrices hold",
    shape="[batch_size, seq_len, in_features]",
    dtype="stream_bytes",
    why="attributes of the graph's nodes: they go with the whole graph, not layer by layer",
    source="bitsandbytes 0.50.2 MatMul8bitLt.forward",
)
SAVED = Fact(
    part="activations",
    what="saved by all layers",
    shape="listed below",
    dtype="listed below",
    count="num_hidden_layers",
    why="no checkpointing: backward reads what forward kept",
    source="saved-tensor hooks on transformers and peft",
)
LAYER_FORWARD = Fact(
    part="temporary",
    what="one layer's forward",
    shape="[batch_size, seq_len, …]",
    dtype="compute_bytes",
    why="what the layer that runs makes beyond what all layers keep",
    source="memory.layer_code: transformers, peft, bitsandbytes on a tape",
)
LAYER_BACKWARD = Fact(
    part="temporary",
    what="one layer's backward",
    shape="[batch_size, seq_len, …]",
    dtype="compute_bytes",
    why="saved tensors of a recomputed layer, and gradients at the worst point of its backward",
    source="memory.layer_code: transformers, peft, bitsandbytes on a tape",
)
LAYER_INPUTS_BACKWARD = Fact(
    part="temporary",
    what="backward of the inputs of all layers",
    shape="[batch_size, seq_len, num_hidden_layers, width]",
    dtype="stream_bytes",
    why="one tensor for all layers: its gradient, the fp32 norm of it, the embeddings' gradient",
    source="memory.gemma4_code: Gemma4TextModel.project_per_layer_inputs on a tape",
)
AUTOCAST_COPIES = Fact(
    part="temporary",
    what="16-bit copies of trained weights",
    shape="[trained_params]",
    dtype="compute_bytes",
    why="autocast casts fp32 weights; its cache and the graph hold them",
    source="torch autocast_mode.cpp cached_cast",
)
HEAD_COPY = Fact(
    part="temporary",
    what="16-bit copy of the head",
    shape="[vocab_size, hidden_size]",
    dtype="compute_bytes",
    why="autocast casts the fp32 head of a prepared base; backward needs the copy",
    source="torch autocast_mode.cpp cached_cast",
)
OPTIMIZER_TEMPORARIES = Fact(
    part="temporary",
    what="temporaries of the optimizer",
    shape="[trained_params]",
    dtype="of the parameter",
    why="foreach AdamW makes a list of tensors, Adafactor an fp32 update of one at a time",
    source="torch.optim.adamw._multi_tensor_adamw; transformers Adafactor.step",
)

# --- training: the loss -----------------------------------------------------------------------

LOSS_FORWARD = Fact(
    part="logits_and_loss",
    what="logits, their fp32 copy, log-softmax",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="fp32",
    why="the end of the loss's forward",
    source="transformers ForCausalLMLoss; torch cross_entropy",
)
REMAINDERS = Fact(
    part="activations",
    what="allocator: remainders of blocks that are not split",
    shape="[1 MiB of 20 MiB; of 10 MiB and more what 2 MiB round up]",
    dtype="bytes",
    count="kept and trained tensors of more than 1 MiB that do not divide a segment",
    why="what a hole has more than was asked, up to 1 MiB, stays with the block",
    source="torch 2.13 CUDACachingAllocator should_split, kSmallSize, kLargeBuffer, kRoundLarge",
    kind="estimate",
)
DECODER_CACHE = Fact(
    part="kv_cache",
    what="keys and values that T5's decoder caches while it trains",
    shape="[2, num_decoder_layers, batch_size, num_heads, seq_len, head_dim]",
    dtype="fp32",
    why="its own copy of the config still says use_cache; attention reads 16-bit copies of them",
    source="transformers 5.23 T5Stack.forward; Trainer sets the model's config only",
)
LOGITS_GRADIENT = Fact(
    part="logits_and_loss",
    what="gradients of the logits and of what the head read",
    shape="[batch_size, seq_len, vocab_size + hidden_size]",
    dtype="compute_bytes",
    why="the head goes backward",
    source="torch addmm backward",
)
HEAD_GRADIENT = Fact(
    part="gradients",
    what="gradient of the head",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="the first gradient that is there",
    source="torch AccumulateGrad",
)
KEPT_LOGITS = Fact(
    part="logits_and_loss",
    what="logits that the caller keeps",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes, or fp32 under autocast",
    why="loss head raw: the loop holds the model's output while it goes backward",
    source="accelerate ConvertOutputsToFp32",
)
LOSS_BACKWARD = Fact(
    part="logits_and_loss",
    what="log-softmax and its gradients",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="fp32",
    count="3",
    why="backward of the cross entropy: what it reads, its gradient, the logits' gradient",
    source="transformers ForCausalLMLoss; torch log_softmax_backward",
)

# --- inference --------------------------------------------------------------------------------

PROMPT_CACHE = Fact(
    part="kv_cache",
    what="key-value cache of the prompt",
    shape="[batch_size, num_key_value_heads, prompt_len, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers DynamicLayer.update; docs/kv_cache.md",
)
FULL_CACHE = Fact(
    part="kv_cache",
    what="key-value cache of whole sequences",
    shape="[batch_size, num_key_value_heads, prompt_len + max_new_tokens - 1, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers DynamicLayer.update; docs/kv_cache.md",
)
QUANTISED_CACHE = Fact(
    part="kv_cache",
    what="key-value cache, quantised",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="cache_nbits, with a scale and a zero per cache_group_size elements",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers QuantizedLayer.update; optimum-quanto, hqq; docs/kv_cache.md",
)
FRESH_CACHE = Fact(
    part="kv_cache",
    what="keys and values of the newest tokens",
    shape="[batch_size, num_key_value_heads, up to cache_residual_length, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="they gather in full width until cache_residual_length of them are quantised",
    source="transformers QuantizedLayer.update",
)
EXPANDED = Fact(
    part="temporary",
    what="one layer's keys and values, expanded and joined with the new ones",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="compute_bytes",
    count="4",
    why="the expanded ones keep their names while those that attention reads are put together",
    source="transformers QuantizedLayer.update, Fp8QuantizedLayer.update",
)
QUANTISING = Fact(
    part="temporary",
    what="steps of quantising one layer's values",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="compute_bytes; for hqq fp32 and fp16",
    count="3, or 11 for hqq",
    why="cache_residual_length tokens are new: the whole cache is quantised again",
    source="optimum-quanto quantize_affine, pack_weights; hqq Quantizer.quantize",
)
TWO_CACHES = Fact(
    part="kv_cache",
    what="cache of the prompt, and a second one with one token more",
    shape="[batch_size, num_key_value_heads, prompt_len, head_dim]",
    dtype="compute_bytes",
    count="4 x num_hidden_layers",
    why="tuples of older versions are replaced only when all are there",
    source="transformers 4.38 LlamaForCausalLM.forward",
)
APPENDED = Fact(
    part="temporary",
    what="second copy of what is appended to",
    shape="[batch_size, num_key_value_heads, prompt_len + max_new_tokens - 1, head_dim]",
    dtype="compute_bytes",
    why="concatenation makes a new tensor before the old one goes",
    source="transformers DynamicLayer.update",
)
PROMPT_FORWARD = Fact(
    part="activations",
    what="one layer's forward over the prompt",
    shape="[batch_size, prompt_len, …]",
    dtype="compute_bytes",
    why="four hidden states and the wider of MLP and attention; no layer keeps anything",
    source="trace of GenerationMixin.generate, docs/memory.md section 5",
    kind="estimate",
)
ENCODED = Fact(
    part="activations",
    what="the encoder's output",
    shape="[batch_size, prompt_len, hidden_size]",
    dtype="stream_bytes",
    why="the caller holds it for every token that the decoder makes",
    source="transformers GenerationMixin._prepare_encoder_decoder_kwargs_for_generation",
)
CROSS_PROJECTED = Fact(
    part="activations",
    what="keys and values of one cross attention",
    shape="[batch_size, prompt_len, k_width + v_width]",
    dtype="compute_bytes",
    why="the cache copies what the projections return, and the last layer's are still there",
    source="transformers DynamicLayer.update; trace of GenerationMixin.generate",
)
TOKEN_FORWARD = Fact(
    part="activations",
    what="one layer's forward over one token",
    shape="[batch_size, 1, …]",
    dtype="compute_bytes",
    why="four hidden states and the wider of MLP and attention; no layer keeps anything",
    source="trace of GenerationMixin.generate, docs/memory.md section 5",
    kind="estimate",
)
LAST_HIDDEN = Fact(
    part="activations",
    what="last hidden states",
    shape="[batch_size, prompt_len, hidden_size]",
    dtype="stream_bytes",
    why="the head reads them",
    source="trace of GenerationMixin.generate",
)
PROMPT_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the prompt",
    shape="[batch_size, 1, vocab_size]",
    dtype="fp32",
    why="scores of the last position; of the whole prompt before transformers 4.45",
    source="transformers GenerationMixin._sample",
)
LAST_SCORES = Fact(
    part="logits_and_loss",
    what="scores of the last token",
    shape="[batch_size, vocab_size]",
    dtype="fp32",
    why="a name of the loop holds them until the next ones are there",
    source="transformers GenerationMixin._sample",
)
HELD_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the prompt, in fp32",
    shape="[batch_size, prompt_len, vocab_size]",
    dtype="fp32",
    why="the caller holds the first output until the second is there",
    source="transformers 4.38 GenerationMixin.greedy_search",
)
LAST_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the last positions",
    shape="[batch_size, vocab_size]",
    dtype="fp32",
    why="logits, their fp32 copy and the processed scores, while a token is picked",
    source="transformers GenerationMixin._sample",
)
EVERY_LOGIT = Fact(
    part="logits_and_loss",
    what="logits of every position",
    shape="[batch_size, prompt_len, vocab_size]",
    dtype="compute_bytes",
    why="an encoder's own head returns them",
    source="transformers BertForMaskedLM.forward",
)

# --- from live tensors to the card ------------------------------------------------------------

WORKSPACE = Fact(
    part="temporary",
    what="cuBLAS workspaces",
    shape="one per thread that runs products",
    dtype="bytes",
    why="the library asks the framework's allocator once and keeps them",
    source="torch CUDABlas.cpp getChosenWorkspaceSize",
)
IDLE = Fact(
    part="allocator",
    what="idle segments",
    shape="segments that the peak cannot use",
    dtype="bytes",
    why="the caching allocator keeps what earlier moments left, and gives it back before it fails",
    source="torch CUDACachingAllocator.cpp; docs/memory.md section 6",
    kind="upper bound",
)
POOL = Fact(
    part="allocator",
    what="rest of the preallocated block pool",
    shape="share of the card",
    dtype="bytes",
    why="the engine takes its pool at start, whatever the requests are",
    source="vLLM gpu_memory_utilization; transformers ContinuousBatchingConfig",
)
CONTEXT = Fact(
    part="context",
    what="device context",
    shape="driver and kernels",
    dtype="bytes",
    why="every process that uses the device has one, outside of the allocator",
    source="calibration/<gpu>/gpu.json, or the typical 500 MiB",
    kind="estimate",
)
