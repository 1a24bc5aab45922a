"""What Unsloth's `load_vllm` starts a vLLM with, whose weights the training shares.

Source: unsloth_zoo 2026.10.9 vllm_utils.py, `load_vllm` and `approximate_vllm_memory_usage`; its
releases 2025.2.3, 2025.5.7, 2025.11.4, 2026.3.1 and 2026.7.1, which stand beside releases of
Unsloth by their days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.spec.versions import ByRelease, Libraries
from whichlora.units import GiB

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # `get_lora_supported_ranks`
_FOUR_BIT, _EIGHT_BIT = 16 / 5, 8 / 5  # what it divides 16 bits by
_LEAST_CONTEXT = 256
# `graph_overhead`: graphs, bytes of one per state and layer, and bounds
_GRAPHS, _GRAPH_BYTES, _LEAST_GRAPHS, _MOST_GRAPHS = 172, 4, int(0.15 * GiB), GiB
_COUNTS_GRAPHS: ByRelease[bool] = (("0", False), ("2026.3", True))
# What it takes for a model's weights: a formula of dense layers, the parameters since then.
_COUNTS_PARAMETERS: ByRelease[bool] = (("0", False), ("2026.8", True))
# GiB left for the cache, and tokens and sequences of a step up to there; no tokens: the context's.
_Sizes = tuple[tuple[float, int, int], ...]
_FIRST_SIZES: _Sizes = (
    (2, 0, 128),
    (4, 0, 160),
    (8, 0, 192),
    (12, 0, 224),
    (16, 0, 256),
    (24, 0, 288),
    (40, 0, 320),
    (48, 0, 226),
    (80, 0, 368),
    (float("inf"), 0, 400),
)
_NEWER_SIZES: _Sizes = (
    (2, 2048, 8),
    (4, 2048, 16),
    (8, 4096, 32),
    (12, 4096, 48),
    (16, 6144, 64),
    (24, 6144, 80),
    (40, 8192, 96),
    (48, 8192, 112),
    (80, 8192, 128),
    (float("inf"), 8192, 256),
)
_SIZES: ByRelease[_Sizes] = (("0", _FIRST_SIZES), ("2026.3", _NEWER_SIZES))
# Tenths of the GPU's GiB, and the share that an engine on standby is given from there on.
_Targets = tuple[tuple[float, float], ...]
_STANDBY_SHARES: ByRelease[_Targets] = (
    ("0", ((0, 0.0),)),
    ("2025.10", ((4, 0.925), (2.5, 0.9), (2, 0.875), (1.4, 0.85), (1, 0.8), (0, 0.75))),
    ("2026.3", ((4, 0.925), (2.5, 0.9), (2, 0.875), (1.4, 0.85), (1, 0.8), (0, 0.75))),
    ("2026.7", ((4, 0.925), (2.5, 0.9), (2, 0.825), (1.4, 0.8), (1, 0.775), (0, 0.75))),
)
# Beside vLLM before 0.11, which a release of 2026 treats apart.
_OLDER_VLLM_SHARES: _Targets = (
    (9, 0.9),
    (4, 0.875),
    (2.5, 0.85),
    (2, 0.825),
    (1.4, 0.8),
    (1, 0.75),
    (0, 0.7),
)
_LOWERS_SHARES = "2026.3"  # since which a larger share is lowered, and multiplied by
_HEADROOM = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user asks of it: a share of the GPU, tokens of a sequence, the rank of a slot.

    Args:
        vllm: its release, where one is stated.
    """

    share: float
    context: int
    rank: int
    standby: bool
    vllm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine is started with.

    Args:
        cache_gib: what it expects to be left for keys and values.
    """

    share: float
    context: int
    rank: int
    tokens: int
    sequences: int
    cache_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What its formulas take a model for: equal dense layers.

    Args:
        key: width of all keys, of hidden size over heads whatever the width of a head is.
    """

    hidden: int
    width: int
    key: int
    layers: int

    @classmethod
    def of(cls, model: ModelSpec) -> Self:
        layers = [layer for layer, _ in model.layers()]
        attentions = [attention for layer in layers for attention in layer.attentions]
        heads = max((each.num_attention_heads for each in attentions), default=1)
        key_heads = max((each.num_key_value_heads for each in attentions), default=1)
        return cls(
            hidden=model.hidden_size,
            width=max((layer.mlp.width for layer in layers if layer.mlp is not None), default=0),
            key=model.hidden_size // heads * key_heads,
            layers=model.num_hidden_layers,
        )


def settings(
    model: ModelSpec,
    gpu: GpuSpec,
    libraries: Libraries,
    *,
    quant: str | None,
    free_bytes: int,
    asked: Asked,
) -> Settings:
    """What it makes of `asked` on a GPU of which so much is free.

    Kind: exact for dense models; the vision tower counts with its parameters. Source: `load_vllm`.
    """
    rank = next((each for each in RANKS if each >= asked.rank), RANKS[-1])
    share = standby_share(gpu, libraries, asked) if asked.standby else asked.share
    shape = _Shape.of(model)
    taken = share * free_bytes
    activations = _activation_bytes(shape, asked.context)
    if gpu.memory_bytes - taken < activations:
        taken = gpu.memory_bytes - activations
    left = taken - _weight_bytes(model, shape, libraries, quant) - _slot_bytes(shape, rank)
    if libraries.value_of("unsloth", _COUNTS_GRAPHS):
        graphs = _GRAPHS * shape.hidden * shape.layers * _GRAPH_BYTES
        left -= min(max(graphs, _LEAST_GRAPHS), _MOST_GRAPHS)
    left = max(float(left), 0.0)
    held = int(0.95 * left / _token_bytes(model)) // _LEAST_CONTEXT * _LEAST_CONTEXT
    context = min(asked.context, held or _LEAST_CONTEXT)
    sizes = libraries.value_of("unsloth", _SIZES)
    tokens, sequences = next(rest for most, *rest in sizes if left / GiB <= most)
    tokens = min(tokens or context, sequences * context)
    return Settings(
        share=taken / gpu.memory_bytes,
        context=context,
        rank=rank,
        tokens=max(tokens, sequences),
        sequences=sequences,
        cache_gib=left / GiB,
    )


def standby_share(gpu: GpuSpec, libraries: Libraries, asked: Asked) -> float:
    """What an engine on standby gets of the GPU, whatever it is asked for.

    Kind: exact. Source: `standby_target_gpu_util` of 2025.11.4, 2026.3.1, 2026.7.1 and 2026.10.9.
    """
    tenth = gpu.memory_bytes / GiB * 0.1
    lowers = not libraries.older("unsloth", _LOWERS_SHARES)
    is_older_vllm = lowers and bool(asked.vllm) and libraries.older("vllm", "0.11")
    targets: Sequence[tuple[float, float]] = libraries.value_of("unsloth", _STANDBY_SHARES)
    targets = _OLDER_VLLM_SHARES if is_older_vllm else targets
    target = next(value for least, value in targets if tenth >= least)
    if not lowers:
        return max(asked.share, target)
    return target if is_older_vllm else target * _HEADROOM


def _weight_bytes(
    model: ModelSpec, shape: _Shape, libraries: Libraries, quant: str | None
) -> float:
    """Kind: exact. Source: `vllm_weights_memory_usage`, `approximate_vllm_memory_usage`."""
    factor = _FOUR_BIT if quant in FOUR_BIT_BNB else _EIGHT_BIT if quant == "fp8" else 1.0
    if libraries.value_of("unsloth", _COUNTS_PARAMETERS):
        packed = sum(
            count * linear.num_params for layer, count in model.layers() for linear in layer.linears
        )
        return 2 * (packed / factor + model.num_params - packed)
    hidden = shape.hidden
    layer = 2 * hidden * (hidden + shape.key) + 3 * hidden * shape.width
    tables = model.vocab_size * hidden * (1 if model.head_tied else 2)
    return 2 * (layer * shape.layers / factor + tables + 2 * hidden)


def _slot_bytes(shape: _Shape, rank: int) -> int:
    """One slot of every matrix, in 16 bit. Source: `lora_elements`."""
    elements = rank * (6 * shape.hidden + 2 * shape.key + 3 * (shape.hidden + shape.width))
    return 2 * elements * shape.layers


def _activation_bytes(shape: _Shape, context: int) -> float:
    """What it leaves for two rows of the training. Source: `maximum_activation`."""
    each = shape.hidden + 2 * shape.key + 2 + 2 * shape.width
    return 2 * 1.25 * (2 * context * each + shape.width * shape.hidden)


def _token_bytes(model: ModelSpec) -> int:
    """Keys and values of a token in 16 bit, of every layer that has them."""
    widths = (
        count * (attention.k_width + attention.v_width)
        for layer, count in model.layers()
        for attention in layer.attentions
        if attention.kind == "softmax"
    )
    return 2 * sum(widths)
