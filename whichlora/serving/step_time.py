"""Seconds of one step of a serving engine: some sequences decode, some tokens of prompts are read.

An engine joins the matrices that read one input, and the small operators between them; it captures
a step as one CUDA graph. So a step is a sum over kernels, each with a time of its own and the
slower of its arithmetic and its memory, plus what the host does between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from whichlora.memory.weights import linear_bytes
from whichlora.serving.base import Served, Stepping
from whichlora.serving.kernel_rates import (
    EXPERTS_PRODUCTS,
    EXPERTS_S,
    NARROW_PRODUCTS,
    NARROWING_S,
    POINTWISE_READS,
    UNPACKING_PRODUCTS,
    UNPACKING_S,
    ZEROED_READS,
    KernelRates,
    kernel_rates,
)
from whichlora.serving.rank import rank_model
from whichlora.spec.architecture import Layer, Linear, ModelSpec
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.targets import adapted
from whichlora.timing.model import product_rate, tiled_multiprocessors
from whichlora.timing.products import idle_flops

# Compute capability of the first units that multiply what is stored so.
NARROW_UNITS = {"fp8": 8.9, "mxfp4": 10.0}
PARTS = ("products", "attention", "elementwise", "kernels", "communication", "engine")
# Bytes per logit while a token is chosen: 16 bit, widened, and read again as probabilities.
SAMPLED_LOGIT_BYTES = 12
# All-reduce of few bytes by the engine's own kernel, over NVLink; NCCL's latency is three times it.
# Source: `vLLM_custom_graph` of the tables of `kernel_rates`: 4 to 8 µs for 16 KiB.
OWN_ALL_REDUCE_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step does.

    Args:
        decoding: sequences that get one more token; `cached_tokens` that they attend to, in all.
        prompt_tokens: of prompts; `prompt_pairs` of queries and keys among and before them.
        sampled: sequences whose next token is chosen.
    """

    decoding: int
    cached_tokens: float
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    sampled: int

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Matrices that read one input, in `count` layers, as one kernel.

    Args:
        num_bytes: of one of them that is stored, all experts included.
        shapes: (inputs, outputs) of each.
        experts, active: how many there are, and how many a token passes through.
        kernel_s: beside its work.
        reads: share of the bandwidth; `rate` of FLOP/s that it reaches.
    """

    count: int
    num_bytes: float
    shapes: tuple[tuple[int, int], ...]
    experts: int
    active: int
    kernel_s: float
    reads: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Equal attentions of `count` layers.

    Args:
        token_bytes: of keys and values, one token in one layer.
        query_bytes: of queries and what they give, likewise.
        pair_flops: of one query and one key.
        window: tokens that a query sees, None for all.
    """

    count: int
    token_bytes: float
    query_bytes: int
    pair_flops: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimer:
    """Times the steps of one model on one engine and GPU.

    Args:
        pointwise: bytes per token between products, and kernels; `reduced_bytes` of a token that
            ranks add up, `num_reductions` times.
        reduction_s: seconds of one all-reduce of so many bytes.
        few_rate: FLOP/s of products of at most `KernelRates.few_rows` rows.
        num_launches: kernels of a step that no graph captures, which can wait for the host.
        deviation: of the log of a step's time.
    """

    products: tuple[_Product, ...]
    attentions: tuple[_Attention, ...]
    head: _Product
    vocab_size: int
    pointwise_bytes: float
    pointwise_kernels: int
    reduced_bytes: int
    num_reductions: int
    reduction_s: Callable[[float], float]
    rates: KernelRates
    bandwidth: float
    peak: float
    few_rate: float
    num_multiprocessors: int | None
    stepping: Stepping
    num_launches: int
    deviation: float
    _products: dict[float, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by `PARTS`, which add up to it.

        Kind: estimate. Source: `kernel_rates`.
        """
        passes = math.ceil(step.tokens / (self.stepping.graph_tokens or step.tokens or 1))
        kernels, products = (
            passes * each for each in self._layer_products(step.tokens / max(1, passes))
        )
        kernel_s, work_s = self._product(self.head, max(1, step.sampled))
        kernels, products = kernels + kernel_s, products + work_s
        attention = 0.0
        for same in self.attentions:
            kernel_s, work_s = self._attention(same, step)
            kernels, attention = kernels + passes * kernel_s, attention + work_s
        kernels += passes * self.pointwise_kernels * self.rates.pointwise_s
        moved = step.tokens * self.pointwise_bytes
        moved += step.sampled * self.vocab_size * SAMPLED_LOGIT_BYTES
        reduced = step.tokens * self.reduced_bytes
        parts = {
            "products": products,
            "attention": attention,
            "elementwise": moved / (POINTWISE_READS * self.bandwidth),
            "kernels": kernels,
            "communication": self.num_reductions * self.reduction_s(reduced),
        }
        waits = 0.0
        stepping = self.stepping
        if step.tokens > stepping.captured_tokens:
            waits = max(0.0, self.num_launches * stepping.launch_s - sum(parts.values()))
        parts["engine"] = stepping.step_s + stepping.sequence_s * step.sampled + waits
        return parts

    def seconds(self, step: Step) -> float:
        """Of `step`."""
        return sum(self.parts(step).values())

    def _layer_products(self, tokens: float) -> tuple[float, float]:
        """Of all layers: their own times, and their work; most steps have as many tokens."""
        if tokens not in self._products:
            of_each = [self._product(product, tokens) for product in self.products]
            self._products[tokens] = (
                sum(kernel_s for kernel_s, _ in of_each),
                sum(work_s for _, work_s in of_each),
            )
        return self._products[tokens]

    def _product(self, product: _Product, tokens: float) -> tuple[float, float]:
        rows, visited = tokens, 1.0
        if product.experts > 1:
            # experts that at least one token chose, each by chance
            missed = (1 - product.active / product.experts) ** tokens
            visited = product.experts * (1 - missed)
            rows = tokens * product.active / visited
        rate = product.rate
        if rows <= self.rates.few_rows:
            rate, rows = self.few_rate, max(0.0, rows - 1)
        flops = 0.0
        for inputs, outputs in product.shapes:
            idle = idle_flops(
                rows if rows >= 1 else 1.0, outputs, inputs, self.num_multiprocessors, count=1
            )
            flops += 2 * rows * inputs * outputs + idle
        arithmetic = visited * flops / rate
        reads = visited / product.experts * product.num_bytes
        reads_s = reads / (product.reads * self.bandwidth)
        work = max(arithmetic, reads_s) if self.rates.overlaps else arithmetic + reads_s
        return product.count * product.kernel_s, product.count * work

    def _attention(self, attention: _Attention, step: Step) -> tuple[float, float]:
        kernels = work = 0.0
        if step.decoding:
            cached = step.cached_tokens
            if attention.window is not None:
                cached = min(cached, step.decoding * attention.window)
            read = cached * attention.token_bytes / self.rates.cache
            read += step.decoding * attention.query_bytes * self.rates.query_passes
            kernels += self.rates.attention_s
            work += read / self.bandwidth
        if step.prompt_tokens:
            pairs = step.prompt_pairs
            if attention.window is not None:
                pairs = min(pairs, step.prompt_tokens * attention.window)
            kernels += self.rates.prefill_attention_s
            work += pairs * attention.pair_flops / (self.rates.attention * self.peak)
            work += step.prompt_tokens * attention.query_bytes / self.bandwidth
        return attention.count * kernels, attention.count * work


def _joined(linears: Sequence[Linear], joins: bool = True) -> Iterator[tuple[Linear, ...]]:
    """Those that read one input, which most engines keep as one matrix; else each alone."""
    if not joins:
        return ((linear,) for linear in linears)
    groups: dict[tuple[str, int], list[Linear]] = {}
    for linear in linears:
        groups.setdefault((linear.reads, linear.count), []).append(linear)
    return (tuple(group) for group in groups.values())


def step_timer(
    served: Served,
    *,
    stepping: Stepping,
    reduction_s: Callable[[float], float],
) -> StepTimer:
    """The timer of `served` on one of the engine's equal GPUs.

    Args:
        reduction_s: seconds of an all-reduce among them, by bytes.
    """
    model, gpu = rank_model(served.model, stepping.ranks), served.gpu
    rates = stepping.rates or kernel_rates(gpu)
    products, attentions = [], []
    moved, pointwise, reductions = 0.0, 0, 0
    for layer, count in model.layers():
        products += [
            _product_of(group, count, served, rates, stepping)
            for group in _joined(layer.linears, stepping.joins)
        ]
        products += list(_adapter_products(layer, count, served, rates))
        for attention in layer.attentions:
            query = attention.num_attention_heads * (attention.head_dim + attention.v_head_dim)
            attentions.append(
                _Attention(
                    count=count,
                    token_bytes=attention.cache_elements * stepping.cache_bytes,
                    query_bytes=query * served.dtypes.compute_bytes,
                    pair_flops=2 * query,
                    window=attention.sliding_window,
                )
            )
        moved += count * _pointwise_bytes(layer, model, served.dtypes.compute_bytes)
        pointwise += count * _pointwise_kernels(layer)
        blocks = len(layer.attentions) + (layer.mlp is not None) + (layer.moe is not None)
        reductions += count * blocks * (stepping.ranks > 1)
    head = _head(model, served, rates, stepping)
    kernels = sum(product.count for product in products) + pointwise
    kernels += sum(attention.count for attention in attentions)
    return StepTimer(
        products=tuple(products),
        attentions=tuple(attentions),
        head=head,
        vocab_size=model.vocab_size,
        pointwise_bytes=moved,
        pointwise_kernels=pointwise,
        reduced_bytes=model.hidden_size * served.dtypes.compute_bytes,
        num_reductions=reductions,
        reduction_s=reduction_s,
        rates=rates,
        bandwidth=gpu.bandwidth_bytes_per_s,
        peak=product_rate(gpu, compute_dtype(served)),
        few_rate=rates.few_products * product_rate(gpu, "fp32"),
        num_multiprocessors=tiled_multiprocessors(gpu, compute_dtype(served))
        if rates.overlaps
        else None,
        stepping=stepping,
        num_launches=kernels,
        deviation=rates.deviation,
    )


def compute_dtype(served: Served) -> str:
    """In which products are computed that have no weights in blocks."""
    return served.dtypes.half if served.dtypes.compute_bytes == 2 else "fp32"


def _product_of(
    group: Sequence[Linear], count: int, served: Served, rates: KernelRates, stepping: Stepping
) -> _Product:
    """`group` as one kernel, in the storage of its weights."""
    first, is_expert = group[0], group[0].count > 1
    kernel_s, reads = rates.product_s, rates.reads
    rate = rates.products * product_rate(served.gpu, compute_dtype(served))
    if is_quantised(first, served.dtypes):
        if _has_units(served.dtypes.quant, served.gpu):  # whose peak is twice that of 16 bit
            kernel_s, rate = kernel_s + NARROWING_S, 2 * NARROW_PRODUCTS * rate
        else:
            kernel_s, rate = kernel_s + UNPACKING_S, UNPACKING_PRODUCTS * rate
            reads *= stepping.code_reads * (
                ZEROED_READS if served.dtypes.quant == "awq-int4" else 1.0
            )
    stored = stepping.weight_bytes
    return _Product(
        count=count,
        num_bytes=float(
            sum(stored(each) if stored else linear_bytes(each, served.dtypes) for each in group)
        ),
        shapes=tuple((linear.in_features, linear.out_features) for linear in group),
        experts=first.count,
        active=first.active,
        kernel_s=EXPERTS_S if is_expert else kernel_s,
        reads=reads,
        rate=EXPERTS_PRODUCTS * rate if is_expert else rate,
    )


def _has_units(quant: str, gpu: GpuSpec) -> bool:
    """Whether `gpu` multiplies what is stored, its inputs narrowed to 8-bit floats."""
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


def _head(model: ModelSpec, served: Served, rates: KernelRates, stepping: Stepping) -> _Product:
    width, stored = served.dtypes.embedding_bytes, stepping.weight_bytes
    head = model.head
    assert head is not None  # of every model that continues a text
    return _Product(
        count=1,
        num_bytes=stored(None) if stored else float(head.num_weights * width),
        shapes=((head.in_features, head.out_features),),
        experts=1,
        active=1,
        kernel_s=rates.product_s,
        reads=rates.reads,
        rate=rates.products * product_rate(served.gpu, compute_dtype(served)),
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
        active = layer.moe.experts_per_token
        moved += active * (3 * layer.moe.expert.width + 2 * model.hidden_size)
        if layer.moe.shared is not None:
            moved += 3 * layer.moe.shared.width
    return moved * width


def _pointwise_kernels(layer: Layer) -> int:
    """Kernels of a layer beside products and attention, joined as vLLM's are.

    Kind: estimate. Source: as of `_pointwise_bytes`; routing, sorting and adding up of experts are
    vLLM 0.33.0 model_executor/layers/fused_moe/fused_moe.py: topk_softmax, moe_align_block_size,
    moe_sum.
    """
    kernels = len(layer.norms) + len(layer.inner_norms)
    kernels += 2 * len(layer.attentions) + (layer.mlp is not None)
    if layer.moe is not None:
        kernels += 5 + (layer.moe.shared is not None)
    return kernels


def own_all_reduce(bandwidth_bytes_per_s: float, ranks: int) -> Callable[[float], float]:
    """Seconds of an all-reduce by the engine's own kernel, by bytes.

    Kind: estimate. Source: `OWN_ALL_REDUCE_S`; a ring's bytes, nccl-tests `doc/PERFORMANCE.md`.
    """
    if ranks == 1:
        return lambda num_bytes: 0.0
    share = 2 * (ranks - 1) / ranks / bandwidth_bytes_per_s
    return lambda num_bytes: OWN_ALL_REDUCE_S + share * num_bytes
