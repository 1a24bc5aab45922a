"""Kinds of layers that cache, vLLM's groups of them, and the blocks that a sequence takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whichlora.serving.indexers import attended_elements, index_key_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import Count, ceil_div, smallest

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNEVEN = 1.5  # longest kind over the shortest, below which groups have the longest's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayers:
    """Layers of one kind: whole attention, of one sliding window, or with a state.

    Args:
        token_elements: keys and values of one token in one layer.
        index_bytes: of its index key, beside them.
        window: None for whole attention.
        conv_elements: of a sequence's state, whatever its length, in the dtype of the model;
            `recurrent_elements` in `recurrent_dtype`, or else the model's.
    """

    token_elements: int
    window: int | None
    num_layers: int
    conv_elements: int = 0
    recurrent_elements: int = 0
    recurrent_dtype: str = ""
    index_bytes: int = 0

    def token_bytes(self, element_bytes: int) -> int:
        """Of one token in one layer."""
        return self.token_elements * element_bytes + self.index_bytes

    def state_bytes(self, element_bytes: int, recurrent_bytes: int | None = None) -> int:
        """Of one sequence in one layer.

        Args:
            element_bytes: those of the model's dtype.
            recurrent_bytes: of a recurrent element where the model's config has no dtype for it;
                None: the model's, too.
        """
        width = STATE_BYTES.get(self.recurrent_dtype, recurrent_bytes or element_bytes)
        return self.conv_elements * element_bytes + self.recurrent_elements * width


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


def cached_layers(model: ModelSpec, drafted: int = 0) -> list[CachedLayers]:
    """The kinds of layers that keep keys and values, or a state, in the order of the model.

    Engines keep all but the last of the tokens that a short convolution reads. Layers that borrow
    keys and values keep none.

    Args:
        drafted: tokens that a step verifies beside one, which a short convolution keeps, too.
    """
    numbers: dict[CachedLayers, int] = {}
    for layer, count in model.layers():
        for attention in layer.attentions:
            kind = cached_of(attention, drafted)
            if kind.token_elements or kind.state_bytes(1):
                numbers[kind] = numbers.get(kind, 0) + count
    return [replace(kind, num_layers=number) for kind, number in numbers.items()]


def cached_of(attention: Attention, drafted: int = 0) -> CachedLayers:
    """What one layer keeps: of no layers yet.

    Kind: exact. Source: vLLM 0.33.0 layers/mamba/mamba_utils.py:204 `conv_kernel - 1 + num_spec`.
    """
    return CachedLayers(
        token_elements=attended_elements(attention),
        index_bytes=index_key_bytes(attention),
        window=attention.sliding_window,
        num_layers=0,
        conv_elements=attention.conv_channels * max(0, attention.conv_kernel - 1 + drafted),
        recurrent_elements=attention.recurrent_elements,
        recurrent_dtype=attention.recurrent_dtype,
    )


def blocks(
    kinds: list[CachedLayers],
    *,
    block_size: int,
    element_bytes: int,
    tokens_in_flight: int,
    part: list[CachedLayers] | None = None,
    state_bytes: int = 2,
    states_kept: int = 1,
) -> Blocks:
    """Blocks of a model with layers of `kinds`.

    Layers of several kinds are divided into groups of equally many, each with a table of its own,
    and every group takes blocks of the same size. A layer with fewer elements per token has more
    tokens in a block. One with a state has a block for it, so that a block has as many tokens of
    the others as fill it.

    Args:
        block_size: tokens of a block, in the layers with most elements per token.
        element_bytes: of keys and values; `state_bytes` of the model's dtype, which states have.
        tokens_in_flight: scheduled and not yet done, whose keys a sliding layer keeps.
        part: layers that one stage of a pipeline has of them; None for all. A group's layers are
            dealt out in turns, so that each stage has about as many of every group.
        states_kept: of one sequence in a layer: with prefix caching the one before it, too.

    Kind: exact. Source: vLLM 0.33.0 `get_kv_cache_groups`, v1/core/kv_cache_planning.py:1113;
    `_get_kv_cache_groups_uniform_page_size`:416, `unify_kv_cache_spec_page_size`:346,
    `_project_kv_cache_groups_to_worker`:1413;
    `SlidingWindowSpec.max_admission_blocks_per_request`, v1/kv_cache_interface.py:918;
    `MambaSpec.max_memory_usage_bytes`:1135; `Platform._align_hybrid_block_size`,
    platforms/interface.py:940.
    """
    widest = max(kind.token_elements for kind in kinds)
    held = kinds if part is None else part
    largest = max(kind.state_bytes(state_bytes) for kind in kinds)
    if len(kinds) == 1 or (not largest and len({kind.window for kind in kinds}) == 1):
        # one table for all
        token_bytes = sum(kind.token_bytes(element_bytes) * kind.num_layers for kind in held)
        return Blocks(
            block_bytes=token_bytes * block_size,
            blocks_of=lambda context: _blocks_of(
                kinds[0].window, context, block_size, tokens_in_flight
            ),
            shared_of=lambda tokens: 0 if kinds[0].window else tokens // block_size,
        )
    block_size *= max(1, ceil_div(largest, block_size * widest * element_bytes))
    layers_per_group = _layers_per_group([kind.num_layers for kind in kinds])
    numbers = {
        replace(kind, num_layers=0): ceil_div(kind.num_layers, layers_per_group) for kind in kinds
    }
    groups = [
        (kind.window, block_size * _times(kind.token_elements, widest))
        for kind, number in numbers.items()
        for _ in range(number)
        if kind.token_elements
    ]
    states = states_kept * sum(
        number for kind, number in numbers.items() if not kind.token_elements
    )
    most = max(ceil_div(kind.num_layers, numbers[replace(kind, num_layers=0)]) for kind in held)
    return Blocks(
        block_bytes=widest * block_size * element_bytes * most,
        blocks_of=lambda context: (
            states
            + sum(_blocks_of(window, context, size, tokens_in_flight) for window, size in groups)
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
