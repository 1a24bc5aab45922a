"""What the allocator's segments have beyond weights, where an engine reads what is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from whichlora.memory.allocator_simulator import Allocator, ExpandableAllocator
from whichlora.memory.entries import Fact
from whichlora.memory.weights import quantised_parts
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Layer, Linear

# Matrices that engines load into one tensor; experts of a layer are one tensor each way.
_JOINT = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
)
_FIRST = {name: names[0] for names in _JOINT for name in names}

UNUSED_SEGMENTS = Fact(
    part="weights",
    what="rest of segments beyond weights",
    shape="-",
    dtype="bytes",
    why="a matrix from 10 MiB on has whole 2 MiB, smaller ones share 20 MiB; nothing fits the rest",
    source="torch 2.13 c10/cuda/CUDACachingAllocator.cpp get_allocation_size; SGLang 0.5.23 "
    "reads what is free after loading",
)


def unused_bytes(
    rank: ModelSpec,
    dtypes: Dtypes,
    *,
    slots: tuple[int, ...] = (),
    in_use: bool = False,
    expandable: bool = False,
) -> int:
    """What segments have beyond the weights of `rank`, which are allocated in their order.

    Args:
        slots: tensors for adapters, which are allocated after the weights.
        in_use: only what the allocator counts as in use: up to 1 MiB of a block is not cut off.
        expandable: segments are, so that blocks lie side by side.

    Norms share segments of 2 MiB, and towers are left out.
    Kind: exact for the tensors that are counted.
    Source: `UNUSED_SEGMENTS`; logs of 15.54 GiB (QwQ-32B on four ranks, 0.4.3, bytes 15.28) and
    7.08 (Qwen3-14B on four, 0.5.10, bytes 6.89); 12.49 of Qwen3-4B with 64 slots (vLLM 0.27.1,
    bytes 12.32).
    """
    tables = [table.rows * table.width * dtypes.embedding_bytes for table in rank.embeddings]
    head = []
    if rank.head is not None and not rank.head_tied:
        head = [rank.head.num_weights * dtypes.head_bytes]
    layers = tuple(
        (tuple(_tensors(group.layer, dtypes)), 1 if group.shared else group.count)
        for group in rank.groups
    )
    reserved, allocated = _unused(tuple(tables), layers, (*head, *slots), expandable)
    return allocated if in_use else reserved


@lru_cache(maxsize=256)
def _unused(
    tables: tuple[int, ...],
    layers: tuple[tuple[tuple[int, ...], int], ...],
    last: tuple[int, ...],
    expandable: bool,
) -> tuple[int, int]:
    """What segments and what blocks in use have beyond the tensors."""
    allocator, held = ExpandableAllocator() if expandable else Allocator(), 0
    for sizes, count in ((tables, 1), *layers, (last, 1)):
        held += count * sum(sizes)
        for num_bytes in sizes * count:
            allocator.allocate(num_bytes)
    return allocator.reserved_bytes - held, allocator.allocated_bytes - held


def _tensors(layer: Layer, dtypes: Dtypes) -> Iterator[int]:
    """Bytes of the tensors of one layer, in the order of its modules."""
    for attention in layer.attentions:
        yield from _joined(attention.linears, dtypes)
    if layer.mlp is not None:
        yield from _joined(layer.mlp.linears, dtypes)
    if layer.moe is not None:
        yield from _joined((layer.moe.router,), dtypes)
        yield from _joined(layer.moe.expert.linears, dtypes)
        if layer.moe.shared is not None:
            yield from _joined(layer.moe.shared.linears, dtypes)


def _joined(linears: Iterable[Linear], dtypes: Dtypes) -> Iterator[int]:
    """Bytes of the tensors that hold `linears`: what is joined where its first part stands."""
    groups: dict[str, list[Linear]] = {}
    for linear in linears:
        groups.setdefault(_FIRST.get(linear.name, linear.name), []).append(linear)
    for parts in groups.values():
        yield from _stored(parts, dtypes)


def _stored(parts: Sequence[Linear], dtypes: Dtypes) -> Iterator[int]:
    rows = sum(part.count * part.out_features for part in parts)
    num_weights = sum(part.num_weights for part in parts)
    if is_quantised(parts[0], dtypes):
        yield from quantised_parts(
            num_weights,
            dtypes.quant,
            out_features=rows,
            group_size=dtypes.quant_group_size,
            scale_block=dtypes.scale_block,
        )
    else:
        yield num_weights * dtypes.base_bytes
    if parts[0].bias:
        yield rows * dtypes.base_bytes
