"""What one step does: floating-point operations, bytes moved, kernels launched.

Counts only; `timing.model` turns them into seconds. Here is what training, the prompt pass and
decoding share; `timing.training_work` and `timing.serving_work` put it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add, attrgetter

from whichlora.memory import weights
from whichlora.memory.embeddings import ENCODER_OUT
from whichlora.methods.base import AdapterWork
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised, runs_adapter
from whichlora.spec.layer import Attention, Layer, Linear
from whichlora.spec.numeric import Count, Real, ceil_div, floor_div, is_plain, smallest
from whichlora.spec.targets import adapted
from whichlora.symbolic.kernels import FUSED, Kernel, attention_kernel, is_masked
from whichlora.timing.chip import Chip
from whichlora.timing.expansion import (
    expansion_bytes,
    forward_bytes,
    unpacking_time,
    visited_matrices,
)
from whichlora.timing.mamba_work import scan_loop_ops
from whichlora.timing.running import RunningModel
from whichlora.timing.sparse_work import choosing_flops_per_pair, indexer_linears
from whichlora.timing.window_work import window_flops_per_token

# How long SDPA's memory-efficient kernel takes in 16 bit, where the flash kernel takes 1 for the
# same products. Kind: fitted: 1.9, 1.9 and 2.3 in trainings of padded batches on H100 and H200.
# Others measured 225 and 108 TFLOP/s of forwards on A100 (xformers issue 924, pull request 389).
EFFICIENT_TIME = 2
EXPERT_OPS = 8  # kernels of one expert's forward
# `torch.where` of one expert's mask, whether a token chose it or not: a sum, and two kernels that
# select; the host waits for the sum. What is run on no rows launches nothing.
LOOP_OPS = 3
# Kernels of the loop over chunks of a gated delta rule, for each chunk and beside them.
# Kind: exact. Source: traces of transformers 5.23 `torch_chunk_gated_delta_rule`.
CHUNK_OPS, CHUNKED_OPS = 9, 11
STATE_OPS = 8  # that project one further state, and bring it to a magnitude
BACKWARD_RATIO = 1.6  # kernels of a backward, of those of its forward: 60 of 38 of a Llama's layer
OUTSIDE_OPS = 22  # embedding, final norm, head, sampling


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


def num_keys(attention: Attention, length: Count) -> Count:
    """Keys of one sequence of `length` tokens: as many, or an encoder's whatever it has.

    Of blocks, those that a query sees.

    Kind: exact. Source: the architecture; `symbolic.block_attention`.
    """
    if attention.in_blocks:
        sums = floor_div(length, attention.summed_tokens) if attention.summed_tokens else 0
        return 3 * attention.chunk_size + sums + 0 * length
    return attention.memory_len or length


def further_reading_flops(layer: Layer, sequences: Count, tokens: Count) -> Count:
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


def attention_work(
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

    Kind: exact but for `EFFICIENT_TIME`. Source: `attention_flops_per_token`.
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
    """What an indexer does, which runs forward alone. Args as of `attention_work`.

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


def adapter_works(layer: Layer, running: RunningModel) -> list[tuple[Linear, AdapterWork]]:
    """The matrices of one layer whose adapters run, each with the work of its adapter."""
    method, dtypes = running.method, running.dtypes
    linears = () if method.trains_base else adapted(layer, running.targets)
    adapted_here = (linear for linear in linears if runs_adapter(linear, dtypes))
    return [(linear, method.work(linear, dtypes, running.r)) for linear in adapted_here]


def unpacked_work(layers: Work, dtypes: Dtypes, chip: Chip) -> Work:
    """`layers` with `dequant_bytes` as they are on this chip. Kind: estimate.

    Source: `unpacking_time`.
    """
    return replace(layers, dequant_bytes=layers.dequant_bytes * unpacking_time(dtypes, chip))


def loop_kernels(layer: Layer, tokens: Count, span: Count, *, backward: bool = False) -> Count:
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


def by_shape(layer: Layer) -> Iterable[tuple[Linear, int]]:
    """One matrix of each shape, and how many of the layer's have it."""
    shapes = [
        (linear.in_features, linear.out_features, linear.active, linear.count)
        for linear in layer.linears
    ]
    first = dict(zip(reversed(shapes), reversed(layer.linears), strict=True))
    return [(first[shape], number) for shape, number in Counter(shapes).items()]


def expanded_again(linear: Linear, adapter: AdapterWork, dtypes: Dtypes) -> Real:
    """Bytes that the adapter of one matrix moves in a forward to expand the matrix itself.

    Kind: exact. Source: `AdapterWork.expansions`, `expansion_bytes`.
    """
    if not adapter.expansions or not is_quantised(linear, dtypes):
        return 0
    read = dtypes.compute_bytes * linear.in_features * linear.out_features
    return adapter.expansions * linear.count * (expansion_bytes(linear, dtypes) + read)


def widens_head(dtypes: Dtypes) -> bool:
    """Whether the product of the head is computed in fp32 in a run of 16 bit."""
    return dtypes.widens_products and dtypes.head_bytes > dtypes.half_bytes
