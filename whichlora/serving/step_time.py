"""Seconds of one step of a serving engine: some sequences decode, some tokens of prompts are read.

An engine joins the matrices that read one input, and the small operators between them; it captures
a step as one CUDA graph. So a step is a sum over kernels, each with a time of its own and the
slower of its arithmetic and its memory, plus what the host does between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from whichlora.memory.weights import linear_bytes
from whichlora.serving.base import Served, Start, Stepping
from whichlora.serving.block_groups import cached_of
from whichlora.serving.expert_ranks import ExpertRanks
from whichlora.serving.indexers import (
    SCORE_BYTES,
    attended_elements,
    index_key_bytes,
)
from whichlora.serving.kernel_rates import (
    EXPERTS_DEVIATION,
    MOST_ACTIVATIONS,
    NARROWED,
    POINTWISE_READS,
    UNPACKING_S,
    CodeBlocks,
    KernelRates,
    kernel_rates,
)
from whichlora.serving.rank import has_latents, latent_width, rank_model
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import fused_rows, is_quantised
from whichlora.spec.float_blocks import FLOAT_BLOCKS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Attention, Layer, Linear, Moe
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.spec.targets import adapted
from whichlora.timing.expansion import unpacking_time
from whichlora.timing.model import chip_of, product_rate, tiled_multiprocessors
from whichlora.timing.products import idle_flops

if TYPE_CHECKING:
    from whichlora.serving.draft_time import DraftingTimer
    from whichlora.serving.hosted_time import HostedTimer
    from whichlora.serving.pipeline_time import PipelineTimer

# Compute capability of the first units that multiply what is stored so.
NARROW_UNITS = {"fp8": 8.9, "mxfp4": 10.0} | {
    name: blocks.units for name, blocks in FLOAT_BLOCKS.items() if blocks.units is not None
}
PARTS = ("products", "attention", "elementwise", "kernels", "communication", "engine")
# Bytes per logit while a token is chosen: 16 bit, widened, and read again as probabilities.
SAMPLED_LOGIT_BYTES = 12
# Rows of each expert are filled up to tiles of so many. Source: vLLM 0.24.0 fused_moe.py
# `get_default_config`, its tuned configs.
EXPERT_TILES = (16, 128)
# All-reduce of few bytes by the engine's own kernel, over NVLink; NCCL's latency is three times it.
# Source: `vLLM_custom_graph` of the tables of `kernel_rates`: 4 to 8 µs for 16 KiB.
OWN_ALL_REDUCE_S = 5e-6


class Step(NamedTuple):
    """What one step does; a scheduler makes thousands of them.

    Args:
        decoding: sequences that get one more token; `cached_tokens` that they attend to, in all.
        sampled: sequences whose next token is chosen.
        prompt_tokens: of prompts; `prompt_pairs` of queries and keys among and before them.
    """

    decoding: int
    cached_tokens: float
    sampled: int
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    """What of a model one device computes.

    Args:
        layers: of each group of equal ones, how many have attention and small operators there.
        linears: of each group, of how many layers it has a matrix; a share where one is divided.
        scores: whether it has the head.
    """

    layers: tuple[int, ...]
    linears: tuple[Mapping[Linear, float], ...]
    scores: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Matrices that read one input, in `count` layers, as one kernel; of a file some have a part.

    Args:
        num_bytes: of one of them that is stored, all experts included.
        shapes: (inputs, outputs) of each.
        experts, active: how many there are, and how many a token passes through in the mean.
        tokens: that pass it for each token of the rank: those of all ranks with own sequences.
        spread: as `ExpertRanks.spread`.
        kernel_s: beside its work.
        reads: share of the bandwidth; `rate` of FLOP/s that it reaches.
        is_unpacked: whether its kernel unpacks stored codes.
        row_s: of each row, what narrows its inputs; of experts, what is between their products.
        expert_rows: as of `Stepping`, and `code_blocks`.
        expanded_bytes: written and read where more than `fused_rows` rows pass it, for which its
            stored codes are expanded first; unpacking: as of `unpacking_time`.
    """

    count: float
    num_bytes: float
    shapes: tuple[tuple[int, int], ...]
    experts: int
    active: float
    kernel_s: float
    reads: float
    rate: float
    is_unpacked: bool = False
    row_s: float = 0.0
    expert_rows: int | None = None
    code_blocks: CodeBlocks | None = None
    tokens: int = 1
    spread: float = 0.0
    expanded_bytes: float = 0.0
    unpacking: float = 1.0
    fused_rows: int = 0

    def visited(self, tokens: float) -> float:
        """Experts that at least one of `tokens` chose, each by chance; 1 of other matrices."""
        if self.experts == 1:
            return 1.0
        missed: float = (1 - self.active / self.experts) ** tokens
        return self.experts * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The attentions of all layers that have one window.

    Args:
        window: tokens that a query sees, None for all.
        num_heads: of queries, in one layer.
        cached_s: seconds for each token that decoding sequences attend to, in all these layers.
        decoding_s, prompt_s: for each decoding sequence, and each token of a prompt.
        pair_s: for each query and key of a prompt.
    """

    window: int | None
    num_heads: int
    cached_s: float
    decoding_s: float
    prompt_s: float
    pair_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimer:
    """Times the steps of one model on one engine and GPU.

    Args:
        num_attentions: in all layers.
        head: None where another stage of a pipeline has it.
        pointwise: bytes per token between products, and kernels; `reduced_bytes` of a token that
            ranks add up, `num_reductions` times, and that ranks with own sequences exchange,
            `num_exchanges` times.
        reduction_s: seconds of one all-reduce of so many bytes.
        exchange_s: seconds of one exchange of the states of all ranks, by bytes of one of them.
        few_rate: FLOP/s of products of at most `KernelRates.few_rows` rows.
        launches_s: what the host takes to launch a step that no graph captures.
        deviation: of the log of a step's time.
        queries: tokens of a decoding sequence in a step, drafts among them.
        samples_all: the next token of each of them is chosen, not of the last one alone.
    """

    products: tuple[_Product, ...]
    attentions: tuple[_Attention, ...]
    num_attentions: int
    head: _Product | None
    vocab_size: int
    pointwise_bytes: float
    pointwise_kernels: int
    reduced_bytes: int
    num_reductions: int
    reduction_s: Callable[[float], float]
    num_exchanges: int
    exchange_s: Callable[[float], float]
    rates: KernelRates
    bandwidth: float
    few_rate: float
    num_multiprocessors: int | None
    stepping: Stepping
    launches_s: float
    deviation: float
    queries: int = 1
    samples_all: bool = True
    _by_tokens: dict[int, tuple[float, float, float, float, int]] = field(
        default_factory=dict, init=False, repr=False
    )
    _by_sampled: dict[int, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by `PARTS`, which add up to it.

        Kind: estimate. Source: `kernel_rates`.
        """
        return dict(zip(PARTS, self._seconds(step), strict=True))

    def seconds(self, step: Step) -> float:
        """Of `step`."""
        return sum(self._seconds(step))

    def _seconds(self, step: Step) -> tuple[float, float, float, float, float, float]:
        decoding, cached_tokens, sampled, prompt_tokens, prompt_pairs = step
        tokens = self.queries * decoding + prompt_tokens
        if tokens not in self._by_tokens:
            self._by_tokens[tokens] = self._of_tokens(tokens)
        kernels, products, moved, communication, passes = self._by_tokens[tokens]
        chosen = sampled + (self.queries - 1) * decoding * self.samples_all
        if chosen not in self._by_sampled:
            self._by_sampled[chosen] = self._of_sampled(chosen)
        head, moved_logits = self._by_sampled[chosen]
        rates, attention = self.rates, 0.0
        if decoding:
            kernels += passes * self.num_attentions * rates.attention_s
            for same in self.attentions:
                cached = cached_tokens
                if same.window is not None:
                    cached = min(cached, decoding * same.window)
                if same.window == 1:  # a state, which each token reads and writes
                    cached *= self.queries
                attention += cached * same.cached_s + self.queries * decoding * same.decoding_s
        if prompt_tokens:
            kernels += passes * self.num_attentions * rates.prefill_attention_s
            for same in self.attentions:
                pairs = prompt_pairs
                if same.window is not None:
                    pairs = min(pairs, prompt_tokens * same.window)
                attention += pairs * same.pair_s / self._filled(same.num_heads, prompt_tokens)
                attention += prompt_tokens * same.prompt_s
        products, elementwise = products + head, moved + moved_logits
        stepping = self.stepping
        planning = stepping.step_s + stepping.sequence_s * sampled
        beside = stepping.copied_token_s * cached_tokens
        if tokens > stepping.captured_tokens:
            beside += self.launches_s
        if stepping.plans_ahead:  # while the step before it runs
            planning, beside = 0.0, planning + beside
        busy = products + attention + elementwise + kernels + communication
        engine = planning + max(0.0, beside - busy)
        return products, attention, elementwise, kernels, communication, engine

    def weight_bytes(self, tokens: float) -> float:
        """Bytes of matrices that a pass of `tokens` reads, the head left out. Kind: estimate."""
        return sum(
            each.count * each.visited(tokens) / each.experts * each.num_bytes
            for each in self.products
        )

    def cached_bytes(self, tokens: float) -> float:
        """Bytes of keys and values, and of states, that `tokens` attend to. Kind: estimate."""
        bytes_per_s = self.rates.cache * self.bandwidth
        return bytes_per_s * sum(
            each.cached_s * (tokens if each.window is None else min(tokens, each.window))
            for each in self.attentions
        )

    def _filled(self, num_heads: int, prompt_tokens: int) -> float:
        """Share of the multiprocessors that a prompt's attention keeps busy to its end.

        Kind: estimate: blocks take turns, one on each. Source: as of `timing.products.idle_flops`.
        """
        tile, multiprocessors = self.stepping.query_tile, self.num_multiprocessors
        if tile is None or multiprocessors is None:
            return 1.0
        blocks = num_heads * math.ceil(prompt_tokens / tile)
        return blocks / (multiprocessors * math.ceil(blocks / multiprocessors))

    def _of_tokens(self, tokens: int) -> tuple[float, float, float, float, int]:
        """Of all layers: kernels' own times, products, small operators, sums of ranks; passes."""
        passes = math.ceil(tokens / (self.stepping.graph_tokens or tokens or 1))
        each = [self._product(product, tokens / max(1, passes)) for product in self.products]
        kernels = passes * sum(kernel_s for kernel_s, _ in each)
        kernels += passes * self.pointwise_kernels * self.rates.pointwise_s
        return (
            kernels + (self.head.kernel_s if self.head else 0.0),
            passes * sum(work_s for _, work_s in each),
            tokens * self.pointwise_bytes / (POINTWISE_READS * self.bandwidth),
            self.num_reductions * self.reduction_s(tokens * self.reduced_bytes)
            + self.num_exchanges * self.exchange_s(tokens * self.reduced_bytes),
            passes,
        )

    def _of_sampled(self, sampled: int) -> tuple[float, float]:
        """Of the head and of choosing tokens."""
        if self.head is None:
            return 0.0, 0.0
        _, work_s = self._product(self.head, max(1, sampled))
        moved = sampled * self.vocab_size * SAMPLED_LOGIT_BYTES
        return work_s, moved / (POINTWISE_READS * self.bandwidth)

    def _idle(self, rows: float, outputs: int, inputs: int, experts: int) -> float:
        """FLOPs of tiles that are not full: of experts half a tile of each, in the mean."""
        if experts == 1 or self.num_multiprocessors is None:
            return float(idle_flops(rows, outputs, inputs, self.num_multiprocessors))
        least, most = EXPERT_TILES
        tile = min(most, max(least, 2 ** math.ceil(math.log2(rows))))
        return float(tile * outputs * inputs)

    def _product(self, product: _Product, tokens: float) -> tuple[float, float]:
        tokens *= product.tokens
        if tokens and product.spread:
            tokens += product.spread * math.sqrt(tokens)
        rows, visited = tokens, product.visited(tokens)
        if product.experts > 1:
            rows = tokens * product.active / visited
        rate = product.rate
        if rows <= self.rates.few_rows:
            rate, rows = self.few_rate, max(0.0, rows - 1)
        flops = 0.0
        for inputs, outputs in product.shapes:
            idle = self._idle(rows if rows >= 1 else 1.0, outputs, inputs, product.experts)
            flops += visited * (2 * rows * inputs * outputs + idle)
        arithmetic = flops / rate
        reads = visited / product.experts * product.num_bytes
        reads_s = reads / (product.reads * self.bandwidth)
        work = max(arithmetic, reads_s) if self.rates.overlaps else arithmetic + reads_s
        blocks, multiprocessors = product.code_blocks, self.num_multiprocessors
        if blocks is not None and multiprocessors is not None and rows < blocks.expanded_rows:
            inputs, outputs = product.shapes[0][0], sum(shape[1] for shape in product.shapes)
            each = tokens * product.active / visited
            in_blocks = visited * blocks.seconds(each, inputs, outputs, multiprocessors)
            work = in_blocks if product.is_unpacked else max(work, in_blocks)
        work += tokens * product.row_s
        if product.expanded_bytes and tokens > product.fused_rows:
            # half is written by the kernel that reads what is stored, as it was counted above
            written = product.expanded_bytes / 2
            slower = (product.unpacking - 1) * (written + product.num_bytes)
            work += (product.expanded_bytes + slower) / (POINTWISE_READS * self.bandwidth)
        kernel_s = product.kernel_s
        if product.expert_rows is not None:
            kernels = product.experts * math.ceil(tokens / product.expert_rows)
            kernel_s = kernels * self.rates.pointwise_s
        return product.count * kernel_s, product.count * work


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine that serves a model, whatever is asked of it.

    Args:
        starts: for other loads, by what of a load they depend on.
        timers: of its steps, by how it steps.
    """

    start: Start
    starts: dict[Hashable, Start] = field(default_factory=dict)
    timers: dict[Stepping, StepTimer | PipelineTimer | HostedTimer | DraftingTimer] = field(
        default_factory=dict
    )


def _joined(linears: Sequence[Linear], joins: bool = True) -> Iterator[tuple[Linear, ...]]:
    """Those that read one input, which most engines keep as one matrix; else each alone."""
    if not joins:
        return ((linear,) for linear in linears)
    groups: dict[tuple[str, int, int], list[Linear]] = {}
    for linear in linears:
        groups.setdefault((linear.reads, linear.count, linear.active), []).append(linear)
    return (tuple(group) for group in groups.values())


def _gathering(layer: Layer) -> tuple[Linear, ...]:
    """Matrices that see tokens of all copies where `ExpertRanks.gathers_all`: MLPs."""
    mlps = (layer.mlp, None if layer.moe is None else layer.moe.shared)
    return tuple(linear for mlp in mlps if mlp is not None for linear in mlp.linears)


def step_timer(
    served: Served,
    *,
    stepping: Stepping,
    reduction_s: Callable[[float], float],
    exchange_s: Callable[[float], float] = float,
    part: ModelPart | None = None,
) -> StepTimer:
    """The timer of `served` on one of the engine's equal GPUs.

    Args:
        reduction_s: seconds of an all-reduce among them, by bytes.
        exchange_s: as of `StepTimer`; not called where all have the same sequences.
        part: what of the model it has; None for all.
    """
    model, gpu = rank_model(served.model, stepping.ranks, stepping.experts), served.gpu
    rates = stepping.rates(gpu, compute_dtype(served)) if stepping.rates else kernel_rates(gpu)
    products = []
    moved, pointwise, reductions, exchanges = 0.0, 0, 0, 0
    gathered = stepping.experts.gathered if stepping.experts else 1
    for place, (layer, all_layers) in enumerate(model.layers()):
        count = part.layers[place] if part else all_layers
        for group in _joined(layer.linears, stepping.joins):
            held = part.linears[place].get(group[0], 0.0) if part else count
            product = _product_of(group, held, served, rates, stepping)
            if layer.moe is not None and product.experts > 1:
                product = _of_experts(product, group[0], layer.moe, served, rates, stepping)
            elif group[0] in _gathering(layer):
                product = replace(product, tokens=gathered)
            elif stepping.wide_routers and layer.moe is not None and group[0] == layer.moe.router:
                product = _widened(product, gpu, rates)
            products.append(product)
        products += list(_adapter_products(layer, count, served, rates))
        moved += count * _pointwise_bytes(layer, model, served.dtypes.compute_bytes)
        pointwise += count * _pointwise_kernels(layer, stepping.indexer_kernels)
        blocks = len(layer.attentions) + (layer.mlp is not None) + (layer.moe is not None)
        reductions += count * blocks * (stepping.ranks > 1)
        around = layer.moe is not None or (gathered > 1 and layer.mlp is not None)
        exchanges += count * around * (stepping.copies > 1)
    head = _head(model, served, rates, stepping) if part is None or part.scores else None
    kernels = sum(product.count for product in products) + pointwise
    codes = sum(product.count for product in products if product.is_unpacked)
    counts = part.layers if part else tuple(count for _, count in model.layers())
    attending = [(layer, count) for (layer, _), count in zip(model.layers(), counts, strict=True)]
    num_attentions = sum(count * len(layer.attentions) for layer, count in attending)
    return StepTimer(
        products=tuple(products),
        attentions=_attentions(attending, served, rates, stepping),
        num_attentions=num_attentions,
        head=head,
        vocab_size=model.vocab_size,
        pointwise_bytes=moved,
        pointwise_kernels=pointwise,
        reduced_bytes=model.hidden_size * served.dtypes.compute_bytes,
        num_reductions=reductions,
        reduction_s=reduction_s,
        num_exchanges=exchanges,
        exchange_s=exchange_s,
        rates=rates,
        bandwidth=gpu.bandwidth_bytes_per_s,
        few_rate=rates.few_products * product_rate(gpu, "fp32"),
        num_multiprocessors=tiled_multiprocessors(gpu, compute_dtype(served))
        if rates.overlaps
        else None,
        stepping=stepping,
        launches_s=(kernels + num_attentions) * stepping.launch_s + codes * stepping.code_launch_s,
        deviation=max(rates.deviation, EXPERTS_DEVIATION if model.has_experts else 0.0),
    )


def _attentions(
    layers: Sequence[tuple[Layer, int]], served: Served, rates: KernelRates, stepping: Stepping
) -> tuple[_Attention, ...]:
    """Those of one window together: a decoding step reads keys, a prompt is arithmetic.

    Args:
        layers: with the number of times that there are such.

    Kind: estimate. Source: `kernel_rates`.
    """
    bandwidth = served.gpu.bandwidth_bytes_per_s
    flops_per_s = rates.attention * product_rate(served.gpu, compute_dtype(served))
    heads_s = 0.0
    if stepping.head_reads is not None:
        heads_s = 2 / (stepping.head_reads * product_rate(served.gpu, "fp32"))
    sums: dict[int | None, tuple[float, int]] = {}
    heads: dict[int | None, int] = {}
    others = []
    for layer, count in layers:
        for attention in layer.attentions if count else ():
            if attention.kind != "softmax":
                others.append(_state(attention, count, served, rates, stepping))
                continue
            if index_key_bytes(attention):
                others.append(_indexer(attention, count, served, rates))
            window = _window(attention)
            cached, queries = sums.get(window, (0.0, 0))
            width = attention.num_attention_heads * (attention.head_dim + attention.v_head_dim)
            cached_bytes = attended_elements(attention) * stepping.cache_bytes
            if has_latents(attention):  # each head reads a latent as its key and as its value
                flops = 2 * attention.num_attention_heads * latent_width(attention)
                cached_bytes = max(cached_bytes, flops / flops_per_s * rates.cache * bandwidth)
            if attention.sparse is not None:  # its prompts, too, read latents, and expand none
                width = attention.num_attention_heads * latent_width(attention)
            cached += count * cached_bytes
            sums[window] = cached, queries + count * width
            heads[window] = attention.num_attention_heads
    softmax = (
        _Attention(
            window=window,
            num_heads=heads[window],
            cached_s=max(cached / rates.cache / bandwidth, heads_s * queries),
            decoding_s=queries * served.dtypes.compute_bytes * rates.query_passes / bandwidth,
            prompt_s=queries * served.dtypes.compute_bytes / bandwidth,
            pair_s=2 * queries / flops_per_s,
        )
        for window, (cached, queries) in sums.items()
    )
    return (*softmax, *others)


def _window(attention: Attention) -> int | None:
    """Tokens that a query sees at most: what slides, or what an indexer chooses."""
    sparse = attention.sparse
    return attention.sliding_window if sparse is None else sparse.top_k


def _indexer(attention: Attention, count: int, served: Served, rates: KernelRates) -> _Attention:
    """Scores of all keys of a sequence in 8 bits, and the choice of the best; whole on each rank.

    Kind: estimate: prompts no longer than what is chosen are scored, too, which engines may leave
    out. Source: vLLM 0.33.0 layers/sparse_attn_indexer.py; `indexers.SCORE_BYTES`.
    """
    sparse = attention.sparse
    assert sparse is not None
    bandwidth = served.gpu.bandwidth_bytes_per_s
    flops_per_s = rates.attention * product_rate(served.gpu, compute_dtype(served))
    if _has_units("fp8", served.gpu):
        flops_per_s *= 2
    flops = 2 * sparse.num_heads * (sparse.head_dim + 1)
    scores_s = SCORE_BYTES / (POINTWISE_READS * bandwidth)
    keys_s = index_key_bytes(attention) / rates.cache / bandwidth
    return _Attention(
        window=None,
        num_heads=sparse.num_heads,
        cached_s=count * (max(keys_s, flops / flops_per_s) + scores_s),
        decoding_s=0.0,
        prompt_s=0.0,
        pair_s=count * (flops / flops_per_s + scores_s),
    )


def _state(
    attention: Attention, count: int, served: Served, rates: KernelRates, stepping: Stepping
) -> _Attention:
    """A state that each token reads and writes, as a window of one token; prompts take chunks.

    Kind: estimate: by the arithmetic of chunks. Source: Yang et al. 2024, arXiv:2412.06464,
    section 3.3; Dao and Gu 2024, arXiv:2405.21060, section 6; fla's chunks of 64 tokens.
    """
    bandwidth, element_bytes = served.gpu.bandwidth_bytes_per_s, served.dtypes.compute_bytes
    flops_per_s = rates.attention * product_rate(served.gpu, compute_dtype(served))
    heads, keys, values = attention.num_attention_heads, attention.head_dim, attention.v_head_dim
    moved = count * (heads * (keys + values) + attention.conv_channels) * element_bytes
    within, between = (
        (3 * keys + 2 * values, 3) if attention.kind == "linear" else (keys + values, 2)
    )
    flops = 2 * heads * (attention.chunk_size * within + between * keys * values)
    token_s = 0.0
    if attention.kind == "linear" and stepping.delta_token_s is not None:
        flops, token_s = 0, stepping.delta_token_s
    kind = cached_of(attention)
    state_bytes = stepping.state_bytes(kind) if stepping.state_bytes else 0
    state_bytes = state_bytes or kind.state_bytes(element_bytes)
    turns = 2 * stepping.state_passes
    return _Attention(
        window=1,
        num_heads=heads,
        cached_s=turns * count * state_bytes / rates.cache / bandwidth,
        decoding_s=moved * rates.query_passes / bandwidth,
        prompt_s=moved / bandwidth + count * token_s,
        pair_s=count * flops * (attention.kind != "conv") / flops_per_s,
    )


def compute_dtype(served: Served) -> str:
    """In which products are computed that have no weights in blocks."""
    return served.dtypes.half if served.dtypes.compute_bytes == 2 else "fp32"


def _product_of(
    group: Sequence[Linear], count: float, served: Served, rates: KernelRates, stepping: Stepping
) -> _Product:
    """`group` as one kernel, in the storage of its weights."""
    first = group[0]
    kernel_s, reads = rates.product_s, rates.reads
    rate = rates.products * product_rate(served.gpu, compute_dtype(served))
    is_unpacked, row_s, blocks = False, 0.0, None
    if is_quantised(first, served.dtypes):
        is_unpacked = not _has_units(served.dtypes.quant, served.gpu)
        blocks = stepping.code_blocks if is_unpacked else stepping.narrow_blocks
        if is_unpacked:
            kernel_s, rate = kernel_s + UNPACKING_S, stepping.code_products * rate
            if blocks is not None:  # it and what adds up its splits
                kernel_s = 2 * rates.pointwise_s
            reads *= stepping.zeroed_reads if served.dtypes.quant == "awq-int4" else 1.0
        else:
            narrowed = rates.fp4 if _is_fp4(served) else NARROWED
            peak = rates.products * _narrow_peak(served)
            kernel_s, rate = kernel_s + narrowed.own_s, narrowed.products * peak
            row_s = narrowed.input_s * first.in_features
    stored, expanded_bytes = stepping.weight_bytes, 0.0
    if is_quantised(first, served.dtypes) and served.dtypes.quant in FOUR_BIT_BNB:
        # bitsandbytes writes the matrix in 16 bit, and a product reads it
        width = 2 * served.dtypes.compute_bytes
        expanded_bytes = float(width * sum(each.num_params for each in group))
    return _Product(
        count=count,
        expanded_bytes=expanded_bytes,
        unpacking=unpacking_time(served.dtypes, chip_of(served.gpu, compute_dtype(served))),
        fused_rows=fused_rows(served.dtypes) if expanded_bytes else 0,
        num_bytes=float(
            sum(stored(each) if stored else linear_bytes(each, served.dtypes) for each in group)
        ),
        shapes=tuple((linear.in_features, linear.out_features) for linear in group),
        experts=first.count,
        active=first.active,
        kernel_s=kernel_s,
        reads=reads,
        rate=rate,
        is_unpacked=is_unpacked,
        row_s=row_s,
        code_blocks=blocks,
    )


def joined_product(linear: Linear, served: Served, stepping: Stepping) -> _Product:
    """`linear` of one layer, as a kernel of its own."""
    rates = kernel_rates(served.gpu)
    return _product_of((linear,), 1, served, rates, stepping)


def _of_experts(
    product: _Product,
    linear: Linear,
    moe: Moe,
    served: Served,
    rates: KernelRates,
    stepping: Stepping,
) -> _Product:
    """`product` of experts: one of those that share their kernels' own time and activations.

    Kind: fitted. Source: `kernel_rates.ExpertRates`.
    """
    experts, peak = rates.experts, product_rate(served.gpu, compute_dtype(served))
    if product.is_unpacked:
        experts = rates.code_experts
    elif is_quantised(linear, served.dtypes):
        experts = rates.fp4_experts if _is_fp4(served) else rates.narrow_experts
        peak = _narrow_peak(served)
    bandwidth = served.gpu.bandwidth_bytes_per_s
    multiprocessors = served.gpu.num_multiprocessors or math.inf
    activations = min(MOST_ACTIVATIONS * bandwidth, multiprocessors * experts.activations)
    reads = min(experts.reads, multiprocessors * (experts.most_reads or math.inf) / bandwidth)
    share = 1 / len(tuple(_joined(moe.expert.linears, stepping.joins)))
    ranks = stepping.experts or ExpertRanks()
    held = ranks.held(moe.num_experts) / (moe.num_experts + ranks.redundant)
    moved = held + stepping.elsewhere * experts.elsewhere * (1 - held)
    return replace(
        product,
        active=held * product.active,
        tokens=ranks.copies,
        spread=ranks.spread(linear.active),
        kernel_s=share * experts.own_s,
        reads=reads,
        rate=experts.products * peak,
        row_s=share * moved * _activation_bytes(moe, served) / activations,
        expert_rows=stepping.expert_rows if product.is_unpacked else None,
        code_blocks=product.code_blocks if product.is_unpacked else None,
    )


def _widened(product: _Product, gpu: GpuSpec, rates: KernelRates) -> _Product:
    """`product` in fp32, without the units of tf32, which torch leaves off."""
    rate = rates.products * product_rate(gpu, "fp32")
    return replace(product, num_bytes=2 * product.num_bytes, rate=rate)


def _activation_bytes(moe: Moe, served: Served) -> float:
    """Bytes per token that pass between the products of the experts it chose."""
    return float(
        moe.experts_per_token
        * (2 * served.model.hidden_size + 3 * moe.expert.width)
        * served.dtypes.compute_bytes
    )


def _is_fp4(served: Served) -> bool:
    """Whether products are of 4-bit floats on both sides, where the GPU has units for them."""
    blocks = FLOAT_BLOCKS.get(served.dtypes.quant)
    return blocks is not None and blocks.bits == 4


def _narrow_peak(served: Served) -> float:
    """FLOP/s of products in what is stored, inputs narrowed; twice that of 16 bit for 8 bits.

    Kind: exact where the datasheet states `fp4`. Source: NVIDIA's datasheets, whose dense figures
    of data-centre cards double with each half of the bits; consumer cards multiply 16 and 8 bit at
    half the rate where they add up in fp32, and 4 bit at the whole one.
    """
    rate = product_rate(served.gpu, compute_dtype(served))
    if not _is_fp4(served):
        return 2 * rate
    return served.gpu.peak_flops_per_s.get("fp4", FLOAT_BLOCKS[served.dtypes.quant].rate * rate)


def _has_units(quant: str, gpu: GpuSpec) -> bool:
    """Whether `gpu` multiplies what is stored, its inputs narrowed to the same, or to 8 bits."""
    return float(gpu.compute_capability or 0) >= NARROW_UNITS.get(quant, math.inf)


def _adapter_products(
    layer: Layer, count: int, served: Served, rates: KernelRates
) -> Iterator[_Product]:
    """Both factors of unmerged adapters: two kernels for each joined matrix.

    Source: vLLM 0.33.0 lora/ops/triton_ops/lora_shrink_op.py, lora_expand_op.py.
    """
    r, width = served.run.r, served.dtypes.compute_bytes
    rate = rates.products * product_rate(served.gpu, compute_dtype(served))
    for group in _joined(adapted(layer, served.targets)):
        first = group[0]
        for shapes in (
            [(linear.in_features, r) for linear in group],
            [(r, linear.out_features) for linear in group],
        ):
            yield _Product(
                count=count,
                num_bytes=float(first.count * width * sum(a * b for a, b in shapes)),
                shapes=tuple(shapes),
                experts=first.count,
                active=first.active,
                kernel_s=rates.product_s,
                reads=rates.reads,
                rate=rate,
            )


def _head(
    model: ModelSpec, served: Served, rates: KernelRates, stepping: Stepping
) -> _Product | None:
    width, stored = served.dtypes.embedding_bytes, stepping.weight_bytes
    head = model.head
    if head is None:  # which the last stage of a pipeline has
        return None
    return _Product(
        count=1,
        num_bytes=stored(None) if stored else float(head.num_weights * width),
        shapes=((head.in_features, head.out_features),),
        experts=1,
        active=1,
        kernel_s=rates.product_s,
        reads=rates.reads,
        rate=rates.products * product_rate(served.gpu, compute_dtype(served)),
        tokens=stepping.experts.gathered if stepping.experts else 1,
    )


def _pointwise_bytes(layer: Layer, model: ModelSpec, width: int) -> float:
    """Bytes per token that a layer's joined small operators read and write.

    A norm reads its input and the residual and writes both; the gate reads two halves and writes
    one; rotation reads and writes queries and keys, whose keys and values then go to the cache.

    Kind: estimate. Source: vLLM 0.33.0 csrc/layernorm_kernels.cu, activation_kernels.cu,
    pos_encoding_kernels.cu, cache_kernels.cu.
    """
    moved = 4.0 * model.hidden_size * len(layer.norms)
    moved += sum(2.0 * norm.width * norm.rows for norm in layer.inner_norms)
    for attention in layer.attentions:
        moved += 2 * (attention.q_width + attention.k_width)
        moved += 2 * (attention.k_width + attention.v_width)
    if layer.mlp is not None:
        moved += (3 if layer.mlp.gated else 2) * layer.mlp.width
    if layer.moe is not None:
        moved += 3 * layer.moe.shared.width if layer.moe.shared is not None else 0
    return moved * width


def _pointwise_kernels(layer: Layer, indexer_kernels: int) -> int:
    """Kernels of a layer beside products and attention, joined as vLLM's are.

    Kind: estimate. Source: as of `_pointwise_bytes`; of experts only their routing, the rest is
    their own (`_of_experts`).
    """
    kernels = len(layer.norms) + len(layer.inner_norms)
    kernels += 2 * len(layer.attentions) + (layer.mlp is not None)
    kernels += indexer_kernels * sum(index_key_bytes(each) > 0 for each in layer.attentions)
    if layer.moe is not None:
        kernels += 1 + (layer.moe.shared is not None)
    return kernels


def own_all_reduce(bandwidth_bytes_per_s: float, ranks: int) -> Callable[[float], float]:
    """Seconds of an all-reduce by the engine's own kernel, by bytes.

    Kind: estimate. Source: `OWN_ALL_REDUCE_S`; a ring's bytes, nccl-tests `doc/PERFORMANCE.md`.
    """
    if ranks == 1:
        return lambda num_bytes: 0.0
    share = 2 * (ranks - 1) / ranks / bandwidth_bytes_per_s
    return lambda num_bytes: OWN_ALL_REDUCE_S + share * num_bytes
