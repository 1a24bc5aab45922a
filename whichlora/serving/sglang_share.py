"""What SGLang reads off the card: the chunk of a prompt, the graphs, and the static share.

The rules changed with releases, so each release is judged by its own.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from whichlora.families.multimodal import vision_config
from whichlora.serving.base import Served
from whichlora.serving.rank import has_latents
from whichlora.serving.sglang_drafts import reserved_gib
from whichlora.units import GiB, MiB

RANKS, STAGES = "tp_size", "pp_size"
WHOLE_EXPERTS, COPIES = "ep_size", "attn_dp_size"
OLDER_COPIES, DIVIDES_COPIES = "dp_size", "enable_dp_attention"


MANY_GRAPHED = 300  # sequences of a graph, above which groups have more; memory_hook.py:377


class Cards(NamedTuple):
    """What a card's memory decides.

    Attributes:
        below: GiB that part the cards
        chunks: tokens of a prompt in one step, of the smallest cards first
        graphs: largest batch of a decode graph, on fewer than four ranks and on more
    """

    below: tuple[float, ...]
    chunks: tuple[int, ...]
    graphs: tuple[tuple[int, int], ...]


# Source: SGLang's srt/server_args.py and srt/model_executor/cuda_graph_runner.py of 0.4.7, 0.5.2,
# 0.5.4 and 0.5.18; srt/arg_groups/memory_hook.py:90-166 of 0.5.23.
_SIZES = (20, 35, 60, 90, 160)
_LARGE_CHUNKS, _LARGE_GRAPHS = (4096, 8192, 8192, 16384), ((256, 512), (256, 512), (512, 512))
_CARDS = (
    ("0", Cards((25_000 / 1024, 80), (2048, 8192, 8192), ((8, 80), (160, 160), (256, 256)))),
    (
        "0.4.8",
        Cards(
            (35, 90, 160), (2048, 8192, 8192, 16384), ((8, 80), (160, 160), (256, 256), (512, 512))
        ),
    ),
    (
        "0.5.3",
        Cards(_SIZES, (2048, 2048, *_LARGE_CHUNKS), ((8, 8), (16, 80), (32, 160), *_LARGE_GRAPHS)),
    ),
    (
        "0.5.5",
        Cards(_SIZES, (2048, 2048, *_LARGE_CHUNKS), ((8, 8), (24, 80), (32, 160), *_LARGE_GRAPHS)),
    ),
    (
        "0.5.20",
        Cards(_SIZES, (2048, 4096, *_LARGE_CHUNKS), ((8, 8), (48, 160), (32, 160), *_LARGE_GRAPHS)),
    ),
)

# Of each GPU that works on a model, so much less than of one. Source: 0.4.7 srt/server_args.py:254.
_SHARES_OF_RANKS = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))

MAX_PREFILL_TOKENS = 16_384  # of whole prompts that one step takes in: srt/server_args.py


def copies(served: Served) -> int:
    """Groups of GPUs whose attention has sequences of its own.

    Kind: exact. Source: SGLang 0.5.23 srt/arg_groups/parallel_hook.py:38
    `handle_deprecated_dp_attention`.
    """
    older = served.count(OLDER_COPIES) if served.options[DIVIDES_COPIES] else None
    return max(served.count(COPIES) or 1, older or 1)


def chunked_prefill_size(served: Served) -> int:
    """Tokens of a prompt in one step; 0: prompts are not cut. Kind: exact. Source: `_CARDS`."""
    cards, place = _card(served)
    stated = served.count("chunked_prefill_size")
    return cards.chunks[place] if stated is None else max(stated, 0)


def prompt_tokens(served: Served) -> int:
    """Tokens of prompts in one step: a chunk, or whole prompts up to `MAX_PREFILL_TOKENS`.

    Kind: exact. Source: SGLang 0.5.23 srt/managers/schedule_policy.py `PrefillAdder`.
    """
    if chunk := chunked_prefill_size(served):
        return chunk // copies(served)
    return max(MAX_PREFILL_TOKENS, served.run.prompt_len)


def decode_graphs(served: Served) -> int:
    """Largest batch of a decode graph. Kind: exact. Source: `_CARDS`."""
    cards, place = _card(served)
    ranks, asked = served.count(RANKS) or 1, served.count("max_running_requests")
    largest = cards.graphs[place][ranks >= 4]
    return min(largest, asked or largest)


def _card(served: Served) -> tuple[Cards, int]:
    """The rule of the release, and which of its cards this is."""
    rule = served.libraries.value_of("sglang", _CARDS)
    return rule, bisect_left(rule.below, served.gpu.memory_bytes / GiB + 1e-9)


def _is_before(served: Served, release: str) -> bool:
    """Whether an older SGLang is judged."""
    return served.libraries.older("sglang", release)


def prefill_sizes(most: int) -> int:
    """How many sizes of a prompt are captured. Kind: exact.

    Source: SGLang 0.5.23 srt/arg_groups/cuda_graph_hook.py:480.
    """
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
    sizes = [size for step in (*steps, (4608, most + 1, 512)) for size in range(*step)]
    return sum(size <= most for size in sizes)


def mem_fraction_static(served: Served) -> float:
    """Share of the free memory for weights and pool.

    Kind: exact, but for nvidia-smi's total, which is up to 1 % more than the framework's.
    Source: SGLang srt/server_args.py of 0.4.7, 0.5.2 and 0.5.4; 0.5.23
    srt/arg_groups/memory_hook.py:297-326.
    """
    stated = served.options["mem_fraction_static"]
    if stated is not None:
        assert isinstance(stated, float)
        return stated
    total_mib = served.gpu.memory_bytes / MiB
    gpus = (served.count(RANKS) or 1) * (served.count(STAGES) or 1)
    if _is_before(served, "0.4.8"):
        share = _share_of_ranks(total_mib, gpus)
    else:
        by_card = _is_before(served, "0.5.3")
        reserved_mib = _card_mib(total_mib, gpus) if by_card else _step_mib(served, gpus)
        reserved_mib += 1024 * reserved_gib(served)
        share = round((total_mib - reserved_mib) / total_mib, 3)
    return share * _beside_images(served)


def _share_of_ranks(total_mib: float, gpus: int) -> float:
    """The share before 0.4.8: of the number of GPUs, and more of a large card.

    Source: SGLang 0.4.7 srt/server_args.py:252-283.
    """
    share = next(share for least, share in _SHARES_OF_RANKS if gpus >= least)
    if total_mib > 180_000:
        return 0.79
    if total_mib > 96 * 1024:
        larger = share + 48 * 1024 * (1 - share) / total_mib
        return min(larger, (total_mib - 18 * 1024) / total_mib)
    return share if total_mib <= 81_920 else 0.88


def _card_mib(total_mib: float, gpus: int) -> float:
    """MiB that 0.4.8 to 0.5.2 leave, of the card and GPUs.

    Source: SGLang 0.5.2 srt/server_args.py:466-483.
    """
    if total_mib >= 160 * 1024:
        return 32 * 1024
    if total_mib >= 90 * 1024:
        return (12 + gpus / 2) * 1024
    return ((9.5 + gpus / 2) if total_mib >= 35 * 1024 else (2.8 + gpus / 10)) * 1024


def _step_mib(served: Served, gpus: int) -> float:
    """MiB that are left since 0.5.3 for a step over a chunk, and for graphs.

    Prompts are captured since 0.5.10, but of a pipeline. Source: 0.5.23
    srt/arg_groups/memory_hook.py:297-326, `reserve_for_graph_mb`; cuda_graph_hook.py:150.
    """
    chunk = chunked_prefill_size(served)
    reserved_mib = 512 + 1.5 * max(chunk or MAX_PREFILL_TOKENS, 2048) + gpus / 8 * 1024
    if not served.options["disable_cuda_graph"]:
        graphs, groups = decode_graphs(served), copies(served)
        reserved_mib += 2 * graphs
        if groups > 1:
            reserved_mib += graphs * groups * (3 + 1.5 * (graphs > MANY_GRAPHED))
        if (served.count(STAGES) or 1) == 1 and not _is_before(served, "0.5.10"):
            reserved_mib += 1.5 * 1024 if _has_latents(served) else 8 * prefill_sizes(chunk)
    is_large = served.gpu.memory_bytes > 60 * GiB
    return max(reserved_mib, 10 * 1024) if is_large else reserved_mib


def _has_latents(served: Served) -> bool:
    """Whether a latent is cached for all heads, in any layer."""
    layers = (group.layer for group in served.model.groups)
    return any(has_latents(attention) for layer in layers for attention in layer.attentions)


def _beside_images(served: Served) -> float:
    """Of the share, what a model that sees leaves beside images, whether any come or not.

    Kind: exact. Source: SGLang 0.4.9 srt/server_args.py:329; 0.5.23
    srt/arg_groups/memory_hook.py `adjust_mem_fraction_for_vlm`.
    """
    vision = vision_config(served.model.config)
    if vision is None:
        return 1.0
    if _is_before(served, "0.4.10"):
        return 0.9
    layers, width = vision.get("num_hidden_layers", 24), vision.get("hidden_size", 1024)
    size = float(layers * width**2) / (24 * 1024**2)  # of ViT-L
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0)))
