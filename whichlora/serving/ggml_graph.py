"""The graph that ggml computes one batch with: its nodes, in the order in which ggml visits them.

An architecture is made of the blocks below, or has some of its own (`gguf_architectures`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from whichlora.serving.ggml_backends import CUDA, FP16, FP32, FusedAttention, GgmlBackend
from whichlora.serving.ggml_buffer import HOST, Graph
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.layer import Attention, Layer, Mlp, Moe
from whichlora.spec.numeric import ceil_div

if TYPE_CHECKING:
    from whichlora.serving.gguf_architectures.base import Architecture

INDEX = 8  # bytes of a row number
# Layers that are laid out of each end of a model; between them the layout repeats.
_FIRST, _LAST = 4, 2


class LayerPlace(NamedTuple):
    """Where one layer lies.

    Args:
        place: of its norms, its cache, and matrices that `elsewhere` does not name.
        elsewhere: names of tensors, their place and bytes; of a bias, "name.bias".
        cached: bytes of keys and of values, where the host has the layer.
    """

    place: int
    elsewhere: tuple[tuple[str, int, int], ...] = ()
    cached: tuple[int, ...] = ()

    @property
    def computes(self) -> int:
        """Where it is computed: the first GPU, with copies of what the host has.

        Source: llama.cpp 0c1e570 ggml/src/ggml-backend.cpp:945 ggml_backend_offload_op.
        """
        return max(0, self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a graph is reserved for.

    Args:
        tokens: of one micro-batch (`n_ubatch`).
        outputs: rows of logits.
        sequences: those that the tokens are of.
        cells: of the cache that each query sees, by sliding window; None is whole attention.
        flash: keys and values are read by one fused kernel.
        turns_values: values are cached for such a kernel, which there is none of.
        streams: caches beside each other.
        widened_keys, widened_values: those of them that are copied to 16 bit.
        rotates_keys, rotates_values: cached in blocks, and rotated before.
        backend: whose rules its buffer follows.
        layers: the first one of a part of the model, and the first one after it; None is all.
        scores: whether this part has the output matrix.
        copies: of each input.
        takes_norm, gives_norm: whether the first norm of a part is computed where the part before
            it is.
        places: of each layer, where the host has some of it; the graph is that of all GPUs.
        output_place: of the output matrix, where there are `places`.
        binds_norms: whether norms of layers are computed where the layer is.
    """

    tokens: int
    outputs: int
    cells: tuple[tuple[int | None, int], ...]
    sequences: int = 1
    flash: bool = True
    turns_values: bool = False
    streams: int = 1
    widened_keys: int = 0
    widened_values: int = 0
    rotates_keys: bool = False
    rotates_values: bool = False
    backend: GgmlBackend = CUDA
    layers: tuple[int, int] | None = None
    scores: bool = True
    copies: int = 1
    takes_norm: bool = False
    gives_norm: bool = False
    places: tuple[LayerPlace, ...] = ()
    output_place: int = 0
    binds_norms: bool = True


_FIRST_GPU = LayerPlace(0)


@dataclass(slots=True)
class Builder:
    """The nodes of one forward, in the order in which ggml visits them.

    Args:
        layers: those that are laid out; number: of the present one.
        embedded: the looked-up tokens.
        states: what layers have read of their states, by their numbers.
    """

    model: ModelSpec
    batch: Batch
    architecture: Architecture
    graph: Graph = field(default_factory=Graph)
    inputs: dict[object, int] = field(default_factory=dict)
    inputs_place: int = HOST
    at: LayerPlace = _FIRST_GPU
    normed_elsewhere: dict[int, int] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    first: int = 0
    number: int = -1
    embedded: int = 0
    states: dict[int, int] = field(default_factory=dict)

    def given(self, what: object, num_bytes: int) -> int:
        """An input, of which a GPU has a copy where it is first needed."""
        if what not in self.inputs:
            self.inputs[what] = self.graph.add(num_bytes, place=self.inputs_place)
        return self.inputs[what]

    def enter(self, layer: LayerPlace) -> None:
        """What follows is of a layer that lies there."""
        self.at = layer

    def wide(self, width: int, *sources: int, over: tuple[int, ...] = (), rows: int = 0) -> int:
        """A tensor of `width` fp32 elements for each token."""
        return self.graph.add(FP32 * width * (rows or self.batch.tokens), *sources, over=over)

    def product(
        self, matrix: str, width: int, *sources: int, rows: int = 0, beside: int = 0
    ) -> int:
        """What a matrix makes of its input, where that matrix is; a GPU copies those of the host.

        What follows is computed in the same place, up to the next matrix.

        Args:
            beside: bytes that its kernel needs with the result.
        """
        place, num_bytes = self._stored(matrix)
        if place == HOST and not rows:
            self.graph.place = 0
            size = FP32 * width * self.batch.tokens + beside
            result = self.graph.add(size, self.graph.weight(num_bytes), *sources)
            return self.with_vector(f"{matrix}.bias", width, result)
        if place == HOST:  # too few rows for a copy
            return self.graph.add(FP32 * width * rows, *sources, place=HOST)
        self.graph.place = place
        return self.graph.add(FP32 * width * (rows or self.batch.tokens) + beside, *sources)

    def _stored(self, name: str) -> tuple[int, int]:
        """The place and the bytes of a tensor; no bytes where it is in its layer's place."""
        for tensor, place, num_bytes in self.at.elsewhere:
            if tensor == name:
                return place, num_bytes
        return self.at.place, 0

    def with_vector(self, name: str, width: int, read: int, *, rows: int = 0) -> int:
        """`read` with a bias or scale, which lies on it; a node only where the host has that."""
        place, num_bytes = self._stored(name)
        if place != HOST or rows or not num_bytes:
            return read
        return self.wide(width, read, self.graph.weight(num_bytes), over=(read,))

    def normed(self, stream: int, kind: str, name: str = "attn_norm", *, rows: int = 0) -> int:
        """RMSNorm may lie on what it reads, LayerNorm may not; the scale lies on either."""
        width, over = self.model.hidden_size, () if kind.startswith("layer") else (stream,)
        if stream in self.normed_elsewhere:
            other = self.normed_elsewhere.pop(stream)
            return self.wide(width, other, over=(other,), rows=rows)
        if self.graph.place != self.at.computes and not self.batch.binds_norms:
            other = self.wide(width, stream, over=over, rows=rows)
            self.graph.place = self.at.computes
            return self.wide(width, other, over=(other,), rows=rows)
        self.graph.place = self.at.computes
        result = self.wide(width, stream, over=over, rows=rows)
        result = self.with_vector(name, width, result, rows=rows)
        return self.with_vector(f"{name}.bias", width, result, rows=rows)

    def chosen_rows(self, stream: int, rows: int) -> int:
        """Of the tokens whose logits are asked for."""
        numbers = self.given("rows of logits", 4 * rows)
        return self.wide(self.model.hidden_size, stream, numbers, rows=rows)

    def read_ahead(self, *, is_done: bool = False) -> None:
        """Up to here the graph is laid out, so that the next layer reads its states now.

        What is left of this one follows later, unless something else is laid out before.

        Args:
            is_done: nothing else of this layer is.
        """
        if not is_done and self.layers[self.number].moe is not None:
            return
        for number, layer in enumerate(self.layers[self.number + 1 :], self.number + 1):
            if elements := sum(map(self.architecture.read_ahead, layer.attentions)):
                whose = self.given("whose state", 4 * self.batch.sequences)
                size = FP32 * elements * self.batch.sequences
                self.states[number] = self.graph.add(size, whose)
            if layer.attentions or layer.moe is not None:
                return

    def positions(self) -> int:
        return self.given("positions", 4 * self.architecture.positions * self.batch.tokens)


def compute_bytes(
    model: ModelSpec,
    batch: Batch,
    architecture: Architecture,
    *,
    reads_tokens: bool = False,
    device: int = 0,
) -> int:
    """Bytes of the buffer for one micro-batch of all layers.

    Args:
        reads_tokens: token embeddings are looked up in the same buffer, as on a CPU.
        device: whose buffer it is, where `batch` has places.

    Kind: exact. Source: llama.cpp 0c1e570 `llama_context::sched_reserve`,
    src/llama-context.cpp:615; `llm_graph_context`.
    """
    return _compute_bytes(model, batch, architecture, reads_tokens, device)


@lru_cache(maxsize=4096)
def _compute_bytes(
    model: ModelSpec, batch: Batch, architecture: Architecture, reads_tokens: bool, device: int
) -> int:
    graph = _graph(model, batch, architecture, reads_tokens)
    return graph.buffer_bytes(batch.backend.alignment, place=device, copies=batch.copies)


@lru_cache(maxsize=16)  # the buffers of all GPUs have one
def _graph(model: ModelSpec, batch: Batch, architecture: Architecture, reads_tokens: bool) -> Graph:
    num_layers = len(layers_in_order(model))
    begin, end = batch.layers or (0, num_layers)
    build = Builder(model, batch, architecture)
    rows = batch.outputs if begin == num_layers else 0
    if batch.places:
        shown = tuple(zip(layers_in_order(model), batch.places, strict=True))
        build.graph.place = shown[0][1].computes
    else:
        shown = tuple((layer, build.at) for layer in _shown(model, begin, end))
    build.layers, build.first = tuple(layer for layer, _ in shown), begin
    stream = build.embedded = _stream(build, rows, reads_tokens)
    if not build.states:
        build.read_ahead(is_done=True)
    if batch.takes_norm and shown and not shown[0][0].post_norm:
        normed = build.given("normed states", FP32 * model.hidden_size * batch.tokens)
        build.normed_elsewhere[stream] = normed
    for build.number, (layer, place) in enumerate(shown):
        build.enter(place)
        if end == num_layers and build.number == len(shown) - 1:
            rows = batch.outputs
        stream = architecture.layer(build, layer, stream, 0 if architecture.keeps_rows else rows)
    if architecture.keeps_rows and rows:
        stream = build.chosen_rows(stream, rows)
    kind = model.final_norms[0].kind
    if batch.scores:
        build.enter(LayerPlace(batch.output_place))
        final = build.normed(stream, kind, rows=rows)
        build.product("output", model.vocab_size, final, rows=rows)
    elif rows or batch.gives_norm:
        build.wide(model.hidden_size, stream, rows=rows)
    return build.graph


def _stream(build: Builder, rows: int, reads_tokens: bool) -> int:
    """What the first layer reads: looked up here or by the host, or another GPU's."""
    model, batch = build.model, build.batch
    hidden = FP32 * model.hidden_size * (rows or batch.tokens)
    is_first = batch.layers is None or batch.layers[0] == 0
    widths = build.architecture.embeddings(model) if is_first else 1
    if reads_tokens:
        build.inputs_place = 0
        tokens = build.given("tokens", 4 * batch.tokens)
        build.given("embeddings that are handed in", hidden * widths)
        stream = build.graph.add(hidden, tokens)
    elif model.embeds_in_steps:
        stream = build.given("embeddings", hidden)
    else:
        build.read_ahead(is_done=True)
        stream = build.given("embeddings", hidden)
    if widths > 1:  # padded to the width of what may be handed in
        stream = build.graph.add(hidden * widths, stream)
    if model.embeds_in_steps and is_first:
        stream = build.graph.add(hidden, stream, over=(stream,))
    return stream


@lru_cache(maxsize=4096)
def _shown(model: ModelSpec, begin: int, end: int) -> tuple[Layer, ...]:
    """Both ends of a part, the first with every kind of layer and one more after it.

    All, where not every layer attends: its inputs are free once the last of those has read them.
    """
    layers = layers_in_order(model)[begin:end]
    if not all(each.kind == "softmax" for layer in layers for each in layer.attentions):
        return layers
    kinds = len(set(layers))
    first = next(n for n in range(len(layers) + 1) if len(set(layers[:n])) == kinds)
    first = max(first + 2, _FIRST)
    return layers if len(layers) <= first + _LAST else layers[:first] + layers[-_LAST:]


# --- layers -----------------------------------------------------------------------------------


def block(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    """One layer; of the last one only `rows` go on after the attention."""
    return fed(build, layer, mixed(build, layer, stream), stream, rows)


def mixed(build: Builder, layer: Layer, stream: int) -> int:
    """What the attention of a layer makes of its input."""
    kind = layer.norms[0].kind
    read = stream if layer.post_norm else build.normed(stream, kind)
    attention = layer.attentions[0]
    result = build.architecture.attention(build, attention, read)
    output = build.architecture.matrix(attention.linears[-1].name)
    return build.product(output, build.model.hidden_size, result)


def fed(
    build: Builder,
    layer: Layer,
    mixed: int,
    stream: int,
    rows: int,
    *,
    is_view: bool = False,
    stream_first: bool = False,
) -> int:
    """What follows the attention of a layer.

    Args:
        is_view: nothing may lie on what attention returned, which is a view.
        stream_first: sums start with the stream, and lie on it.
    """
    width, kind = build.model.hidden_size, layer.norms[0].kind
    if rows:
        mixed = build.chosen_rows(mixed, rows)
        stream = build.chosen_rows(stream, rows)
    around = layer.post_norm or len(layer.norms) == 4
    if around:
        mixed = build.with_vector("post_attention_norm", width, mixed, rows=rows)
    over: tuple[int, ...] = (stream, mixed) if stream_first else (mixed, stream)
    if is_view and not rows:
        over = (stream,)
    middle = build.wide(width, mixed, stream, over=over, rows=rows)
    name = build.architecture.norms.get("post_attention_layernorm", "ffn_norm")
    read = middle if layer.post_norm else build.normed(middle, kind, name, rows=rows)
    if layer.moe is not None:
        out = mixture(build, layer.moe, read, rows=rows)
    else:
        assert layer.mlp is not None
        out = dense(build, layer.mlp, read, rows=rows)
    if around:
        out = build.with_vector("post_ffw_norm", width, out, rows=rows)
    over = (middle, out) if stream_first else (out, middle)
    return build.wide(width, out, middle, over=over, rows=rows)


def dense(build: Builder, mlp: Mlp, read: int, *, rows: int, suffix: str = "") -> int:
    """Source: llama.cpp 0c1e570 `llm_graph_context::build_ffn`, src/llama-graph.cpp:1762."""
    fused = any(linear.name == "gate_up_proj" for linear in mlp.linears)
    gate, up = f"ffn_gate{suffix}", f"ffn_up{suffix}"
    inner = mlp.width
    if mlp.gated:
        halves = {up: 2 * inner} if fused else {gate: inner, up: inner}
        read_by = [build.product(name, half, read, rows=rows) for name, half in halves.items()]
        product = build.wide(inner, *read_by, rows=rows)
    else:
        raw = build.product(up, inner, read, rows=rows)
        product = build.wide(inner, raw, over=(raw,), rows=rows)
    return build.product(f"ffn_down{suffix}", build.model.hidden_size, product, rows=rows)


# --- attention --------------------------------------------------------------------------------


def softmax_attention(build: Builder, attention: Attention, read: int) -> int:
    """What the output projection reads."""
    return turned_back(build, attention, attended(build, attention, read))


def turned_back(build: Builder, attention: Attention, result: int) -> int:
    """Where cached values were turned before, so is what is attended to after."""
    turn = rotations(build, attention)[1]
    return result if turn < 0 else build.wide(attention.out_width, result, turn)


def attended(build: Builder, attention: Attention, read: int) -> int:
    """What is attended to, as it was cached."""
    batch = build.batch
    q_width, k_width, v_width = attention.q_width, attention.k_width, attention.v_width
    turns_all = attention.position == "rope"
    positions = (build.positions(),) if turns_all else ()
    fused = build.architecture.matrix(attention.linears[0].name) == "attn_qkv"

    def placed(matrix: str, width: int) -> int:
        """Divided into heads, and so a view: what is normed or rotated is a tensor of its own."""
        raw = build.product(matrix, width, read)
        if not (turns_all or attention.norms):
            return raw
        norm = attention.norms[0] if attention.norms else None
        if norm is None or (norm.rows == 1 and norm.kind.startswith("rms")):
            # a norm of all heads lies on what it reads, which is no view yet
            scaled_raw = build.with_vector(f"{matrix}_norm", width, raw)
            return build.wide(width, scaled_raw, *positions)
        normed = build.with_vector(f"{matrix}_norm", width, build.wide(width, raw))
        return build.wide(width, normed, *positions, over=(normed,)) if turns_all else normed

    def scaled(queries: int) -> int:
        if not build.architecture.scales_queries(build.model, attention):
            return queries
        scales = build.given("scales of queries", FP32 * batch.tokens)
        is_view = attention.position != "rope"
        over = () if is_view else (queries,)
        return build.wide(q_width, queries, scales, over=over)

    turns = rotations(build, attention)

    def turned(node: int, width: int, turn: int) -> int:
        return node if turn < 0 else build.wide(width, node, turn)

    def keys() -> int:
        made = build.wide(k_width, joined, *positions) if fused else placed("attn_k", k_width)
        return turned(made, k_width, turns[0])

    def values() -> int:
        made = joined if fused else build.product("attn_v", v_width, read)
        return turned(made, v_width, turns[1])

    joined = build.product("attn_qkv", q_width + k_width + v_width, read) if fused else -1
    queries = (
        build.wide(q_width, joined, *positions) if fused else scaled(placed("attn_q", q_width))
    )
    queries = turned(queries, q_width, turns[0])
    if build.architecture.windows:
        cached_keys = keys()
        return attend(build, attention, queries, cached_keys, values())
    cached_values = values()
    return attend(build, attention, queries, keys(), cached_values)


def attend(build: Builder, attention: Attention, queries: int, keys: int, values: int) -> int:
    """Cache what is new, and attend to all of it.

    Source: llama.cpp 0c1e570 `llm_graph_context::build_attn_mha`, src/llama-graph.cpp:2616.
    """
    graph, batch, window = build.graph, build.batch, window_of(build, attention)
    copies = tuple(graph.add(size, place=HOST) for size in build.at.cached)
    if copies:
        graph.add(0, keys, place=HOST)  # the host's cache takes them
        graph.add(0, values, place=HOST)
    else:
        is_whole = batch.flash or batch.turns_values
        rows = batch.tokens * (1 if is_whole else attention.v_width)
        numbers = build.given(("rows of keys", window), INDEX * batch.tokens)
        graph.add(0, keys, numbers)
        graph.add(0, values, build.given(("rows of values", window), INDEX * rows))
    seen, mask = mask_of(build, window)
    if batch.flash:
        widened = batch.widened_keys * attention.k_width
        widened += batch.widened_values * attention.v_width
        size = FP32 * attention.out_width * batch.tokens + FP16 * seen * widened
        size += fused_bytes(batch, attention, seen)
        result = graph.add(size, queries, *copies, mask)
    else:
        scores = FP32 * seen * batch.tokens * attention.num_attention_heads
        turned: tuple[int, ...] = ()
        if batch.turns_values:
            turned = (graph.add(FP16 * seen * batch.streams * attention.v_width, mask),)
        raw = graph.add(scores, *copies[:1], queries)
        weights = graph.add(scores, raw, mask, over=(raw,))
        raw = build.wide(attention.out_width, *copies[1:], *turned, weights)
        result = build.wide(attention.out_width, raw)
    build.read_ahead()
    return result


def fused_bytes(batch: Batch, attention: Attention, cells: int) -> int:
    """What one fused attention needs beside its result and widened caches.

    Rows of a cache in blocks are of one head, since they are copied first.
    Kind: as `GgmlBackend.attention_bytes`.
    """
    keys = attention.head_dim if batch.rotates_keys else attention.k_width
    values = attention.v_head_dim if batch.rotates_values else attention.v_width
    return batch.backend.attention_bytes(
        FusedAttention(
            tokens=ceil_div(batch.tokens, batch.streams),
            cells=cells,
            streams=batch.streams,
            heads=attention.num_attention_heads,
            key_heads=attention.num_key_value_heads,
            value_dim=attention.v_head_dim,
            key_row_bytes=FP16 * keys,
            value_row_bytes=FP16 * values,
        )
    )


def window_of(build: Builder, attention: Attention) -> int | None:
    """Its sliding window, where that has a cache of its own."""
    window = attention.sliding_window
    return window if window in dict(build.batch.cells) else None


def mask_of(build: Builder, window: int | None) -> tuple[int, int]:
    """Cells that a query sees, and the mask of them."""
    batch = build.batch
    seen, of_mask = dict(batch.cells)[window], FP16 if batch.flash else FP32
    return seen, build.given(("mask", window), seen * batch.tokens * of_mask)


def rotations(build: Builder, attention: Attention) -> tuple[int, int]:
    """The matrices that keys and values are turned with; -1 where they are not.

    Source: llama.cpp 0c1e570 `build_input_k_rot`, src/llama-kv-cache.cpp.
    """
    head, value = attention.head_dim, attention.v_head_dim
    window = window_of(build, attention)
    keys = values = -1
    if build.batch.rotates_keys and head % 64 == 0:
        size = 64
        while head % (2 * size) == 0:
            size *= 2
        keys = build.given(("rotation of keys", window), FP32 * size * size)
    if build.batch.rotates_values and value % 64 == 0:
        values = build.given(("rotation of values", window), FP32 * 64 * 64)
    return keys, values


# --- experts ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the experts of a token are chosen, and weighed.

    Args:
        gate: a function of all scores, or a softmax over those of the "chosen".
        biased: chosen by scores with a bias for each expert, weighed without it.
        divided: weights are divided by their sum.
        scaled: weights are multiplied by a number.
        groups: of experts, and how many of them are chosen before; one where there are none.
        by_logits: chosen by what the router says, before the function of it.
        weighs_input: experts read their input times their weight.
    """

    gate: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    biased: bool = False
    divided: bool = True
    scaled: bool = False
    groups: tuple[int, int] = (1, 1)
    by_logits: bool = False
    weighs_input: bool = False


def mixture(build: Builder, moe: Moe, read: int, *, rows: int) -> int:
    """Routed experts, and the shared one beside them."""
    out, width = _experts(build, moe, read, rows=rows), build.model.hidden_size
    if moe.latent:
        out = build.product("ffn_latent_up", width, out, rows=rows)
    if moe.shared is None:
        return out
    shared = dense(build, moe.shared, read, rows=rows, suffix="_shexp")
    if any(linear.name == "shared_expert_gate" for linear in moe.shared.linears):
        gate = build.product("ffn_gate_inp_shexp", 1, read, rows=rows)
        shared = build.wide(width, shared, gate, over=(shared,), rows=rows)
    return build.wide(width, out, shared, over=(out, shared), rows=rows)


def _experts(build: Builder, moe: Moe, read: int, *, rows: int) -> int:
    """The router, and the chosen experts of every token.

    Source: llama.cpp 0c1e570 `llm_graph_context::build_moe_ffn`, src/llama-graph.cpp:2007.
    """
    width, chosen = moe.expert.linears[0].in_features, moe.experts_per_token
    choice = build.architecture.choice(build.model)
    order, weights = _chosen(build, moe, choice, read, rows=rows)
    if moe.latent:
        read = build.product("ffn_latent_down", width, read, rows=rows)
    inner = chosen * moe.expert.width
    if choice.weighs_input:
        repeated = build.wide(chosen * width, read, rows=rows)
        read = build.wide(chosen * width, repeated, weights, over=(repeated,), rows=rows)
    up_names = ("ffn_gate_exps", "ffn_up_exps") if moe.expert.gated else ("ffn_up_exps",)
    halves = [_of_experts(build, moe, name, inner, (read, order), rows) for name in up_names]
    over = () if moe.expert.gated else (halves[0],)
    product = build.wide(inner, *halves, over=over, rows=rows)
    raw = _of_experts(build, moe, "ffn_down_exps", chosen * width, (product, order), rows)
    experts = raw
    if not choice.weighs_input:
        experts = build.wide(chosen * width, raw, weights, over=(raw,), rows=rows)
    if chosen == 1:
        return build.wide(width, experts, rows=rows)
    result = build.wide(width, experts, experts, rows=rows)
    for _ in range(chosen - 2):
        result = build.wide(width, result, experts, over=(result,), rows=rows)
    build.read_ahead(is_done=True)
    return result


def _of_experts(
    build: Builder, moe: Moe, name: str, width: int, sources: tuple[int, int], rows: int
) -> int:
    """A product with the chosen experts; a bias lies on it, and leaves what its kernel needed."""
    beside = build.batch.backend.experts_bytes(moe.num_experts, rows or build.batch.tokens)
    raw = build.product(name, width, *sources, rows=rows, beside=beside)
    if beside and any(linear.bias for linear in moe.expert.linears):
        return build.wide(width, raw, over=(raw,), rows=rows)
    return raw


def _chosen(build: Builder, moe: Moe, choice: Choice, read: int, *, rows: int) -> tuple[int, int]:
    """Numbers of the experts, and their weights."""
    number, chosen = moe.num_experts, moe.experts_per_token
    logits = build.product("ffn_gate_inp", number, read, rows=rows)
    scores = logits
    if choice.gate != "chosen":
        over = () if choice.by_logits else (logits,)
        scores = build.wide(number, logits, over=over, rows=rows)
    sorted_by = logits if choice.by_logits else scores
    if choice.biased:
        sorted_by = build.wide(number, scores, rows=rows)
    if choice.groups[0] > 1:
        sorted_by = _of_best_groups(build, number, choice.groups, sorted_by, rows=rows)
    order = build.wide(build.batch.backend.sorted_copies * number, sorted_by, rows=rows)
    weights = build.wide(chosen, scores, order, rows=rows)
    if choice.gate == "chosen":
        weights = build.wide(chosen, weights, rows=rows)
    if choice.divided:
        total = build.wide(1, weights, rows=rows)
        weights = build.wide(chosen, weights, total, rows=rows)
    if choice.scaled:
        over = () if choice.divided or choice.gate == "chosen" else (weights,)
        weights = build.wide(chosen, weights, over=over, rows=rows)
    return order, weights


def _of_best_groups(
    build: Builder, number: int, groups: tuple[int, int], scores: int, *, rows: int
) -> int:
    """Scores without those of experts in other groups: a group counts by its two best."""
    in_all, in_best = groups[0], groups[1] * (number // groups[0])
    order = build.wide(number, scores, rows=rows)
    best = build.wide(2 * in_all, scores, order, rows=rows)
    sums = build.wide(in_all, best, rows=rows)
    chosen = build.wide(in_all, sums, rows=rows)
    kept = build.wide(in_best, scores, chosen, rows=rows)
    filled = build.wide(number, scores, rows=rows)
    build.graph.add(0, kept, chosen, filled)
    return filled
