"""The buffer that ggml reserves for computing one batch: its graph, laid out by its allocator.

Neighbours of different size leave gaps, so that the peak of what lives at once is too little: the
allocator's own rules are followed, node by node.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from whichlora.spec.architecture import Attention, Layer, ModelSpec, Moe, layers_in_order

ALIGNMENT = 128  # of a GPU's buffers; ggml-cuda.cu:897
FP32, FP16, INDEX = 4, 2, 8  # bytes of activations, of masks with flash attention, of row numbers
# Layers that are laid out of each end of a model; between them the layout repeats.
_FIRST, _LAST = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a graph is reserved for.

    Args:
        tokens: of one micro-batch (`n_ubatch`).
        outputs: rows of logits.
        cells: of the cache that each query sees, by sliding window; None is whole attention.
        flash: keys and values are read by one fused kernel.
        widened_keys, widened_values: caches beside each other that are in another type than fp16.
        rotates_keys, rotates_values: cached in blocks, and rotated before.
        copied: matrices in host memory, by the names of their file, and bytes: a GPU computes with
            copies.
        copied_keys, copied_values: bytes of one layer's cache in host memory.
        alignment: of every tensor, in bytes.
    """

    tokens: int
    outputs: int
    cells: tuple[tuple[int | None, int], ...]
    flash: bool = True
    widened_keys: int = 0
    widened_values: int = 0
    rotates_keys: bool = False
    rotates_values: bool = False
    copied: tuple[tuple[str, int], ...] = ()
    copied_keys: int = 0
    copied_values: int = 0
    alignment: int = ALIGNMENT


class _Node(NamedTuple):
    """A tensor: what it is made of, and which of those it may lie on."""

    num_bytes: int
    sources: tuple[int, ...] = ()
    over: tuple[int, ...] = ()


@dataclass(slots=True)
class _Graph:
    nodes: list[_Node] = field(default_factory=list)

    def add(self, num_bytes: int, *sources: int, over: tuple[int, ...] = ()) -> int:
        self.nodes.append(_Node(num_bytes, sources, over))
        return len(self.nodes) - 1

    def buffer_bytes(self, alignment: int) -> int:
        """Bytes up to the highest address that is used.

        Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:709 ggml_gallocr_alloc_graph_impl.
        """
        users = [0] * len(self.nodes)
        for node in self.nodes:
            for source in node.sources:
                users[source] += 1
        space = _Space()
        ranges: dict[int, tuple[int, int]] = {}
        for index, node in enumerate(self.nodes):
            if not node.sources:  # inputs come first
                ranges[index] = space.take(-(-node.num_bytes // alignment) * alignment)
        for index, node in enumerate(self.nodes):
            if not node.sources:
                continue
            for below in node.over:
                if users[below] == 1 and below in ranges:
                    ranges[index] = ranges.pop(below)
                    break
            else:
                if node.num_bytes:
                    ranges[index] = space.take(-(-node.num_bytes // alignment) * alignment)
            for source in node.sources:
                users[source] -= 1
                if users[source] == 0 and source in ranges:
                    space.give(*ranges.pop(source))
        return space.highest


@dataclass(slots=True)
class _Space:
    """Free ranges below an end that moves.

    Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:241 ggml_dyn_tallocr_alloc.
    """

    highest: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0

    def take(self, size: int) -> tuple[int, int]:
        """The first and the last byte, excluded, of the smallest free range that is large enough.

        Of equal ones the last; where there is none, at the end.
        """
        best, least = -1, -1
        for place, (start, stop) in enumerate(self.free):
            room = stop - start
            if room >= size and (best < 0 or room <= least):
                best, least = place, room
        if best < 0:
            start, self.end = self.end, self.end + size
        else:
            start, stop = self.free[best]
            self.free[best : best + 1] = [(start + size, stop)] if least > size else []
        self.highest = max(self.highest, start + size)
        return start, start + size

    def give(self, start: int, stop: int) -> None:
        """Back what was taken, joined with what is free before and after it."""
        place = bisect(self.free, (start, stop))
        if place < len(self.free) and self.free[place][0] == stop:
            stop = self.free.pop(place)[1]
        if place and self.free[place - 1][1] == start:
            place -= 1
            start = self.free.pop(place)[0]
        if stop == self.end:
            self.end = start
        else:
            self.free.insert(place, (start, stop))


@dataclass(slots=True)
class _Builder:
    """The nodes of one forward, in the order in which ggml visits them."""

    model: ModelSpec
    batch: Batch
    graph: _Graph = field(default_factory=_Graph)
    inputs: dict[object, int] = field(default_factory=dict)
    on_host: bool = False

    def given(self, what: object, num_bytes: int, *after: int) -> int:
        """An input. Host layers divide the graph, so that it comes where it is first needed."""
        if what not in self.inputs:
            sources = after if self.on_host else ()
            self.inputs[what] = self.graph.add(num_bytes, *sources)
        return self.inputs[what]

    def wide(self, width: int, *sources: int, over: tuple[int, ...] = (), rows: int = 0) -> int:
        """A tensor of `width` fp32 elements for each token."""
        return self.graph.add(FP32 * width * (rows or self.batch.tokens), *sources, over=over)

    def product(self, matrix: str, width: int, *sources: int, rows: int = 0) -> int:
        """What a matrix makes of its input, and a copy of that matrix where the host has it."""
        copied = dict(self.batch.copied).get(matrix, 0) if self.on_host and not rows else 0
        if copied:
            sources = (*sources, self.graph.add(copied, sources[0]))
        return self.wide(width, *sources, rows=rows)

    def normed(self, stream: int, kind: str, *, rows: int = 0) -> int:
        """RMSNorm may lie on what it reads, LayerNorm may not; the scale lies on either."""
        over = () if kind.startswith("layer") else (stream,)
        return self.wide(self.model.hidden_size, stream, over=over, rows=rows)


def compute_bytes(model: ModelSpec, batch: Batch, *, reads_tokens: bool = False) -> int:
    """Bytes of the buffer for one micro-batch of all layers.

    Args:
        reads_tokens: token embeddings are looked up in the same buffer, as on a CPU.

    Kind: exact for one device that holds every layer. Source: llama.cpp 0c1e570
    `llama_context::sched_reserve`, src/llama-context.cpp:615; `llm_graph_context`.
    """
    return _compute_bytes(model, batch, reads_tokens)


@lru_cache(maxsize=4096)
def _compute_bytes(model: ModelSpec, batch: Batch, reads_tokens: bool) -> int:
    build = _Builder(model, batch)
    hidden = FP32 * model.hidden_size * batch.tokens
    if reads_tokens:
        tokens = build.given("tokens", 4 * batch.tokens)
        build.given("embeddings that are handed in", hidden)
        stream = build.graph.add(hidden, tokens)
    else:
        stream = build.given("embeddings", hidden)
    if model.embeds_in_steps:
        stream = build.graph.add(hidden, stream, over=(stream,))
    shown = _shown(model)
    build.on_host = bool(batch.copied)
    for layer in shown[:-1]:
        stream = _layer(build, layer, stream, rows=0)
    build.on_host = False
    stream = _layer(build, shown[-1], stream, rows=batch.outputs)
    final = build.normed(stream, model.final_norms[0].kind, rows=batch.outputs)
    build.wide(model.vocab_size, final, rows=batch.outputs)
    return build.graph.buffer_bytes(batch.alignment)


@lru_cache(maxsize=256)
def _shown(model: ModelSpec) -> tuple[Layer, ...]:
    """Both ends, the first with every kind of layer and one more after it."""
    layers = layers_in_order(model)
    kinds = len(set(layers))
    first = next(n for n in range(len(layers) + 1) if len(set(layers[:n])) == kinds)
    first = max(first + 2, _FIRST)
    return layers if len(layers) <= first + _LAST else layers[:first] + layers[-_LAST:]


def _layer(build: _Builder, layer: Layer, stream: int, *, rows: int) -> int:
    """One layer; of the last one only `rows` go on after the attention."""
    width = build.model.hidden_size
    attention = layer.attentions[0]
    kind = layer.norms[0].kind
    read = stream if layer.post_norm else build.normed(stream, kind)
    mixed = build.product("attn_output", width, _attention(build, attention, read))
    if rows:
        chosen = build.given("rows of logits", 4 * rows)
        mixed = build.wide(width, mixed, chosen, rows=rows)
        stream = build.wide(width, stream, chosen, rows=rows)
    middle = build.wide(width, mixed, stream, over=(mixed, stream), rows=rows)
    read = middle if layer.post_norm else build.normed(middle, kind, rows=rows)
    if layer.moe is not None:
        out = _experts(build, layer.moe, read, rows=rows)
    else:
        assert layer.mlp is not None
        fused = any(linear.name == "gate_up_proj" for linear in layer.mlp.linears)
        inner = layer.mlp.width
        if layer.mlp.gated:
            halves = {"ffn_up": 2 * inner} if fused else {"ffn_gate": inner, "ffn_up": inner}
            read_by = [build.product(name, half, read, rows=rows) for name, half in halves.items()]
            product = build.wide(inner, *read_by, rows=rows)
        else:
            up = build.product("ffn_up", inner, read, rows=rows)
            product = build.wide(inner, up, over=(up,), rows=rows)
        out = build.product("ffn_down", width, product, rows=rows)
    return build.wide(width, out, middle, over=(out, middle), rows=rows)


def _attention(build: _Builder, attention: Attention, read: int) -> int:
    """What the output projection reads."""
    graph, batch, window = build.graph, build.batch, attention.sliding_window
    cells = dict(batch.cells)
    window = window if window in cells else None
    positions = build.given("positions", 4 * batch.tokens, read)
    fused = any(linear.name == "qkv_proj" for linear in attention.linears)

    def placed(matrix: str, width: int) -> int:
        """Divided into heads, and so a view: what is normed or rotated is a tensor of its own."""
        raw = build.product(matrix, width, read)
        is_raw = attention.position != "rope" and not attention.norms
        return raw if is_raw else build.wide(width, raw, positions)

    q_width, k_width, v_width = attention.q_width, attention.k_width, attention.v_width
    if fused:
        joined = build.product("attn_qkv", q_width + k_width + v_width, read)
        queries = build.wide(q_width, joined, positions)
        keys, values = build.wide(k_width, joined, positions), joined
    else:
        queries = placed("attn_q", q_width)
        keys = values = -1
    turns = dict(zip("kv", _rotations(build, attention, window), strict=True))
    if turns["k"] >= 0:
        queries = build.wide(q_width, queries, turns["k"])
    if not fused:
        values = build.product("attn_v", v_width, read)
    if turns["v"] >= 0:
        values = build.wide(v_width, values, turns["v"])
    if not fused:
        keys = placed("attn_k", k_width)
    if turns["k"] >= 0:
        keys = build.wide(k_width, keys, turns["k"])
    copies: tuple[int, ...] = ()
    if build.on_host and batch.copied_keys:
        graph.add(0, keys)  # the host's cache takes them
        graph.add(0, values)
        copies = tuple(
            graph.add(size, queries) for size in (batch.copied_keys, batch.copied_values)
        )
    else:
        rows = batch.tokens * (1 if batch.flash else v_width)
        numbers = build.given(("rows of keys", window), INDEX * batch.tokens)
        graph.add(0, keys, numbers)
        graph.add(0, values, build.given(("rows of values", window), INDEX * rows))
    seen, of_mask = cells[window], FP16 if batch.flash else FP32
    mask = build.given(("mask", window), seen * batch.tokens * of_mask, queries)
    if batch.flash:
        widened = batch.widened_keys * k_width + batch.widened_values * v_width
        extra = FP16 * seen * widened
        result = graph.add(
            FP32 * attention.out_width * batch.tokens + extra, queries, mask, *copies
        )
    else:
        scores = FP32 * seen * batch.tokens * attention.num_attention_heads
        raw = graph.add(scores, queries)
        weights = graph.add(scores, raw, mask, over=(raw,))
        raw = build.wide(attention.out_width, weights)
        result = build.wide(attention.out_width, raw)
    return result if turns["v"] < 0 else build.wide(attention.out_width, result, turns["v"])


def _rotations(build: _Builder, attention: Attention, window: int | None) -> tuple[int, int]:
    """The matrices that keys and values are turned with; -1 where they are not.

    Source: llama.cpp 0c1e570 `build_input_k_rot`, src/llama-kv-cache.cpp.
    """
    head, value = attention.head_dim, attention.v_head_dim
    keys = values = -1
    if build.batch.rotates_keys and head % 64 == 0:
        size = 64
        while head % (2 * size) == 0:
            size *= 2
        keys = build.given(("rotation of keys", window), FP32 * size * size)
    if build.batch.rotates_values and value % 64 == 0:
        values = build.given(("rotation of values", window), FP32 * 64 * 64)
    return keys, values


def _experts(build: _Builder, moe: Moe, read: int, *, rows: int) -> int:
    """The router, and the chosen experts of every token.

    Source: llama.cpp 0c1e570 `llm_graph_context::build_moe_ffn`, src/llama-graph.cpp:1983.
    """
    width, chosen = build.model.hidden_size, moe.experts_per_token
    logits = build.wide(moe.num_experts, read, rows=rows)
    probabilities = build.wide(moe.num_experts, logits, over=(logits,), rows=rows)
    order = build.wide(moe.num_experts, probabilities, rows=rows)
    picked = build.wide(chosen, probabilities, order, rows=rows)
    total = build.wide(1, picked, rows=rows)
    weights = build.wide(chosen, picked, total, rows=rows)
    inner = chosen * moe.expert.width
    gate = build.product("ffn_gate_exps", inner, read, order, rows=rows)
    up = build.product("ffn_up_exps", inner, read, order, rows=rows)
    product = build.wide(inner, gate, up, rows=rows)
    raw = build.product("ffn_down_exps", chosen * width, product, order, rows=rows)
    experts = build.wide(chosen * width, raw, weights, over=(raw,), rows=rows)
    result = build.wide(width, experts, experts, rows=rows)
    for _ in range(chosen - 2):
        result = build.wide(width, result, experts, over=(result,), rows=rows)
    return result
