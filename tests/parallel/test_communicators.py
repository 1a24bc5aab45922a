"""NCCL's buffers, outside of the framework's allocator."""

from __future__ import annotations

import pytest

from whichlora.memory.allocator import idle_context_bytes
from whichlora.parallel.communicators import communicator_bytes
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB, MiB


@pytest.mark.parametrize(
    ("gpu", "size", "mebibytes"),
    [
        ("a100-sxm-80gb", 1, 0),
        ("a100-sxm-80gb", 2, 420),
        ("a100-sxm-80gb", 16, 1680),
        ("rtx-4090-24gb", 2, 250),
        ("rtx-4090-24gb", 8, 250),
    ],
)
def test_buffers_grow_with_ranks_that_nvlink_joins(gpu: str, size: int, mebibytes: int) -> None:
    assert communicator_bytes(size, find_gpu(gpu)) == mebibytes * MiB


@pytest.mark.parametrize(
    ("gpu", "ranks", "total_gib", "free_gib"),
    [  # "avail mem" of SGLang before weights are loaded, published
        ("h200-sxm-141gb", 1, 139.80, 139.20),
        ("a10g-24gb", 4, 22.06, 21.52),
        ("l4-24gb", 8, 22.05, 21.65),
        ("a100-pcie-80gb", 2, 79.25, 78.49),
        ("a100-sxm-80gb", 8, 79.25, 77.14),
        ("h20-96gb", 8, 95.58, 93.61),
        ("h800-sxm-80gb", 16, 79.11, 76.97),
    ],
)
def test_what_is_free_beside_a_context_and_nccl(
    gpu: str, ranks: int, total_gib: float, free_gib: float
) -> None:
    card = find_gpu(gpu)
    taken = idle_context_bytes(card) + communicator_bytes(ranks, card)
    assert total_gib - taken / GiB == pytest.approx(free_gib, abs=0.1)
