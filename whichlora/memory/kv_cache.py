"""Bytes of the key-value cache, as each engine really keeps it.

The report's "PagedAttention chunk correction" is two terms: the tokens that an engine rounds up
to (here), and the logits of the kept positions (`memory.loss`). See `docs/kv_cache.md`.
"""

from __future__ import annotations

from whichlora.memory.allocator_simulator import MIN_OWN_SEGMENT_BYTES as OWN_SEGMENT
from whichlora.memory.allocator_simulator import SEGMENT_ROUNDING_BYTES as SEGMENT_ROUNDING
from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Attention, Layer, Linear
from whichlora.spec.numeric import Count, ceil_div, floor_div, largest, round_up, smallest
from whichlora.spec.run import BNB_QUANTS, CacheFormat
from whichlora.symbolic.kernels import FUSED, attention_kernel, repeats_keys

BLOCK_TOKENS = {"dynamic": 1, "static": 1, "quantized": 1, "paged": 256, "vllm": 16}
"""Tokens per block: transformers 5.23 continuous batching 256, vLLM 16."""


def kept_tokens(layer: Layer, tokens: Count, *, kv_cache: str) -> Count:
    """Tokens of one sequence that the cache of `layer` holds, whole blocks included.

    Kind: exact. Of a sliding layer both caches of transformers keep the window.
    Source: transformers 5.23 `DynamicSlidingWindowLayer.update`.
    """
    # the dynamic one keeps `full_key_states[:, :, -self.sliding_window + 1 :, :]`, a view whose
    # storage has the oldest token of the window, too
    window = layer.attentions[0].sliding_window if layer.attentions else None
    if window is not None and kv_cache in ("dynamic", "static"):
        tokens = smallest(tokens, window)
    return round_up(tokens, BLOCK_TOKENS[kv_cache])


def cache_bytes(
    model: ModelSpec,
    *,
    batch_size: Count,
    tokens: Count,
    kv_cache: str,
    element_bytes: int,
    encoder_tokens: Count = 0,
    stored: CacheFormat | None = None,
    after_prompt: bool = False,
) -> Count:
    """Bytes of the cache for `tokens` per sequence, and `encoder_tokens` per cross attention.

    Args:
        stored: the format of a quantised cache, which all `tokens` have.
        after_prompt: no token was decoded yet, so that a dynamic cache is the end of the prompt's
            keys and values, whose tensors it keeps as a whole.

    Kind: exact.
    Source: transformers 5.23 `DynamicLayer.update`, `StaticLayer.lazy_initialization`.
    """
    total = quantised = 0 * batch_size
    recurrent = 0
    for layer, count in model.layers():
        for attention in layer.attentions:
            num_tokens = encoder_tokens
            recurrent += count * attention.recurrent_elements
            if not attention.cross:
                num_tokens = kept_tokens(layer, tokens, kv_cache=kv_cache)
                # the first view of a sliding layer is of the prompt's tensor: all of it stays
                if after_prompt and kv_cache == "dynamic":
                    num_tokens = tokens
            per_sequence = attention.cache_elements * num_tokens
            if stored is not None:
                elements = batch_size * per_sequence
                quantised = quantised + count * stored_bytes(elements, stored, element_bytes)
                continue
            total = total + count * batch_size * (per_sequence + attention.state_elements)
    if stored is not None:
        return quantised
    return total * element_bytes + 4 * batch_size * recurrent


def stored_bytes(elements: Count, stored: CacheFormat, element_bytes: int) -> Count:
    """One layer's keys and values of `elements` in all, quantised: codes, scales and zeros.

    Kind: exact. Source: optimum-quanto 0.2.7 `WeightQBitsTensor`, hqq 0.2.8 `Quantizer.quantize`:
    a scale and a zero per group, as wide as the keys are; transformers 5.23 `Fp8QuantizedLayer`:
    an fp32 scale for the keys and one for the values.
    """
    codes = ceil_div(elements * stored.nbits, 8)
    if stored.group_size is None:
        return codes + 2 * 4
    return codes + 2 * element_bytes * ceil_div(elements, stored.group_size)


def left_behind_bytes(
    model: ModelSpec,
    *,
    batch_size: Count,
    first_tokens: Count,
    last_tokens: Count,
    element_bytes: int,
) -> Count:
    """Segments that a growing dynamic cache has outgrown and that stay in the allocator's cache.

    A tensor of 10 MiB or more has a segment of its own, rounded up to 2 MiB: with every 2 MiB
    that keys or values grow, they move to a new one, and the old is too small for anybody.
    Kind: estimate. Source: torch 2.13 `CUDACachingAllocator::get_allocation_size`; reserved
    less allocated of published generations (`docs/accuracy/published.md`).
    """
    total = 0 * batch_size
    for layer, count in model.layers():
        for attention in layer.attentions:
            if attention.cross:
                continue
            token_bytes = batch_size * attention.cache_elements * element_bytes // 2
            sizes = (
                largest(kept_tokens(layer, tokens, kv_cache="dynamic") * token_bytes, OWN_SEGMENT)
                for tokens in (first_tokens, last_tokens)
            )
            first, last = sizes
            num_moves = (last - first) // SEGMENT_ROUNDING
            total = total + 2 * count * num_moves * ((first + last) // 2)
    return total


def append_transient_bytes(
    model: ModelSpec, *, batch_size: Count, tokens: Count, kv_cache: str, element_bytes: int
) -> Count:
    """The second copy while a dynamic cache appends to one layer's keys and values.

    A full layer drops the shorter keys before it joins the values, a sliding one joins both first.

    Kind: exact.
    Source: transformers 5.23 `DynamicLayer.update`, `DynamicSlidingWindowLayer.update`.
    """
    # a static layer writes into its tensor (`index_copy_`)
    longest = 0 * batch_size * tokens
    if kv_cache != "dynamic":
        return longest
    for layer, _ in model.layers():
        held_tokens = kept_tokens(layer, tokens, kv_cache=kv_cache)
        for attention in layer.attentions:
            if attention.cross:
                continue
            elements = attention.cache_elements
            if attention.sliding_window is None:
                elements //= 2
            longest = largest(longest, batch_size * held_tokens * elements)
    return longest * element_bytes


DECODER_CACHE = Fact(
    part="kv_cache",
    what="keys and values that a model caches while it trains",
    shape="[2, num_decoder_layers, batch_size, num_heads, seq_len, head_dim]",
    dtype="fp32",
    why="its own copy of the config still says use_cache; attention reads 16-bit copies of them",
    source="transformers 5.23 T5Stack.forward; Trainer sets the model's config only",
)


def trained_cache_elements(model: ModelSpec, dtypes: Dtypes) -> int:
    """Elements per token that a model caches in training, in fp32, where nothing else keeps them.

    A T5 decoder does, and a text whose config is nested in that of a model that sees. Only over an
    fp32 stream, which autocast casts or the math kernel scales: else attention keeps the very same
    tensors.
    Kind: exact. Source: transformers 5.23 `T5Stack.forward`, `Qwen2_5_VLTextModel.forward`.
    """
    return sum(
        count * attention.cache_elements
        for layer, count in model.layers()
        for attention in layer.attentions
        if not attention.memory_len and _is_cached_apart(model, attention, dtypes)
    )


def trained_source_elements(model: ModelSpec, dtypes: Dtypes) -> int:
    """The same per token of an encoder's sequences, where they have a length of their own.

    Kind: exact. Source: as of `trained_cache_elements`; `spec.architecture.with_source_len`.
    """
    return sum(
        count * attention.cache_elements
        for layer, count in model.layers()
        for attention in layer.attentions
        if attention.memory_len and _is_cached_apart(model, attention, dtypes)
    )


def trained_cache_bytes(model: ModelSpec, dtypes: Dtypes, *, tokens: Count, span: Count) -> Count:
    """All keys and values that a model caches while it trains.

    Kind: exact. Source: `DECODER_CACHE`; each is as wide as the keys are.
    """
    total: Count = 0 * tokens
    for layer, count in model.layers():
        for attention in layer.attentions:
            num_keys = tokens // span * attention.memory_len if attention.memory_len else tokens
            size = _key_bytes(attention, dtypes)
            total = total + count * attention.cache_elements * size * num_keys
            total = total + count * attention.state_elements * size * (tokens // span)
    return total


def _key_bytes(attention: Attention, dtypes: Dtypes) -> int:
    """One element of cached keys: tables of positions are in the dtype of the stream."""
    size = dtypes.linear_out_bytes
    if attention.position == "rope":
        return max(size, dtypes.stream_bytes)
    return max(size, dtypes.base_bytes) if attention.norms else size


def trained_memory_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes per sequence of keys and values of what is attended to, so cached, too.

    Kind: exact. Source: transformers 5.23 `MllamaTextCrossAttention.forward`: attention keeps
    copies of them, one for each query head. `DynamicLayer.lazy_initialization` starts both in the
    dtype of the keys, with which `torch.cat` widens values.
    """
    if not model.caches_in_training:
        return 0
    key_bytes = max(dtypes.linear_out_bytes, dtypes.base_bytes)  # after a norm
    return sum(
        count * attention.memory_len * (attention.k_width + attention.v_width) * key_bytes
        for layer, count in model.layers()
        for attention in layer.attentions
        if attention.cross and repeats_keys(attention, dtypes, masked=True)
    )


def _is_cached_apart(model: ModelSpec, attention: Attention, dtypes: Dtypes) -> bool:
    # `DynamicLayer.update` returns the tensor that it keeps, and attention saves it for its
    # backward: one tensor, unless something is made of it in between
    key_bytes = _key_bytes(attention, dtypes)
    is_cast = key_bytes != dtypes.compute_bytes
    if model.task == "seq2seq-lm":
        return is_cast and attention.position == "relative" and not model.hands_on_use_cache
    if not model.caches_in_training or key_bytes != 4:
        return False
    return is_cast or attention_kernel(attention, dtypes, masked=dtypes.padded) not in FUSED


PREFIX_CACHE = Fact(
    part="kv_cache",
    what="keys and values behind those of a prefix, as the model's output holds them",
    shape="[2, num_hidden_layers, batch_size, num_key_value_heads, prefix + seq_len, head_dim]",
    dtype="linear_out_bytes",
    why="attention reads copies of them, one per query head or cast",
    source="peft PeftModel.get_prompt; transformers 5.23 DynamicLayer.update",
)


def prefix_cache_bytes(model: ModelSpec, dtypes: Dtypes, *, tokens: Count, span: Count) -> Count:
    """Keys and values in the cache that hands each layer its prefix, where nobody else keeps them.

    Kind: exact. Source: `PREFIX_CACHE`; else attention saves the very same tensors.
    """
    before = dtypes.prefix_tokens
    if not before:
        return 0 * tokens
    size = max(dtypes.linear_out_bytes, dtypes.base_bytes)
    elements = sum(
        count * attention.cache_elements
        for layer, count in model.layers()
        for attention in layer.attentions
        if size != dtypes.compute_bytes
        or repeats_keys(attention, dtypes, masked=True)
        or attention_kernel(attention, dtypes, masked=True) not in FUSED
    )
    return elements * size * (tokens + floor_div(tokens, span) * before)


CHECKPOINTED_CACHE = Fact(
    part="kv_cache",
    what="projections whose keys and values the model's output holds",
    shape="[num_hidden_layers, batch_size, seq_len, out_features]",
    dtype="compute_bytes; fp32 behind a quantised matrix under autocast",
    why="the class leaves its cache on with checkpointing; what it caches is a view of these",
    source="transformers 4.48.1 GPTBigCodeModel.forward, GPTBigCodeAttention.forward",
)


def caches_checkpointed(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether a training with checkpointing caches keys and values. Kind: exact.

    Source: transformers 4.52.4 `GPTBigCodeModel.forward`; 4.53.3 sets `use_cache = False`.
    """
    until = model.caches_checkpointed_before
    return bool(until) and dtypes.libraries.older("transformers", until)


def checkpointed_cache_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes per token of the fused projections that cached keys and values are views of.

    Autocast makes the output of a LayerNorm fp32, and bitsandbytes returns what it was given.

    Kind: exact. Source: `CHECKPOINTED_CACHE`; bitsandbytes 0.43.3 `Linear4bit.forward`.
    """
    if not caches_checkpointed(model, dtypes):
        return 0
    return sum(
        count * linear.out_features * _projected_bytes(linear, dtypes)
        for layer, count in model.layers()
        for linear in _projections(layer)
    )


def widened_cache(model: ModelSpec, dtypes: Dtypes, *, checkpointed: bool) -> tuple[int, ...]:
    """Elements per token of fp32 copies of cached keys and values, as the model's caller gets them.

    Older classes return tuples of them, which accelerate copies; a `Cache` it hands on.

    Kind: exact. Source: transformers 4.45 `LlamaModel.forward`, `return_legacy_cache`; accelerate
    1.0.1 `ConvertOutputsToFp32`. A published log has them: `jenga_reproduction`.
    """
    if checkpointed:
        is_returned = caches_checkpointed(model, dtypes)
    else:  # the Trainer left `use_cache` of the config alone before 5.0
        until = model.returns_keys_before
        is_returned = bool(until) and dtypes.libraries.older("transformers", until)
        is_returned = is_returned and bool(model.config.get("use_cache", True))
    if not is_returned:
        return ()
    return tuple(
        elements
        for layer, count in model.layers()
        for attention in layer.attentions
        if all(_projected_bytes(linear, dtypes) < 4 for linear in _projections(layer))
        for elements in (attention.cache_elements // 2,) * (2 * count)
    )


def _projections(layer: Layer) -> tuple[Linear, ...]:
    """The first matrix of each attention: it makes keys, or queries beside them."""
    return tuple(attention.linears[0] for attention in layer.attentions)


def _projected_bytes(linear: Linear, dtypes: Dtypes) -> int:
    quantised = is_quantised(linear, dtypes) and dtypes.quant in BNB_QUANTS
    return 4 if quantised and dtypes.under_autocast else dtypes.linear_out_bytes


def caches_in_tuples(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether all of the old cache lives until all of the new one is there.

    Kind: exact. Source: transformers 4.38 `LlamaModel.forward`, 4.48 `OPTDecoder.forward`.
    """
    until = model.tuples_until
    of_class = bool(until) and dtypes.libraries.older("transformers", until)
    return dtypes.libraries.cache_of_tuples or of_class


def viewed_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes per token of a prompt that its cached views keep beside keys and values.

    Kind: exact. Source: transformers 4.44 `GPT2Attention.forward`, 4.42 `GPTNeoXAttention.forward`;
    `DynamicLayer.update`: 4.55 keeps what it is given first, 4.56 a copy.
    """
    if not (model.caches_views and dtypes.libraries.older("transformers", "4.56")):
        return 0
    elements = 0
    for layer, count in model.layers():
        for attention in layer.attentions:
            viewed = attention.cache_elements // (2 if attention.position == "rope" else 1)
            elements += count * (attention.linears[0].out_features - viewed)
    return elements * dtypes.compute_bytes


def widened_keys_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes per token by which cached keys in fp32 are wider than values. Kind: exact.

    Source: as of `wide_key_elements`.
    """
    return wide_key_elements(model, dtypes) * (4 - dtypes.compute_bytes)


def wide_key_elements(model: ModelSpec, dtypes: Dtypes) -> int:
    """Keys per token that tables of positions have made fp32, and values are not. Kind: exact.

    Source: transformers 4.42 `apply_rotary_pos_emb` of GPT-NeoX, whose tables are fp32.
    """
    before = model.wide_keys_before
    older = bool(before) and dtypes.libraries.older("transformers", before)
    if not older or dtypes.compute_bytes == 4:
        return 0
    return sum(
        count * attention.cache_elements // 2
        for layer, count in model.layers()
        for attention in layer.attentions
    )


def handed_on_bytes(
    model: ModelSpec, *, batch_size: Count, tokens: Count, element_bytes: int
) -> Count:
    """Keys and values of whole prompts beside a static cache, which keeps a window of them.

    Later layers read all of them, from a dict that the model's forward names.

    Kind: exact. Source: transformers 5.23 `StaticSlidingWindowLayer.update`: a prompt longer than
    the window is returned as it came.
    """
    total: Count = 0 * batch_size * tokens
    for layer, count in model.layers():
        for attention in layer.attentions:
            if attention.keeps_keys and attention.sliding_window is not None:
                width = attention.k_width + attention.v_width
                total = total + count * width * tokens * (tokens > attention.sliding_window)
    return batch_size * element_bytes * total
