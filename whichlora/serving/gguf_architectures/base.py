"""What an architecture of llama.cpp states of itself: one of its src/models/*.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from whichlora.serving import ggml_graph, gguf
from whichlora.serving.ggml_graph import Builder, Choice
from whichlora.serving.gguf import Tensor
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer


def text_config(model: ModelSpec) -> Mapping[str, Any]:
    """The Hugging Face config of the text, which a model of images has inside its own."""
    inner: Mapping[str, Any] = model.config.get("text_config") or model.config
    return inner


def _keys_and_values(attention: Attention) -> tuple[int, int]:
    return (attention.k_width, attention.v_width) if attention.kind == "softmax" else (0, 0)


def convolved(attention: Attention) -> int:
    """Elements that its convolution keeps of a sequence: all but one of the tokens it reads."""
    return max(0, attention.conv_kernel - 1) * attention.conv_channels


def _state(attention: Attention) -> int:
    return convolved(attention) + attention.recurrent_elements


def _nothing(attention: Attention) -> int:
    return 0


def _choice(model: ModelSpec) -> Choice:
    """Source: llama.cpp 0c1e570 conversion/base.py, glm.py, deepseek.py `set_gguf_parameters`."""
    config = text_config(model)
    has_bias = any(layer.moe and gguf.has_bias(layer.moe) for layer, _ in model.layers())
    return Choice(
        gate="sigmoid" if has_bias else "softmax",
        biased=has_bias,
        divided=bool(config.get("norm_topk_prob", True)),
        scaled=config.get("routed_scaling_factor", 1.0) != 1.0,
        groups=(config.get("n_group") or 1, config.get("topk_group") or 1),
    )


def _every(model: ModelSpec) -> bool:
    return True


def _never(model: ModelSpec, attention: Attention) -> bool:
    return False


def _token_width(model: ModelSpec) -> int:
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp stores, caches and computes models of some types.

    Args:
        name: as a file has it, in `general.architecture`.
        model_types: those of transformers.
        serves: which models of these types; others have another architecture.
        windows: sliding layers have a smaller cache; elsewhere their window is ignored.
        names: of matrices in a file, where they are others than `gguf.NAMES`; norms: of norms.
        tensors: all of a layer, before the mix of a file gives them types.
        cached: elements of a token's keys and values in a layer's cache.
        state: elements of a sequence's state of fixed size in a layer.
        read_ahead: elements of it that a layer reads before it norms its input.
        layer: the nodes of one layer; `attention`: those before its output projection.
        choice: how experts are chosen.
        rules: of a mix, by kinds of matrices, where they are others than `gguf.RULES`;
            head_type: of its output matrix, where it is not six bits.
        output_norm: the name of the norm after the last layer.
        positions: numbers that say where a token stands.
        embeddings: hidden states that are handed in for a token.
        scales_queries: whether they are multiplied by a number for each position.
        heads_by_layer: its file says how many heads of keys each layer has; not all have any.
        keeps_rows: all tokens pass the last layer, not only those whose logits are asked for.
    """

    name: str
    model_types: tuple[str, ...]
    serves: Callable[[ModelSpec], bool] = _every
    windows: bool = False
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    norms: Mapping[str, str] = field(default_factory=dict, hash=False)
    tensors: Callable[[Layer, Architecture], Iterator[Tensor]] = gguf.layer_tensors
    cached: Callable[[Attention], tuple[int, int]] = _keys_and_values
    state: Callable[[Attention], int] = _state
    read_ahead: Callable[[Attention], int] = _nothing
    layer: Callable[[Builder, Layer, int, int], int] = ggml_graph.block
    attention: Callable[[Builder, Attention, int], int] = ggml_graph.softmax_attention
    choice: Callable[[ModelSpec], Choice] = _choice
    rules: Mapping[str, gguf.Rules] = field(default_factory=dict, hash=False)
    head_type: str = "Q6_K"
    output_norm: str = "output_norm"
    positions: int = 1
    embeddings: Callable[[ModelSpec], int] = _token_width
    scales_queries: Callable[[ModelSpec, Attention], bool] = _never
    heads_by_layer: bool = False
    keeps_rows: bool = False

    def matrix(self, name: str) -> str:
        """Under which name a file has a matrix."""
        return (self.names.get(name) or gguf.NAMES[name])[0]
