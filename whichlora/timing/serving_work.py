"""What the prompt pass and a decoding step compute and move."""

from __future__ import annotations

from whichlora.memory.layer_bytes import reads_last
from whichlora.memory.loss import scores_prompt
from whichlora.methods.base import AdapterWork
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear
from whichlora.spec.numeric import Count, Real, largest, smallest
from whichlora.spec.run import RunConfig
from whichlora.symbolic.kernels import FUSED, attention_kernel, is_grouped, is_masked, repeats_keys
from whichlora.symbolic.mla import expands_cache
from whichlora.timing import traffic
from whichlora.timing.cache_work import Conversion, expanding, storing
from whichlora.timing.expansion import forward_bytes, recast_bytes, visited_matrices
from whichlora.timing.mamba_work import scan_flops_per_token
from whichlora.timing.products import idle_flops
from whichlora.timing.quant_launches import forward_launches
from whichlora.timing.running import RunningModel
from whichlora.timing.work import (
    OUTSIDE_OPS,
    Work,
    active_weights,
    adapter_works,
    attention_work,
    by_shape,
    encoder_reading_weights,
    expanded_again,
    further_reading_flops,
    grouped_ops,
    head_weights,
    kernels_of,
    loop_kernels,
    num_keys,
    num_logits,
    outside_ops,
    product_work,
    states_bytes_around,
    unpacked_work,
    visited_bytes,
    visited_weights,
    wide_weights,
)

# What a pass over the cache takes a block for each head, of what it takes operators that copy the
# cache. Kind: fitted, to what SDPA takes longer than FlashAttention 2 on 30,000 tokens of
# Qwen1.5 1.8B, 4B and 7B: 0.59, 0.59 and 0.61.
HEAD_PASS = 0.6
# Times that a decoding step of a recurrent layer reads or writes its states: decayed 2, multiplied
# with keys and summed 3, an outer product 1 and its sum 3, multiplied with queries and summed 3.
# Kind: exact. Source: transformers 5.23 `torch_recurrent_gated_delta_rule`; Mamba 2 has as many.
STATE_PASSES = 12
VLLM_LAYER_OPS = 12  # its kernels join norm and residual, queries and keys, gate and product
VLLM_CAPTURED_TOKENS = 8192  # longest sequence of its captured graphs, by default


def read_passes(attention: Attention, dtypes: Dtypes, context: Count) -> Real:
    """How often the attention of one decoding step reads the keys and values there are.

    It reads the cache, or a copy for every head; what makes copies is among the layer's own
    operators, but for what old classes made for FlashAttention. Of a quantised cache, `conversion`
    counts what comes before.

    Kind: exact. Source: transformers 5.23 `repeat_kv`; 4.40 `Qwen2FlashAttention2.forward`; torch
    2.13 `_scaled_dot_product_attention_math`.
    """
    groups = 1
    if is_grouped(attention):
        groups = attention.num_attention_heads // max(1, attention.num_key_value_heads)
    with_mask = is_masked(attention, dtypes, context)
    read: Real = 0
    for masked, share in ((True, with_mask), (False, 1 - with_mask)):
        kernel = attention_kernel(attention, dtypes, masked=masked, decoding=True)
        repeated = repeats_keys(attention, dtypes, masked=masked, decoding=True)
        copies = groups if repeated or kernel not in FUSED else 1
        widened = kernel == "math" and dtypes.compute_bytes == 2
        passes = copies * (1 + widened)
        if dtypes.libraries.repeats_keys and not dtypes.uses_sdpa and kernel in FUSED:
            passes = 1 + 2 * groups if groups > 1 else 1  # read, written and read again
        read = read + share * passes
    return read


def waited_passes(
    attention: Attention,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    context: Count,
    num_multiprocessors: int | None,
) -> Real:
    """Passes over the cache that multiprocessors without a head could have read meanwhile.

    A fused kernel that does not split keys gives each head of a sequence to one block, so that
    few heads read at a few multiprocessors' share of the bandwidth. Each block reads the keys of
    its head, which are those of its whole group.

    Kind: exact but for `HEAD_PASS`. Source: `Libraries.splits_keys`; torch 2.13
    `AttentionKernel`, which divides queries alone.
    """
    waited = 0.0 * batch_size
    if num_multiprocessors is None:
        return waited
    blocks = batch_size * attention.num_attention_heads
    groups = attention.num_attention_heads // max(1, attention.num_key_value_heads)
    idle = largest(0.0, groups * num_multiprocessors / blocks - 1)
    for share, kernel, _ in kernels_of(attention, dtypes, context, decoding=True):
        splits = dtypes.libraries.splits_keys or not dtypes.uses_sdpa
        if kernel == "efficient" or (kernel == "flash" and not splits):
            waited = waited + HEAD_PASS * share * idle
    return waited


def conversion(run: RunConfig, dtypes: Dtypes, *, decoding: bool) -> Conversion:
    """What quantising the cache, or expanding it, takes in one pass; nothing for other caches.

    Kind: estimate. Source: `cache_work`.
    """
    stored = run.cache_format
    if stored is None:
        return Conversion(0, 0)
    stored_work = storing(stored, dtypes.compute_bytes, dtypes.device_kind)
    if not decoding:
        return stored_work
    expanded = expanding(stored, dtypes.compute_bytes)
    if not stored.residual_length:
        return expanded
    share = 1 / stored.residual_length  # of the steps that quantise all tokens anew
    return Conversion(
        expanded.element_bytes + share * stored_work.element_bytes,
        expanded.launches + round(share * stored_work.launches),
    )


def _served_adapter(
    linear: Linear,
    adapter: AdapterWork,
    count: int,
    running: RunningModel,
    *,
    rows: Count,
) -> Work:
    """One forward of `rows` tokens through the adapter of one matrix of `count` layers."""
    dtypes, params = running.dtypes, running.method.adapter_params(linear, running.r)
    share = linear.active / linear.count  # of experts
    read = smallest(1.0, rows * share)
    flops = 2 * rows * share * params + adapter.weight_flops + rows * adapter.token_flops
    beside = Work(
        weight_read_bytes=count * read * params * dtypes.adapter_bytes,
        dequant_bytes=count * expanded_again(linear, adapter, dtypes),
    )
    return Work.total((product_work(count * flops, wide=dtypes.widens_adapters), beside))


def _cache_work(
    attention: Attention,
    running: RunningModel,
    *,
    batch_size: Count,
    context: Count,
    decoding: bool,
) -> Work:
    """What one pass reads, writes and converts of the cache of all sequences."""
    run, dtypes = running.run, running.dtypes
    keys = attention.cache_elements * context
    # what attention reads, and how often; then what appending a token does
    read, passes, appending = keys, 1, 0
    waited: Real = 0
    if decoding:
        passes = read_passes(attention, dtypes, context)
        appending = 2 * (run.kv_cache == "dynamic")  # which is read and written whole
        if not run.has_engine_kernels:  # vLLM's kernels split keys, and expand no latents
            if expands_cache(attention):
                read = (attention.k_width + attention.v_width) * context
            waited = waited_passes(
                attention,
                dtypes,
                batch_size=batch_size,
                context=context,
                num_multiprocessors=running.chip.num_multiprocessors,
            )
    moved = (read + attention.state_elements) * passes
    moved = moved + (keys + attention.state_elements) * appending
    states = batch_size * attention.recurrent_elements * 4  # in fp32
    converted = conversion(run, dtypes, decoding=decoding)
    appends = not run.has_engine_kernels and bool(attention.cache_elements)
    return Work(
        attention_bytes=batch_size * (moved + keys * waited) * dtypes.compute_bytes,
        elementwise_bytes=batch_size * converted.element_bytes * keys
        + states * (STATE_PASSES if decoding else 1),
        launches=converted.launches + 2 * appends,  # keys and values
    )


def _served_idle_flops(layer: Layer, rows: Count, num_multiprocessors: int | None) -> Real:
    """`idle_flops` of the products of one layer's forward."""
    total = 0.0 * rows
    for linear, number in by_shape(layer):
        visited = visited_matrices(linear, rows)
        idle = idle_flops(
            rows * linear.active / visited,
            linear.out_features,
            linear.in_features,
            num_multiprocessors,
            count=visited,
        )
        total = total + number * idle
    return total


def _served_attentions(
    layer: Layer,
    running: RunningModel,
    *,
    batch_size: Count,
    context: Count,
    alone: bool,
    decoding: bool,
) -> Work:
    """The attentions of one layer in a forward, and their caches; `alone`: of one query each."""
    attended = (
        attention_work(
            attention,
            running.dtypes,
            batch_size=batch_size,
            queries=1 if alone else context,
            keys=num_keys(attention, context),
            triangular=not alone,
            forwards=1,
            backward=False,
        )
        for attention in layer.attentions
    )
    caches = (
        _cache_work(
            attention,
            running,
            batch_size=batch_size,
            context=num_keys(attention, context),
            decoding=decoding,
        )
        for attention in layer.running.attentions
    )
    return Work.total((*attended, *caches))


def _expanding_weights(layer: Layer) -> int:
    """Elements of the matrices that make keys and values of all latents in a cache.

    Kind: exact. Source: `symbolic.mla`.
    """
    return sum(
        [linear for linear in attention.linears if linear.active][-2].num_weights
        for attention in layer.attentions
        if expands_cache(attention)
    )


def served_layers(
    group: LayerGroup,
    running: RunningModel,
    *,
    batch_size: Count,
    context: Count,
    decoding: bool,
) -> Work:
    """One forward through the equal layers of `group`. Kind: estimate. Source: `docs/time.md`."""
    model, run, dtypes = running.model, running.run, running.dtypes
    layer, count = group.layer.running, group.count
    padded = layer.padded(batch_size * context, context)
    tokens, context = (batch_size, context) if decoding else padded
    two_stacks = model.task == "seq2seq-lm" and model.groups[0].stack == "encoder"
    alone = decoding or (two_stacks and group.stack == "decoder")
    alone = alone or (run.kv_cache in ("dynamic", "static") and reads_last(layer, dtypes))
    rows = batch_size if alone else tokens
    of_encoder = encoder_reading_weights(layer)  # once, over the whole prompt
    in_rows = active_weights(layer) - of_encoder
    product_flops = count * 2 * rows * in_rows
    if not decoding:
        product_flops = product_flops + count * 2 * tokens * of_encoder
        further = further_reading_flops(layer, batch_size, tokens)
        product_flops = product_flops + count * further
    elif not run.has_engine_kernels:
        further = (batch_size * context - rows) * _expanding_weights(layer)
        product_flops = product_flops + count * 2 * further
    visited = visited_weights(layer, rows) - of_encoder * decoding
    weight_read = count * visited_bytes(layer, dtypes, rows)
    if of_encoder and decoding:
        weight_read = weight_read * visited / (visited + of_encoder)
    attention_flops = count * rows * scan_flops_per_token(layer, context, decoding=alone)
    attended = _served_attentions(
        group.layer,
        running,
        batch_size=batch_size,
        context=context,
        alone=alone,
        decoding=decoding,
    )
    between = traffic.served_layer(group.layer, running, tokens=rows, span=context, alone=alone)
    unpacked, expanded_read = forward_bytes(layer, dtypes, rows)
    dequant, weight_read = count * unpacked, weight_read + count * expanded_read
    kernels = between.kernels + loop_kernels(group.layer, rows, 1 if alone else context)
    of_quants = forward_launches(layer, dtypes, rows)
    layers = Work(
        product_flops=product_flops,
        idle_flops=count * _served_idle_flops(layer, rows, running.chip.num_multiprocessors),
        weight_read_bytes=weight_read,
        attention_flops=attention_flops,
        elementwise_bytes=count * (between.moved + recast_bytes(layer, dtypes, rows)[0]),
        dequant_bytes=dequant,
        launches=count * (kernels + of_quants.kernels),
        autograd_launches=count * grouped_ops(layer, dtypes, rows),  # which C++ launches, too
        host_launches=count * of_quants.host,
    )
    of_adapters = (
        _served_adapter(linear, adapter, count, running, rows=rows)
        for linear, adapter in adapter_works(layer, running)
    )
    works = (layers, attended.times(count), _widened(layer, dtypes, count * rows, of_encoder))
    return unpacked_work(Work.total((*works, *of_adapters)), dtypes, running.chip)


def _widened(layer: Layer, dtypes: Dtypes, rows: Count, of_encoder: int) -> Work:
    """Products with 4-bit weights that are in fp32 in a run of 16 bit, but of an encoder's."""
    weights_read = max(0, wide_weights(layer, dtypes) - of_encoder) * dtypes.widens_four_bit
    flops = 2 * rows * weights_read
    return Work(product_flops=-flops, wide_product_flops=flops)


def inference_work(
    running: RunningModel, *, batch_size: Count, context: Count, decoding: bool
) -> Work:
    """One forward: the prompt pass over `context` tokens, or one decoding step that sees them.

    Each adapter of `running.targets`, which is not merged, does in every forward what it does in
    one of training: PEFT caches nothing of DoRA's norms between tokens.

    The head sees the last position only, that of an encoder or of rewards every one. Of two stacks
    the first reads the prompt, and the second begins with one token.

    Kind: estimate. Source: `docs/time.md`.
    """
    model, dtypes = running.model, running.dtypes
    tokens = batch_size if decoding else batch_size * context
    head, around = head_weights(model)
    vocab = num_logits(model)
    scores_all = scores_prompt(model, dtypes) or not model.can_generate
    scored = tokens if scores_all else batch_size
    if model.task == "encoder":
        head = head + around
    around_flops = 0 * tokens  # of further states, whose product every token has
    if model.streams is not None:
        around_flops = 2 * tokens * around
    layers = Work.total(
        served_layers(group, running, batch_size=batch_size, context=context, decoding=decoding)
        for group in model.groups
        if not (decoding and model.task == "seq2seq-lm" and group.stack == "encoder")
    )
    launches = layers.launches + outside_ops(model) + 0 * tokens
    serving = running.run.has_engine_kernels
    if decoding and serving:
        by_layer = VLLM_LAYER_OPS * model.num_hidden_layers + OUTSIDE_OPS
        eager = (context > VLLM_CAPTURED_TOKENS) * dtypes.libraries.graphs_end_early
        launches = 1 + eager * by_layer + 0 * tokens  # a captured graph is one launch
    return Work(
        product_flops=layers.product_flops + 2 * scored * head + around_flops,
        wide_product_flops=layers.wide_product_flops + 0 * tokens,
        idle_flops=layers.idle_flops,
        weight_read_bytes=layers.weight_read_bytes + head * dtypes.embedding_bytes + 0 * tokens,
        attention_flops=layers.attention_flops,
        wide_attention_flops=layers.wide_attention_flops,
        attention_bytes=layers.attention_bytes,
        elementwise_bytes=layers.elementwise_bytes
        + 12 * scored * vocab
        + tokens * states_bytes_around(model, dtypes),
        dequant_bytes=layers.dequant_bytes + 0 * tokens,
        optimizer_bytes=0 * tokens,
        launches=launches,
        autograd_launches=layers.autograd_launches * (not serving),
        host_launches=layers.host_launches * (not serving),
        engine_steps=int(serving) + 0 * tokens,
    )
