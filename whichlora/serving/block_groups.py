"""Kinds of layers that cache, vLLM's groups of them, and the blocks that a sequence takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.numeric import Count, ceil_div, smallest

UNEVEN = 1.5  # longest kind over the shortest, below which groups have the longest's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayers:
    """Layers of one kind: whole attention, or of one sliding window.

    Args:
        token_elements: keys and values of one token in one layer.
        window: None for whole attention.
    """

    token_elements: int
    window: int | None
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a pool is cut.

    Args:
        block_bytes: of one block, in all layers of a group.
        blocks_of: blocks that a sequence of so many tokens takes, of all groups.
        shared_of: of these, the whole ones of a first part of so many tokens that others have, too;
            none of a sliding window, which may have passed it.
    """

    block_bytes: int
    blocks_of: Callable[[Count], Count]
    shared_of: Callable[[int], int]


def cached_layers(model: ModelSpec) -> list[CachedLayers]:
    """The kinds of layers that keep keys and values, in the order of the model."""
    numbers: dict[tuple[int, int | None], int] = {}
    for layer, count in model.layers():
        for attention in layer.attentions:
            kind = attention.cache_elements, attention.sliding_window
            numbers[kind] = numbers.get(kind, 0) + count
    return [
        CachedLayers(token_elements=elements, window=window, num_layers=number)
        for (elements, window), number in numbers.items()
    ]


def blocks(
    kinds: list[CachedLayers],
    *,
    block_size: int,
    element_bytes: int,
    tokens_in_flight: int,
    part: list[CachedLayers] | None = None,
) -> Blocks:
    """Blocks of a model with layers of `kinds`.

    Layers of several kinds are divided into groups of equally many, each with a table of its own,
    and every group takes blocks of the same size. A layer with fewer elements per token has more
    tokens in a block.

    Args:
        block_size: tokens of a block, in the layers with most elements per token.
        tokens_in_flight: scheduled and not yet done, whose keys a sliding layer keeps.
        part: layers that one stage of a pipeline has of them; None for all. A group's layers are
            dealt out in turns, so that each stage has about as many of every group.

    Kind: exact. Source: vLLM 0.33.0 `get_kv_cache_groups`, v1/core/kv_cache_planning.py:1113;
    `_get_kv_cache_groups_uniform_page_size`:416, `unify_kv_cache_spec_page_size`:346,
    `_project_kv_cache_groups_to_worker`:1413;
    `SlidingWindowSpec.max_admission_blocks_per_request`, v1/kv_cache_interface.py:918.
    """
    widest = max(kind.token_elements for kind in kinds)
    held = kinds if part is None else part
    if len({kind.window for kind in kinds}) == 1:  # one table for all layers
        tokens = sum(kind.token_elements * kind.num_layers for kind in held)
        return Blocks(
            block_bytes=tokens * block_size * element_bytes,
            blocks_of=lambda context: _blocks_of(
                kinds[0].window, context, block_size, tokens_in_flight
            ),
            shared_of=lambda tokens: 0 if kinds[0].window else tokens // block_size,
        )
    layers_per_group = _layers_per_group([kind.num_layers for kind in kinds])
    numbers = {
        (kind.token_elements, kind.window): ceil_div(kind.num_layers, layers_per_group)
        for kind in kinds
    }
    groups = [
        (window, block_size * _times(elements, widest))
        for (elements, window), number in numbers.items()
        for _ in range(number)
    ]
    most = max(
        ceil_div(kind.num_layers, numbers[kind.token_elements, kind.window]) for kind in held
    )
    return Blocks(
        block_bytes=widest * block_size * element_bytes * most,
        blocks_of=lambda context: sum(
            _blocks_of(window, context, size, tokens_in_flight) for window, size in groups
        ),
        shared_of=lambda tokens: sum(tokens // size for window, size in groups if window is None),
    )


def _times(elements: int, widest: int) -> int:
    """How many times as many tokens a narrower layer's block has; its page is padded otherwise."""
    return widest // elements if widest % elements == 0 else 1


def _layers_per_group(numbers: list[int]) -> int:
    """The fewest layers of a kind; the most where these are hardly more."""
    fewest, most = min(numbers), max(numbers)
    return most if most < UNEVEN * fewest else fewest


def _blocks_of(window: int | None, context: Count, block_size: int, in_flight: int) -> Count:
    """Blocks of a group's table for one sequence; a window may begin within one."""
    kept = context if window is None else smallest(window - 1 + in_flight, context)
    return ceil_div(kept, block_size) + (window is not None)
