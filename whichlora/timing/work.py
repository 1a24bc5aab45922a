"""What one step does: floating-point operations, bytes moved, kernels launched.

Counts only; `timing` turns them into seconds. Derived from the architecture, so that the same
functions serve training, the prompt pass and decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import add, attrgetter

from whichlora.memory import weights
from whichlora.memory.embeddings import ENCODER_OUT
from whichlora.memory.layer_bytes import reads_last
from whichlora.memory.optimizer import Update, update_bytes, update_flops, update_launches
from whichlora.methods.base import NO_ADAPTERS, AdapterWork, Method
from whichlora.spec.architecture import Attention, Layer, LayerGroup, Linear, ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised, runs_adapter
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, Real, ceil_div, floor_div, is_plain, largest, smallest
from whichlora.spec.run import TRANSFORMERS, RunConfig
from whichlora.spec.targets import adapted, adapted_linears
from whichlora.symbolic.kernels import (
    FUSED,
    Kernel,
    attention_kernel,
    is_grouped,
    is_masked,
    repeats_keys,
)
from whichlora.symbolic.mla import expands_cache
from whichlora.timing import traffic
from whichlora.timing.cache_work import Conversion, expanding, storing
from whichlora.timing.chip import UNKNOWN_CHIP, Chip
from whichlora.timing.expansion import (
    backward_bytes,
    expansion_bytes,
    forward_bytes,
    recast_bytes,
    unpacking_time,
    visited_matrices,
)
from whichlora.timing.mamba_work import (
    scan_flops_per_token,
    scan_loop_backward_bytes,
    scan_loop_ops,
)
from whichlora.timing.products import idle_flops
from whichlora.timing.quant_launches import backward_launches, forward_launches
from whichlora.timing.sparse_work import (
    choosing_flops_per_pair,
    indexer_linears,
)
from whichlora.timing.traffic import StepTraffic, Traffic
from whichlora.timing.window_work import (
    window_flops_per_token,
)
from whichlora.trainers import get_trainer
from whichlora.trainers.base import LogitsLoss

# How long SDPA's memory-efficient kernel takes in 16 bit, where the flash kernel takes 1 for the
# same products. Kind: fitted: 1.9, 1.9 and 2.3 in trainings of padded batches on H100 and H200.
# Others measured 225 and 108 TFLOP/s of forwards on A100 (xformers issue 924, pull request 389).
EFFICIENT_TIME = 2
EXPERT_OPS = 8  # kernels of one expert's forward
# `torch.where` of one expert's mask, whether a token chose it or not: a sum, and two kernels that
# select; the host waits for the sum. What is run on no rows launches nothing.
LOOP_OPS = 3
# What a pass over the cache takes a block for each head, of what it takes operators that copy the
# cache. Kind: fitted, to what SDPA takes longer than FlashAttention 2 on 30,000 tokens of
# Qwen1.5 1.8B, 4B and 7B: 0.59, 0.59 and 0.61.
HEAD_PASS = 0.6
# Times that a decoding step of a recurrent layer reads or writes its states: decayed 2, multiplied
# with keys and summed 3, an outer product 1 and its sum 3, multiplied with queries and summed 3.
# Kind: exact. Source: transformers 5.23 `torch_recurrent_gated_delta_rule`; Mamba 2 has as many.
STATE_PASSES = 12
# Kernels of the loop over chunks of a gated delta rule, for each chunk and beside them.
# Kind: exact. Source: traces of transformers 5.23 `torch_chunk_gated_delta_rule`.
CHUNK_OPS, CHUNKED_OPS = 9, 11
VLLM_LAYER_OPS = 12  # its kernels join norm and residual, queries and keys, gate and product
VLLM_CAPTURED_TOKENS = 8192  # longest sequence of its captured graphs, by default
STATE_OPS = 8  # that project one further state, and bring it to a magnitude
OUTSIDE_OPS = 22  # embedding, final norm, head, sampling
BACKWARD_RATIO = 1.6  # kernels of a backward, of those of its forward: 60 of 38 of a Llama's layer
# Launches that take the host as long as one call of `checkpoint`, around a layer, and as the Python
# hooks of one tensor that non-reentrant checkpointing saves: packed in the forward, packed again in
# the second one, unpacked in the backward.
# Kind: measured, `benchmarks/host_costs.py`: 26 to 33 and 1.3 to 2.4.
CHECKPOINT_CALL, SAVED_TENSOR_HOOKS = 31, 1.6
LAYER_MODULES = 6  # beside its linear layers: itself, attention, MLP, activation and two norms
# As `LossHeadSpec.passes`, of a trainer's own loss of fp32 logits. Kind: estimate, read. Those of
# 16 bit are widened (6), and their gradient is narrowed (6). It is placed among those of all
# positions (12), and metrics read the logits (4). Between, a kernel reads them (4), and writes
# their gradient (8).
# Row by row `logsumexp` subtracts, exponentiates and sums (24), then does so again and multiplies
# (24), rows are stacked (8), and `gather` adds its gradient (16). A log-softmax of all copies (8),
# reads and writes (12), and so does its backward (12), beside `gather`'s zeros (4).
# The cross entropy of the chosen half adds copy, log-softmax and their backwards (16), two placed
# gradients (14) and a sum (12). Source: as of `memory.logits_loss`.
_LOGITS_LOSS_PASSES = {"kernel": 28, "rows": 88, "softmax": 52}
_WIDENING_PASSES = 12
_CROSS_ENTROPY_PASSES = 42
# The same of TRL's fused head where there is no Triton: each operator of its tiles reads and writes
# fp32 tensors. Kind: estimate, read. Forward: scaled twice (16), a mask (16), two largest (8),
# exponents with their sum and their product (36). Backward: scaled twice (16), log-softmax and its
# exponent (16), the target (6), gradients (52), a copy (8). Source: TRL 1.16
# `_torch_transform`, `_forward_tile`, `_backward_tile` of kernels/chunked_logprob.py.
_FOLDED_FORWARD_PASSES, _FOLDED_BACKWARD_PASSES = 76, 98
# Of a loss without a graph: widened logits and what is computed of them.
_FORWARD_PASSES = {"kernel": 12, "rows": 30, "softmax": 26}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts of one optimizer step, one prompt pass or one decoding step.

    Args:
        product_flops: matrix products, adapters included (multiply and add are two).
        wide_product_flops: those that are computed in fp32 whatever the dtype of the run.
        idle_flops: what the device could do while products do not fill it.
        weight_read_bytes: stored weights read by all passes.
        attention_flops: scores and weighted values; of a slower kernel, as many as the flash kernel
            computes meanwhile.
        wide_attention_flops: those that are computed in fp32 whatever the dtype of the run.
        attention_bytes: the cache, read and written while decoding.
        elementwise_bytes: norms, activations, residuals, casts, loss, and the score matrices of
            eager attention: read and written.
        dequant_bytes: moved to expand quantised weights to 16 bit, all passes; where instructions
            take longer, as many as memory moves meanwhile.
        optimizer_bytes: parameters, gradients and states read and written by the step, by clipping,
            and by summing the gradients of micro-batches.
        optimizer_flops: of the step in fp32, where they take longer than its bytes.
        launches: kernels launched from Python, each on its own.
        recorded_launches: those of them whose operators autograd records for a backward.
        autograd_launches: those that C++ launches: autograd in a backward, or a loop over groups.
        update_launches: those of the optimizer and of what is done to gradients before its step.
        host_launches: launches that take the host as long as what Python does beside them, around
            a second forward and for quantised weights.
        walked_modules: modules of the model that the trainer walks through around its micro-steps,
            while the device waits.
        engine_steps: turns of a serving engine's scheduler and sampler on the host, for which the
            device waits.
    """

    product_flops: Count = 0
    wide_product_flops: Count = 0
    idle_flops: Count = 0
    weight_read_bytes: Count = 0
    attention_flops: Count = 0
    wide_attention_flops: Count = 0
    attention_bytes: Count = 0
    elementwise_bytes: Count = 0
    dequant_bytes: Count = 0
    optimizer_bytes: Count = 0
    optimizer_flops: Count = 0
    launches: Count = 0
    recorded_launches: Count = 0
    autograd_launches: Count = 0
    update_launches: Count = 0
    host_launches: Count = 0
    walked_modules: Count = 0
    engine_steps: Count = 0

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """The work of all of them, one after the other."""
        columns = zip(*map(_counts_of, works), strict=True)
        totals = [reduce(add, column, 0) for column in columns]
        return cls(**dict(zip(_WORK_FIELDS, totals, strict=True))) if totals else cls()

    def times(self, count: float) -> Work:
        """This work, `count` times."""
        counts = [count * number for number in _counts_of(self)]
        return Work(**dict(zip(_WORK_FIELDS, counts, strict=True)))


_WORK_FIELDS = tuple(field.name for field in fields(Work))
_counts_of = attrgetter(*_WORK_FIELDS)


def active_weights(layer: Layer) -> int:
    """Matrix elements that one token is multiplied with.

    Kind: exact. Source: the architecture.
    """
    return sum(linear.active * linear.in_features * linear.out_features for linear in layer.linears)


def wide_weights(layer: Layer, dtypes: Dtypes) -> int:
    """Those of `active_weights` that are multiplied in fp32 in a run of 16 bit.

    Kind: exact. Source: transformers 5.23 and peft 0.21.2, `docs/memory.md` (MODES).
    """
    of_others, of_four_bit = dtypes.widens_products, dtypes.widens_four_bit
    if not (of_others or of_four_bit):
        return 0
    return sum(
        linear.active * linear.in_features * linear.out_features
        for linear in layer.linears
        if (of_four_bit if is_quantised(linear, dtypes) else of_others)
    )


def wide_gradient_weights(layer: Layer, dtypes: Dtypes) -> int:
    """Weights in 8 bit whose product of the backward is computed in fp32: those with fp32 inputs.

    Kind: exact. Source: bitsandbytes 0.50.2 `MatMul8bitLt.backward`: `CB.to(ctx.dtype_A)`.
    """
    if dtypes.quant != "int8" or dtypes.compute_bytes == 4:
        return 0
    inputs = {linear.name: dtypes.stream_bytes for linear in layer.linears}
    inputs |= {attention.linears[-1].name: dtypes.compute_bytes for attention in layer.attentions}
    if layer.mlp is not None:
        inputs[layer.mlp.linears[-1].name] = dtypes.mlp_bytes
    return sum(
        linear.active * linear.in_features * linear.out_features
        for linear in layer.linears
        if is_quantised(linear, dtypes) and inputs[linear.name] == 4
    )


def product_work(flops: Count, *, wide: bool) -> Work:
    """Matrix products in the run's dtype or, if `wide`, in fp32.

    Kind: exact. Source: `Dtypes.widens_products`, `Dtypes.widens_adapters`.
    """
    return Work(wide_product_flops=flops) if wide else Work(product_flops=flops)


def visited_weights(layer: Layer, tokens: Count) -> Count:
    """Matrix elements that a batch of `tokens` reads.

    Kind: estimate. Source: `visited_matrices`.
    """
    total = 0 * tokens
    for linear in layer.linears:
        visited = visited_matrices(linear, tokens)
        total = total + visited * linear.in_features * linear.out_features
    return total


def visited_bytes(layer: Layer, dtypes: Dtypes, tokens: Count) -> Real:
    """What those matrices take as they are stored, which experts may be in a format of their own.

    Kind: estimate. Source: `visited_matrices`, `linear_bytes`.
    """
    total = 0.0 * tokens
    for linear in layer.linears:
        stored = weights.linear_bytes(linear, dtypes) / linear.count
        total = total + visited_matrices(linear, tokens) * stored
    return total


def head_weights(model: ModelSpec) -> tuple[int, int]:
    """Elements of the projection of every position, and of other matrices around the layers.

    An encoder is trained, and asked, to fill masked words, unless it has a head for labels. What
    reads one position of each sequence is not counted.

    Kind: exact. Source: the architecture.
    """
    around = sum(linear.num_weights for linear in model.around_linears)
    labels = model.label_head
    if labels is not None:
        if labels.pools == "before":
            return 0, around
        transform = sum(linear.num_weights for linear in labels.linears[:-1])
        return labels.projection.num_weights, around + transform
    masked = model.masked_head
    if masked is not None:
        transform = 0 if masked.linear is None else masked.linear.num_weights
        return model.vocab_size * masked.width, around + transform
    return (model.head.num_weights if model.head is not None else 0), around


def num_logits(model: ModelSpec) -> int:
    """Scores of one position: of the vocabulary's words, or of labels.

    Kind: exact. Source: the architecture.
    """
    if model.label_head is not None:
        return model.label_head.projection.out_features * (model.label_head.pools != "before")
    return model.vocab_size if head_weights(model)[0] else 0


def encoder_reading_weights(layer: Layer) -> int:
    """Elements of the matrices that make keys and values of the encoder's output.

    Kind: exact. Source: the architecture.
    """
    return sum(linear.num_weights for linear in layer.linears if linear.reads == ENCODER_OUT)


def _further_rows(
    model: ModelSpec,
    method: Method,
    targets: tuple[str, ...],
    *,
    tokens: Count,
    seq_len: Count,
    r: Count,
) -> Count:
    """Rows times parameters of adapters, where an encoder's rows are more than a decoder's.

    They are those in the encoder, and those that read what it returns; less where it has fewer.

    Kind: exact. Source: `spec.architecture.with_source_len`.
    """
    total = 0 * tokens * r
    if not model.groups[0].layer.own_len:
        return total
    for layer, count in model.layers():
        in_layer = floor_div(tokens, seq_len) * (layer.own_len or seq_len)
        for linear in adapted(layer, targets):
            rows = _rows_read(model, in_layer, layer.own_len or seq_len, linear)
            total = total + (rows - tokens) * count * method.adapter_params(linear, r)
    return total


def _rows_read(model: ModelSpec, tokens: Count, seq_len: Count, linear: Linear) -> Count:
    """Rows that a matrix reads in a layer of `tokens`: an encoder's output has its own."""
    own_len = model.groups[0].layer.own_len
    encoded = own_len and linear.reads == ENCODER_OUT
    return floor_div(tokens, seq_len) * own_len if encoded else tokens


def _num_keys(attention: Attention, length: Count) -> Count:
    """Keys of one sequence of `length` tokens: as many, or an encoder's whatever it has.

    Of blocks, those that a query sees.
    """
    if attention.in_blocks:
        sums = floor_div(length, attention.summed_tokens) if attention.summed_tokens else 0
        return 3 * attention.chunk_size + sums + 0 * length
    return attention.memory_len or length


def _further_reading_flops(layer: Layer, sequences: Count, tokens: Count) -> Count:
    """Of products that read an encoder's output, beyond those of as many rows as `tokens`.

    Kind: exact. Source: the architecture.
    """
    positions = max((attention.memory_len for attention in layer.attentions), default=0)
    if not positions:
        return 0 * tokens
    return 2 * (sequences * positions - tokens) * encoder_reading_weights(layer)


def kernels_of(
    attention: Attention, dtypes: Dtypes, keys: Count, *, decoding: bool = False
) -> Iterator[tuple[Count, Kernel, bool]]:
    """The kernels that run on so many keys, each with 1 where it does and 0 elsewhere.

    The third value is whether the kernel reads a mask or a bias.

    Kind: exact. Source: `symbolic.kernels.attention_kernel`.
    """
    if attention.kind != "softmax":
        return
    biased = attention.position == "relative"
    plain, masked = (
        attention_kernel(attention, dtypes, masked=masked, decoding=decoding)
        for masked in (biased, True)
    )
    with_mask = is_masked(attention, dtypes, keys)
    if biased or plain == masked != "efficient":
        yield 1, plain, biased
    elif is_plain(with_mask):
        yield 1, masked if with_mask else plain, bool(with_mask)
    else:
        yield 1 - with_mask, plain, False
        yield with_mask, masked, True


def attention_flops_per_token(
    attention: Attention,
    context: Count,
    kernel: Kernel,
    *,
    triangular: bool,
    masked: bool = False,
) -> Count:
    """Scores and weighted values of one query: 2 (head_dim + v_head_dim) per head and key.

    Args:
        context: keys there are.
        triangular: queries and keys are the same tokens, so that a fused causal kernel skips the
            masked half; the others compute it.
        masked: the memory-efficient kernel reads a mask, and computes what it hides, too.

    Kind: exact. Source: two products of every query with the keys that it sees; torch 2.13
    `AttentionKernel`, which bounds its keys by `custom_mask_type` alone, not by a bias.
    """
    if attention.windows is not None:
        return window_flops_per_token(attention, context)
    seen = context
    skips = kernel == "flash" or (kernel == "efficient" and not (masked and triangular))
    if attention.sliding_window is not None and skips:
        seen = smallest(context, attention.sliding_window)
    half = triangular and attention.causal and not attention.cross and skips
    half = half and attention.sparse is None  # whose mask the kernel reads
    per_key = attention.num_attention_heads * (attention.head_dim + attention.v_head_dim)
    return per_key * seen * (1 if half else 2)


def _attention_flops(
    attention: Attention,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    queries: Count,
    keys: Count,
    triangular: bool,
    forwards: int,
    backward: bool,
) -> Work:
    """Products of queries and keys, and those that an indexer reads.

    Args:
        queries: of one sequence.
        forwards: how often the layer runs forward.
        backward: and whether it runs backward.
    """
    flops = wide_flops = 0 * (batch_size * queries * keys)
    decoding = not triangular and not backward
    rows = batch_size * queries
    for share, kernel, masked in kernels_of(attention, dtypes, keys, decoding=decoding):
        per_token = attention_flops_per_token(
            attention, keys, kernel, triangular=triangular, masked=masked
        )
        # backward is two forwards, and half of one more where the kernel computes scores again
        halves = 2 * forwards + (5 if kernel in FUSED else 4) * backward
        products = share * rows * per_token * halves // 2
        if kernel == "efficient" and dtypes.compute_bytes == 2:
            products = products * EFFICIENT_TIME
        by_math = kernel == "math" and dtypes.compute_bytes == 2
        in_fp32 = by_math or (dtypes.widens_products and kernel != "flash")  # flash takes 16 bit
        flops, wide_flops = (
            (flops, wide_flops + products) if in_fp32 else (flops + products, wide_flops)
        )
    attended = Work(attention_flops=flops, wide_attention_flops=wide_flops)
    if attention.sparse is None:
        return attended
    sizes = {"batch_size": batch_size, "queries": queries, "keys": keys}
    chosen = _choosing_work(attention, dtypes, forwards=forwards, **sizes)
    return Work.total((attended, chosen))


def _choosing_work(
    attention: Attention,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    queries: Count,
    keys: Count,
    forwards: int,
) -> Work:
    """What an indexer does, which runs forward alone. Args as of `_attention_work`.

    Kind: estimate. Source: `timing.sparse_work`.
    """
    rows, linears = batch_size * queries, indexer_linears(attention)
    alone = Layer(attentions=(replace(attention, linears=linears),))
    unpacked, expanded_read = forward_bytes(alone, dtypes, rows)
    in_fp32 = dtypes.compute_bytes == 2 and not dtypes.under_autocast  # `q.float()`
    flops = rows * keys * choosing_flops_per_pair(attention)
    stored = sum(weights.linear_bytes(linear, dtypes) for linear in linears)
    once = Work(
        product_flops=2 * rows * sum(linear.num_weights for linear in linears),
        attention_flops=flops * (not in_fp32),
        wide_attention_flops=flops * in_fp32,
        weight_read_bytes=stored + expanded_read,
        dequant_bytes=unpacked,
    )
    return once.times(forwards)


def states_bytes_around(model: ModelSpec, dtypes: Dtypes) -> int:
    """So before the first and after the last layer.

    Kind: estimate. Source: transformers 5.23 `Gemma3nTextModel.forward`.
    """
    if model.streams is None:
        return 0
    states = model.streams.num_states
    # of each further state square, mean, product and quotient, twice; both stacks, the mean
    passes = 14 * (states - 1) + 5 * states + 7
    return passes * dtypes.stream_bytes * model.hidden_size


def outside_ops(model: ModelSpec) -> int:
    """Kernels of one forward beside the layers. Kind: estimate. Source: traced kernels."""
    if model.streams is None:
        return OUTSIDE_OPS
    return OUTSIDE_OPS + 2 * STATE_OPS * (model.streams.num_states - 1) + STATE_OPS


def grouped_ops(layer: Layer, dtypes: Dtypes, tokens: Count) -> Count:
    """Products of single experts that one pass over a layer launches, where no kernel groups them.

    One that groups them is for bf16 from compute capability 9.0 to 10.x.

    Kind: exact, all experts taken as visited that can be. Source: torch 2.13 `_grouped_mm_cuda`,
    `_grouped_mm_fallback`; transformers 5.23 `grouped_mm_experts_forward`.
    """
    if layer.moe is None or (
        dtypes.compute_bytes == 2
        and dtypes.half == "bf16"
        and ((dtypes.compute_capability or "").partition(".")[0] in ("9", "10"))
    ):
        return 0 * tokens
    visited = smallest(layer.moe.num_experts, tokens * layer.moe.rows_per_token)
    return len(layer.moe.expert.linears) * visited


def loop_ops(layer: Layer) -> int:
    """Kernels that find the rows of each expert, where experts run in a Python loop.

    Kind: estimate: the kernels of one `torch.where` were not counted on a device.
    Source: transformers 4.38 `Qwen2MoeSparseMoeBlock.forward`, which loops over all experts.
    """
    moe = layer.moe
    return LOOP_OPS * moe.num_experts if moe is not None and moe.one_by_one else 0


def _adapter_works(
    layer: Layer, dtypes: Dtypes, method: Method, targets: tuple[str, ...], r: Count
) -> list[tuple[Linear, AdapterWork]]:
    """The matrices of one layer whose adapters run, each with the work of its adapter."""
    linears = () if method.trains_base else adapted(layer, targets)
    running = (linear for linear in linears if runs_adapter(linear, dtypes))
    return [(linear, method.work(linear, dtypes, r)) for linear in running]


def trained_layers(
    layer: Layer,
    count: int,
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    tokens: Count,
    seq_len: Count,
    r: Count,
    chip: Chip,
) -> Work:
    """One micro-step of `count` equal layers. Kind: estimate. Source: `docs/time.md`."""
    whole, layer = layer, layer.running
    tokens, seq_len = layer.padded(tokens, seq_len)
    recompute = 1 if run.gradient_checkpointing else 0
    passes = 3 if method.trains_base else 2
    multiplied = count * 2 * tokens * (passes + recompute)
    wide = wide_weights(layer, dtypes)
    stored = sum(weights.linear_bytes(linear, dtypes) for linear in layer.linears)
    weight_read = count * stored * (passes + recompute)
    scanned = count * tokens * scan_flops_per_token(layer, seq_len, decoding=False)
    attended = _trained_attentions(
        whole, dtypes, tokens=tokens, seq_len=seq_len, forwards=1 + recompute
    )
    adapters = _adapter_works(layer, dtypes, method, targets, r)
    between = _between_products(
        whole,
        model,
        run,
        dtypes,
        method,
        targets,
        tokens=tokens,
        seq_len=seq_len,
        r=r,
        chip=chip,
    )
    unpacked, expanded_read = forward_bytes(layer, dtypes, tokens)
    expanded_back, read_back = backward_bytes(layer, dtypes)
    recast, recast_back = recast_bytes(layer, dtypes, tokens)
    dequant = count * (unpacked * (1 + recompute) + expanded_back)
    weight_read = weight_read + count * (expanded_read * (1 + recompute) + read_back)
    of_quants = forward_launches(layer, dtypes, tokens)
    of_quants_back = backward_launches(layer, dtypes, tokens)
    in_forward = between.forward.kernels + of_quants.kernels
    again = (between.repeated.kernels + of_quants.kernels) * recompute
    first_is_recorded = not (recompute and run.use_reentrant)
    hooks = SAVED_TENSOR_HOOKS * first_is_recorded * between.forward.saves
    in_fp32 = count * 2 * tokens * wide_gradient_weights(layer, dtypes)
    layers = Work(
        product_flops=multiplied * (active_weights(layer) - wide)
        - in_fp32
        + count * (passes + recompute) * _further_reading_flops(layer, tokens // seq_len, tokens),
        wide_product_flops=multiplied * wide + in_fp32,
        idle_flops=count
        * _trained_idle_flops(layer, tokens, method, recompute, chip.num_multiprocessors),
        weight_read_bytes=weight_read,
        attention_flops=scanned * (3 + recompute),
        elementwise_bytes=count
        * (between.forward.moved + between.repeated.moved + between.backward.moved)
        + count * (recast * (1 + recompute) + recast_back),
        dequant_bytes=dequant,
        launches=count * (in_forward + again),
        recorded_launches=count * (in_forward * first_is_recorded + again),
        autograd_launches=count * (between.backward.kernels + of_quants_back.kernels),
        host_launches=count
        * (recompute * (CHECKPOINT_CALL + hooks + of_quants.host) + of_quants.host)
        + count * of_quants_back.host,
        walked_modules=count * _walked_modules(layer, run, adapters),
    )
    rows_of = partial(_rows_read, model, tokens, seq_len)
    in_step = (
        _trained_adapter(linear, adapter, dtypes, recompute, count, rows_of(linear))
        for linear, adapter in adapters
    )
    return _unpacked(Work.total((layers, attended.times(count), *in_step)), dtypes, chip)


def _unpacked(layers: Work, dtypes: Dtypes, chip: Chip) -> Work:
    """`layers` with `dequant_bytes` as they are on this chip."""
    return replace(layers, dequant_bytes=layers.dequant_bytes * unpacking_time(dtypes, chip))


def _trained_attentions(
    layer: Layer, dtypes: Dtypes, *, tokens: Count, seq_len: Count, forwards: int
) -> Work:
    """Products of the attentions of one layer in `forwards` forwards and a backward."""
    return Work.total(
        _attention_flops(
            attention,
            dtypes,
            batch_size=tokens // seq_len,
            queries=seq_len,
            keys=_num_keys(attention, seq_len) * attention.ring,
            triangular=True,
            forwards=forwards,
            backward=True,
        )
        for attention in layer.attentions
    )


def _between_products(
    layer: Layer,
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    tokens: Count,
    seq_len: Count,
    r: Count,
    chip: Chip,
) -> StepTraffic:
    """What the kernels of one layer move in a micro-step, and how many there are."""
    sizes = {"tokens": tokens, "span": seq_len, "r": r, "chip": chip}
    counted = traffic.trained_layer(layer, model, run, dtypes, method, targets, **sizes)
    in_forward = _loop_kernels(layer, tokens, seq_len)
    in_backward = _loop_kernels(layer, tokens, seq_len, backward=True)
    passes = 2 + method.trains_base + bool(run.gradient_checkpointing)
    in_backward = in_backward + passes * grouped_ops(layer, dtypes, tokens)  # C++ launches them
    moved_back = tokens * scan_loop_backward_bytes(layer, seq_len)
    return counted + StepTraffic(
        Traffic(kernels=in_forward),
        Traffic(kernels=in_forward * bool(run.gradient_checkpointing)),
        Traffic(moved_back, in_backward),
    )


def _loop_kernels(layer: Layer, tokens: Count, span: Count, *, backward: bool = False) -> Count:
    """Kernels of loops in Python beside the operators on a tape, which has all of them once.

    Over experts: those that no token of the batch chose run nothing. Over the tokens of a scan, or
    the chunks of a gated delta rule.

    Kind: estimate. Source: transformers 4.38 `Qwen2MoeSparseMoeBlock.forward`, which loops over all
    experts; 5.23 `mamba_selective_scan`.
    """
    kernels = scan_loop_ops(layer, span, backward=backward)
    for attention in layer.attentions:
        if attention.kind == "linear":
            in_chunks = CHUNK_OPS * ceil_div(span, attention.chunk_size) + CHUNKED_OPS
            ratio = BACKWARD_RATIO if backward else 1
            kernels = kernels + (span > 1) * ratio * in_chunks
    moe = layer.moe
    if moe is None or not moe.one_by_one:
        return kernels
    visited = smallest(moe.num_experts, tokens * moe.rows_per_token)
    unread = (moe.num_experts - visited) * EXPERT_OPS
    return kernels - unread * BACKWARD_RATIO if backward else kernels - unread + loop_ops(layer)


def _walked_modules(
    layer: Layer, run: RunConfig, adapters: Sequence[tuple[Linear, AdapterWork]]
) -> int:
    """Modules of one layer through which the trainer walks; a script of one's own does not.

    Kind: exact of Llama, an estimate of others. Source: transformers 5.23 `Trainer.training_step`,
    `Trainer.floating_point_ops`.
    """
    if not get_trainer(run.trainer).library_class:
        return 0
    of_adapters = sum(adapter.modules for _, adapter in adapters)
    return LAYER_MODULES + len(layer.linears) + of_adapters


def _by_shape(layer: Layer) -> Iterable[tuple[Linear, int]]:
    """One matrix of each shape, and how many of the layer's have it."""
    shapes = [
        (linear.in_features, linear.out_features, linear.active, linear.count)
        for linear in layer.linears
    ]
    first = dict(zip(reversed(shapes), reversed(layer.linears), strict=True))
    return [(first[shape], number) for shape, number in Counter(shapes).items()]


def _trained_idle_flops(
    layer: Layer, tokens: Count, method: Method, recompute: int, num_multiprocessors: int | None
) -> Real:
    """`idle_flops` of the products of one layer: forward, input's gradient, trained weight's."""
    total = 0.0 * tokens
    for linear, number in _by_shape(layer):
        inputs, outputs = linear.in_features, linear.out_features
        visited = visited_matrices(linear, tokens)
        rows = tokens * linear.active / visited
        forward = idle_flops(rows, outputs, inputs, num_multiprocessors, count=visited)
        idle = (1 + recompute) * forward + idle_flops(
            rows, inputs, outputs, num_multiprocessors, count=visited
        )
        if method.trains_base:
            idle = idle + idle_flops(outputs, inputs, rows, num_multiprocessors, count=visited)
        total = total + number * idle
    return total


def _expanded_again(linear: Linear, adapter: AdapterWork, dtypes: Dtypes) -> Real:
    """Bytes that the adapter of one matrix moves in a forward to expand the matrix itself."""
    if not adapter.expansions or not is_quantised(linear, dtypes):
        return 0
    read = dtypes.compute_bytes * linear.in_features * linear.out_features
    return adapter.expansions * linear.count * (expansion_bytes(linear, dtypes) + read)


def _trained_adapter(
    linear: Linear,
    adapter: AdapterWork,
    dtypes: Dtypes,
    recompute: int,
    count: int,
    tokens: Count,
) -> Work:
    """Products of one micro-step of one matrix's adapter in `count` layers."""
    # the input's gradient is one product more
    token_flops = tokens * (adapter.token_flops * (2 + recompute) + adapter.backward_token_flops)
    weight_flops = adapter.weight_flops * (1 + recompute) + adapter.backward_weight_flops
    expanded = count * _expanded_again(linear, adapter, dtypes) * (1 + recompute)
    in_fp32 = dtypes.widens_adapters if adapter.wide is None else adapter.wide
    parts = [
        product_work(
            count * (token_flops + weight_flops), wide=in_fp32 and dtypes.compute_bytes == 2
        ),
        Work(dequant_bytes=expanded),
    ]
    if adapter.replaces_base and dtypes.widens_adapters:
        base = count * tokens * 2 * (2 + recompute) * linear.active
        base = base * linear.in_features * linear.out_features
        parts.append(Work(product_flops=-base, wide_product_flops=base))
    return Work.total(parts)


def training_work(
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    batch_size: Count,
    seq_len: Count,
    r: Count,
    scored: Count | None = None,
    logits_loss: LogitsLoss | None = None,
    update: Update,
    num_forwards: Count = 1,
    chip: Chip = UNKNOWN_CHIP,
) -> Work:
    """One optimizer step: all accumulation micro-steps, then the update.

    Args:
        num_forwards: of a micro-step, each of `batch_size` sequences.

    Frozen weights need one product backward (the input's gradient), trained ones two;
    checkpointing repeats the forward.

    Kind: estimate. Source: `docs/time.md`.
    """
    tokens = batch_size * seq_len
    scored = tokens if scored is None else scored
    recompute = 1 if run.gradient_checkpointing else 0
    passes = 3 if method.trains_base else 2
    head, around = head_weights(model)

    settings = (model, run, dtypes, method, targets)
    layers = Work.total(
        trained_layers(layer, count, *settings, tokens=tokens, seq_len=seq_len, r=r, chip=chip)
        for layer, count in model.layers()
    )
    # TRL's fused head makes each tile of the logits again in its backward
    copied = method.copies_table * model.embeddings[0].num_params
    tied = bool(copied) and model.head_tied
    of_head = scored * head * (passes + (run.loss_head == "trl-fused") + tied)
    around_layers = 2 * (of_head + tokens * around * passes)
    weight_read = layers.weight_read_bytes + head * dtypes.embedding_bytes * passes + 0 * tokens
    multiplied = Work.total((layers, product_work(around_layers, wide=_widens_head(dtypes))))
    if not method.trains_base:
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "r": r}
        rows = _adapter_rows(model, method, targets, update, **sizes)
        of_adapters = product_work((6 + 2 * recompute) * rows, wide=dtypes.widens_adapters)
        multiplied = Work.total((multiplied, of_adapters))
    at_end = _at_end(
        *settings, scored=scored, seq_len=seq_len, r=r, logits_loss=logits_loss, chip=chip
    )
    elementwise = layers.elementwise_bytes + at_end.elementwise_bytes
    elementwise = elementwise + tokens * states_bytes_around(model, dtypes) * 5 // 2
    # a copy is read and written, and so is its gradient
    elementwise = elementwise + 4 * copied * (1 + tied) * dtypes.embedding_bytes
    micro_step = replace(
        multiplied,
        weight_read_bytes=weight_read,
        elementwise_bytes=elementwise,
        dequant_bytes=layers.dequant_bytes + 0 * tokens,
        launches=layers.launches + at_end.launches,
        recorded_launches=layers.recorded_launches + at_end.launches,
        autograd_launches=layers.autograd_launches + at_end.autograd_launches,
    )
    steps = run.gradient_accumulation_steps * num_forwards
    return Work.total((micro_step.times(steps), _work_of_update(update, like=tokens)))


def _adapter_rows(
    model: ModelSpec,
    method: Method,
    targets: tuple[str, ...],
    update: Update,
    *,
    batch_size: Count,
    seq_len: Count,
    r: Count,
) -> Count:
    """Trained parameters times the rows that each is multiplied with, summed up."""
    tokens = batch_size * seq_len
    read = batch_size * method.added_tokens if method.added_tokens else tokens
    shared = method.shared_tensors(adapted_linears(model, targets), r)
    params = update.num_params - sum(tensor.num_params for tensor in shared)
    further = _further_rows(model, method, targets, tokens=tokens, seq_len=seq_len, r=r)
    return read * params + further


def _at_end(
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    scored: Count,
    seq_len: Count,
    r: Count,
    logits_loss: LogitsLoss | None,
    chip: Chip,
) -> Work:
    """What kernels around the layers move in a micro-step, and how many there are."""
    head = traffic.head(
        model,
        run,
        dtypes,
        method,
        targets,
        get_trainer(run.trainer),
        computed=logits_loss is not None,
        tokens=scored,
        span=seq_len,
        r=r,
        chip=chip,
    )
    moved = head.forward.moved + head.backward.moved
    moved = moved + _loss_passes(run, dtypes, logits_loss) * num_logits(model) * scored
    if method.trains_base:  # zeros, to which rows are added; of a tied head a sum of two gradients
        table = model.embeddings[0].num_params * dtypes.embedding_bytes
        moved = moved + (1 + 3 * model.head_tied) * table
    return Work(
        elementwise_bytes=moved,
        launches=outside_ops(model) + head.forward.kernels,
        autograd_launches=head.backward.kernels,
    )


def _work_of_update(update: Update, *, like: Count) -> Work:
    return Work(
        optimizer_bytes=update_bytes(update) + 0 * like,
        optimizer_flops=update_flops(update),
        update_launches=update_launches(update),
    )


def _widens_head(dtypes: Dtypes) -> bool:
    return dtypes.widens_products and dtypes.head_bytes > dtypes.half_bytes


def _forward_loss_passes(run: RunConfig, dtypes: Dtypes, logits_loss: LogitsLoss | None) -> int:
    """Bytes per token and vocabulary entry of a forward without a graph.

    Kind: estimate. Source: the tables above.
    """
    if logits_loss is not None:
        return _FORWARD_PASSES[logits_loss.way_on(dtypes.device_kind)]
    if run.loss_head == "trl-fused" and not dtypes.backend.has_triton:
        return _FOLDED_FORWARD_PASSES
    return _FORWARD_PASSES["kernel"]


def _loss_passes(run: RunConfig, dtypes: Dtypes, logits_loss: LogitsLoss | None) -> int:
    """So of forward and backward, where a trainer or a kernel computes the loss.

    Kind: estimate. Source: the tables above.
    """
    if logits_loss is not None:
        of_chosen = logits_loss.has_cross_entropy * _CROSS_ENTROPY_PASSES
        widened = _WIDENING_PASSES * (dtypes.compute_bytes == 2)
        return _LOGITS_LOSS_PASSES[logits_loss.way_on(dtypes.device_kind)] + of_chosen + widened
    if run.loss_head == "trl-fused" and not dtypes.backend.has_triton:
        return _FOLDED_FORWARD_PASSES + _FOLDED_BACKWARD_PASSES
    return LOSS_HEADS[run.loss_head].passes


def forward_share(run: RunConfig, method: Method) -> float:
    """Of a micro-step, the first forward; recomputing and the backward are the others.

    A backward has one product for each of the forward, two where the weights are trained.

    Kind: estimate. Source: `training_work`; the head is not recomputed.
    """
    return 1 / ((3 if method.trains_base else 2) + bool(run.gradient_checkpointing))


def evaluation_work(
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    batch_size: Count,
    seq_len: Count,
    r: Count,
    logits_loss: LogitsLoss | None = None,
    update: Update,
    chip: Chip = UNKNOWN_CHIP,
) -> Work:
    """One forward with its loss and without a graph; every token is scored.

    What checkpointing adds to a step is one more forward of the layers; the head and the loss
    come on top. Kind: estimate.
    Source: transformers 5.23 `Trainer.evaluation_loop`.
    """
    again, once = (
        training_work(
            model,
            replace(
                run,
                gradient_checkpointing=checkpointed,
                use_reentrant=True,  # which repeats the whole forward
                gradient_accumulation_steps=1,
            ),
            dtypes,
            method,
            targets,
            batch_size=batch_size,
            seq_len=seq_len,
            r=r,
            update=update,
            chip=chip,
        )
        for checkpointed in (True, False)
    )
    tokens = batch_size * seq_len
    head, around = head_weights(model)
    vocab = num_logits(model)
    loss_passes = _forward_loss_passes(run, dtypes, logits_loss)
    scored = product_work(2 * tokens * (head + around), wide=_widens_head(dtypes))
    return Work(
        product_flops=again.product_flops - once.product_flops + scored.product_flops,
        wide_product_flops=again.wide_product_flops
        - once.wide_product_flops
        + scored.wide_product_flops,
        idle_flops=again.idle_flops - once.idle_flops,
        weight_read_bytes=again.weight_read_bytes
        - once.weight_read_bytes
        + head * dtypes.embedding_bytes,
        attention_flops=again.attention_flops - once.attention_flops,
        wide_attention_flops=again.wide_attention_flops - once.wide_attention_flops,
        attention_bytes=0 * tokens,
        elementwise_bytes=again.elementwise_bytes
        - once.elementwise_bytes
        + loss_passes * tokens * vocab,
        dequant_bytes=again.dequant_bytes - once.dequant_bytes,
        optimizer_bytes=0 * tokens,
        launches=again.launches - once.launches + outside_ops(model),
        host_launches=again.host_launches
        - once.host_launches
        - CHECKPOINT_CALL * sum(count for _, count in model.layers()),
    )


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
    method: Method,
    dtypes: Dtypes,
    *,
    rows: Count,
    r: Count,
) -> Work:
    """One forward of `rows` tokens through the adapter of one matrix of `count` layers."""
    params = method.adapter_params(linear, r)
    share = linear.active / linear.count  # of experts
    read = smallest(1.0, rows * share)
    flops = 2 * rows * share * params + adapter.weight_flops + rows * adapter.token_flops
    beside = Work(
        weight_read_bytes=count * read * params * dtypes.adapter_bytes,
        dequant_bytes=count * _expanded_again(linear, adapter, dtypes),
    )
    return Work.total((product_work(count * flops, wide=dtypes.widens_adapters), beside))


def _cache_work(
    attention: Attention,
    run: RunConfig,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    context: Count,
    decoding: bool,
    chip: Chip,
) -> Work:
    """What one pass reads, writes and converts of the cache of all sequences."""
    keys = attention.cache_elements * context
    # what attention reads, and how often; then what appending a token does
    read, passes, appending = keys, 1, 0
    waited: Real = 0
    if decoding:
        passes = read_passes(attention, dtypes, context)
        appending = 2 * (run.kv_cache == "dynamic")  # which is read and written whole
        if run.engine == TRANSFORMERS:  # vLLM's kernels split keys, and expand no latents
            if expands_cache(attention):
                read = (attention.k_width + attention.v_width) * context
            waited = waited_passes(
                attention,
                dtypes,
                batch_size=batch_size,
                context=context,
                num_multiprocessors=chip.num_multiprocessors,
            )
    moved = (read + attention.state_elements) * passes
    moved = moved + (keys + attention.state_elements) * appending
    states = batch_size * attention.recurrent_elements * 4  # in fp32
    converted = conversion(run, dtypes, decoding=decoding)
    appends = run.engine == TRANSFORMERS and bool(attention.cache_elements)
    return Work(
        attention_bytes=batch_size * (moved + keys * waited) * dtypes.compute_bytes,
        elementwise_bytes=batch_size * converted.element_bytes * keys
        + states * (STATE_PASSES if decoding else 1),
        launches=converted.launches + 2 * appends,  # keys and values
    )


def _served_idle_flops(layer: Layer, rows: Count, num_multiprocessors: int | None) -> Real:
    """`idle_flops` of the products of one layer's forward."""
    total = 0.0 * rows
    for linear, number in _by_shape(layer):
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
    run: RunConfig,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    context: Count,
    alone: bool,
    decoding: bool,
    chip: Chip,
) -> Work:
    """The attentions of one layer in a forward, and their caches; `alone`: of one query each."""
    attended = (
        _attention_flops(
            attention,
            dtypes,
            batch_size=batch_size,
            queries=1 if alone else context,
            keys=_num_keys(attention, context),
            triangular=not alone,
            forwards=1,
            backward=False,
        )
        for attention in layer.attentions
    )
    caches = (
        _cache_work(
            attention,
            run,
            dtypes,
            batch_size=batch_size,
            context=_num_keys(attention, context),
            decoding=decoding,
            chip=chip,
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
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    batch_size: Count,
    context: Count,
    decoding: bool,
    r: Count,
    chip: Chip,
) -> Work:
    """One forward through the equal layers of `group`. Kind: estimate. Source: `docs/time.md`."""
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
        further = _further_reading_flops(layer, batch_size, tokens)
        product_flops = product_flops + count * further
    elif run.engine == TRANSFORMERS:
        further = (batch_size * context - rows) * _expanding_weights(layer)
        product_flops = product_flops + count * 2 * further
    visited = visited_weights(layer, rows) - of_encoder * decoding
    weight_read = count * visited_bytes(layer, dtypes, rows)
    if of_encoder and decoding:
        weight_read = weight_read * visited / (visited + of_encoder)
    attention_flops = count * rows * scan_flops_per_token(layer, context, decoding=alone)
    attended = _served_attentions(
        group.layer,
        run,
        dtypes,
        batch_size=batch_size,
        context=context,
        alone=alone,
        decoding=decoding,
        chip=chip,
    )
    between = traffic.served_layer(
        group.layer,
        model,
        dtypes,
        method,
        targets,
        tokens=rows,
        span=context,
        r=r,
        alone=alone,
        chip=chip,
    )
    unpacked, expanded_read = forward_bytes(layer, dtypes, rows)
    dequant, weight_read = count * unpacked, weight_read + count * expanded_read
    kernels = between.kernels + _loop_kernels(group.layer, rows, 1 if alone else context)
    of_quants = forward_launches(layer, dtypes, rows)
    layers = Work(
        product_flops=product_flops,
        idle_flops=count * _served_idle_flops(layer, rows, chip.num_multiprocessors),
        weight_read_bytes=weight_read,
        attention_flops=attention_flops,
        elementwise_bytes=count * (between.moved + recast_bytes(layer, dtypes, rows)[0]),
        dequant_bytes=dequant,
        launches=count * (kernels + of_quants.kernels),
        autograd_launches=count * grouped_ops(layer, dtypes, rows),  # which C++ launches, too
        host_launches=count * of_quants.host,
    )
    of_adapters = (
        _served_adapter(linear, adapter, count, method, dtypes, rows=rows, r=r)
        for linear, adapter in _adapter_works(layer, dtypes, method, targets, r)
    )
    works = (layers, attended.times(count), _widened(layer, dtypes, count * rows, of_encoder))
    return _unpacked(Work.total((*works, *of_adapters)), dtypes, chip)


def _widened(layer: Layer, dtypes: Dtypes, rows: Count, of_encoder: int) -> Work:
    """Products with 4-bit weights that are in fp32 in a run of 16 bit, but of an encoder's."""
    weights_read = max(0, wide_weights(layer, dtypes) - of_encoder) * dtypes.widens_four_bit
    flops = 2 * rows * weights_read
    return Work(product_flops=-flops, wide_product_flops=flops)


def inference_work(
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    *,
    batch_size: Count,
    context: Count,
    decoding: bool,
    method: Method = NO_ADAPTERS,
    targets: tuple[str, ...] = (),
    r: Count = 0,
    chip: Chip = UNKNOWN_CHIP,
) -> Work:
    """One forward: the prompt pass over `context` tokens, or one decoding step that sees them.

    Each adapter that is not merged (of the matrices named in `targets`) does in every forward what
    it does in one of training: PEFT caches nothing of DoRA's norms between tokens.

    The head sees the last position only, that of an encoder or of rewards every one. Of two stacks
    the first reads the prompt, and the second begins with one token.

    Kind: estimate. Source: `docs/time.md`.
    """
    tokens = batch_size if decoding else batch_size * context
    head, around = head_weights(model)
    vocab = num_logits(model)
    scores_all = dtypes.libraries.scores_whole_prompt or model.scores_prompt
    scores_all = scores_all or not model.can_generate
    scored = tokens if scores_all else batch_size
    if model.task == "encoder":
        head = head + around
    around_flops = 0 * tokens  # of further states, whose product every token has
    if model.streams is not None:
        around_flops = 2 * tokens * around
    layers = Work.total(
        served_layers(
            group,
            model,
            run,
            dtypes,
            method,
            targets,
            batch_size=batch_size,
            context=context,
            decoding=decoding,
            r=r,
            chip=chip,
        )
        for group in model.groups
        if not (decoding and model.task == "seq2seq-lm" and group.stack == "encoder")
    )
    launches = layers.launches + outside_ops(model) + 0 * tokens
    serving = run.engine == "vllm"
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
