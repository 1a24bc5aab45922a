"""Models whose feed-forward block reads the layer's input, and not what attention made of it.

Each adds up three tensors, in an order of its own: what comes first is computed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from whichlora.serving.ggml_graph import Builder, attended, block, dense, turned_back
from whichlora.serving.gguf import Rules, Tensor, always, first_eighth, layer_tensors, sensitive
from whichlora.serving.gguf_architectures.base import Architecture
from whichlora.spec.layer import Layer


@dataclass(slots=True)
class _Terms:
    """What a layer adds up, each computed when it is asked for."""

    build: Builder
    layer: Layer
    stream: int
    rows: int
    normed: int
    result: int = -1

    def __post_init__(self) -> None:
        self.result = attended(self.build, self.layer.attentions[0], self.normed)

    def chosen(self, node: int) -> int:
        return self.build.chosen_rows(node, self.rows) if self.rows else node

    def attended(self) -> int:
        width = self.build.model.hidden_size
        result = turned_back(self.build, self.layer.attentions[0], self.result)
        return self.chosen(self.build.product("attn_output", width, result))

    def fed(self, read: int) -> int:
        assert self.layer.mlp is not None
        return dense(self.build, self.layer.mlp, read, rows=self.rows)

    def sum(self, first: int, second: int) -> int:
        width = self.build.model.hidden_size
        return self.build.wide(width, first, second, over=(first, second), rows=self.rows)


def _started(build: Builder, layer: Layer, stream: int, rows: int) -> _Terms:
    normed = build.normed(stream, layer.norms[0].kind)
    return _Terms(build, layer, stream, rows, normed)


def _cohere(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    terms = _started(build, layer, stream, rows)
    first = terms.sum(terms.fed(terms.chosen(terms.normed)), terms.chosen(stream))
    return terms.sum(first, terms.attended())


def _phi(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    terms = _started(build, layer, stream, rows)
    first = terms.attended()
    first = terms.sum(first, terms.fed(terms.chosen(terms.normed)))
    return terms.sum(first, terms.chosen(stream))


def _falcon(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    """Since the 40B, what is fed has a norm of its own."""
    terms = _started(build, layer, stream, rows)
    read = terms.normed
    if len(layer.norms) > 1:
        read = build.normed(stream, layer.norms[1].kind)
    first = terms.fed(terms.chosen(read))
    return terms.sum(terms.sum(first, terms.attended()), terms.chosen(stream))


def _neox(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    if not layer.parallel:
        return block(build, layer, stream, rows)
    terms = _started(build, layer, stream, rows)
    stream = terms.chosen(stream)
    read = build.normed(stream, layer.norms[1].kind, rows=rows)
    first = terms.sum(terms.fed(read), stream)
    return terms.sum(first, terms.attended())


def _stablelm(build: Builder, layer: Layer, stream: int, rows: int) -> int:
    if not layer.parallel:
        return block(build, layer, stream, rows)
    terms = _started(build, layer, stream, rows)
    first = terms.fed(terms.chosen(terms.normed))
    return terms.sum(first, terms.sum(terms.attended(), terms.chosen(stream)))


def _norms_of_heads(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    """Norms of queries and keys have a row for each head."""
    head = layer.attentions[0].head_dim
    for tensor in layer_tensors(layer, architecture):
        if tensor.name in ("attn_q_norm", "attn_k_norm"):
            tensor = replace(tensor, row=head, num_rows=tensor.row // head)
        yield tensor


_FALCON: dict[str, Rules] = {
    "ffn_down": {
        "Q2_K": (("Q3_K", always),),
        "Q3_K_M": (
            ("Q5_K", lambda mixed, index: index < mixed.num_layers // 16),
            ("Q4_K", sensitive),
        ),
        "Q3_K_L": (("Q4_K", always),),
        "IQ4_NL": (("Q5_K", first_eighth),),
        "IQ4_XS": (("Q5_K", first_eighth),),
        "Q4_K_M": (
            ("Q6_K", lambda mixed, index: index < mixed.num_layers // 16),
            ("Q5_K", sensitive),
        ),
        "Q5_K_M": (("Q6_K", sensitive),),
    },
    "attn_output": {"Q3_K_L": (("Q4_K", always),)},
}
_DENSE = {
    "query_key_value": ("attn_qkv",),
    "dense": ("attn_output",),
    "dense_h_to_4h": ("ffn_up",),
    "dense_4h_to_h": ("ffn_down",),
    "fc1": ("ffn_up",),
    "fc2": ("ffn_down",),
}
_HEAD_NORMS = {"q_layernorm": "attn_q_norm", "k_layernorm": "attn_k_norm"}
# Source: llama.cpp 0c1e570 src/models/command-r.cpp, cohere2.cpp, phi2.cpp, falcon.cpp,
# gptneox.cpp, stablelm.cpp; of Falcon's mixes src/llama-quant.cpp:432-690.
ARCHITECTURES = (
    Architecture(name="command-r", model_types=("cohere",), tensors=_norms_of_heads, layer=_cohere),
    Architecture(name="cohere2", model_types=("cohere2",), windows=True, layer=_cohere),
    Architecture(name="phi2", model_types=("phi",), names=_DENSE, layer=_phi),
    Architecture(
        name="falcon",
        model_types=("falcon",),
        names=_DENSE,
        norms={"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"},
        layer=_falcon,
        rules=_FALCON,
        head_type="Q8_0",
    ),
    Architecture(name="gptneox", model_types=("gpt_neox",), names=_DENSE, layer=_neox),
    Architecture(
        name="stablelm",
        model_types=("stablelm",),
        norms=_HEAD_NORMS,
        tensors=_norms_of_heads,
        layer=_stablelm,
    ),
)
