"""What the caching allocator leaves idle, by hand from its rules and the stated estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100, CPU

from whichlora.memory import allocator
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB, MiB


@pytest.mark.parametrize(
    ("mib", "rest_mib"),
    [
        (0.5, 0),  # beside others in a segment of 2 MiB
        (1, 0),
        (4, 0),  # divides a segment of 20 MiB
        (5, 0),
        (1.25, 0),
        (3, 0.15),  # a twentieth: each segment of 20 MiB has up to 1 MiB left
        (9, 0.45),
        (10, 0),  # a segment of its own, in steps of 2 MiB
        (11, 1),  # 1 MiB is not split off
        (12, 0),
        (10.5, 0),  # 1.5 MiB are
    ],
)
def test_what_a_block_is_larger_than_its_tensor(mib: float, rest_mib: float) -> None:
    assert allocator.expected_remainder(int(mib * MiB)) == int(rest_mib * MiB)


@pytest.mark.parametrize(
    ("block_mib", "total_mib", "segments_mib"),
    [(1, 3, 4), (1.5, 3, 20), (9, 21, 40), (10, 21, 22), (1, 4, 4)],
)
def test_blocks_of_one_size_take_whole_segments(
    block_mib: float, total_mib: int, segments_mib: int
) -> None:
    found = allocator.in_whole_segments(total_mib * MiB, int(block_mib * MiB))
    assert found == segments_mib * MiB


@pytest.mark.parametrize(
    ("layer_mib", "expandable", "idle_mib"),
    [
        (50, False, 100 + 10 + 20 - 100 + 40),  # what was there before the loss, and two segments
        (120, False, 130 - 120 + 40),  # the layer's backward uses most of it
        (200, False, 40),  # and more than all
    ],
)
def test_what_a_step_leaves_idle(layer_mib: int, expandable: bool, idle_mib: int) -> None:
    sizes = {
        "loss_bytes": 100 * MiB,
        "layer_bytes": layer_mib * MiB,
        "left_bytes": 20 * MiB,
        "narrow_logits_bytes": 10 * MiB,
        "expandable": expandable,
    }
    assert allocator.idle_after_step_bytes(A100, **sizes) == idle_mib * MiB
    pages = allocator.idle_after_step_bytes(A100, **sizes | {"expandable": True})
    assert pages == (idle_mib - 40) * MiB + allocator.PAGES_BYTES
    assert allocator.idle_after_step_bytes(CPU, **sizes) == 0


def test_what_a_generation_leaves_idle() -> None:
    sizes = {"logits_bytes": 30 * MiB, "layer_bytes": 12 * MiB}
    assert allocator.idle_cache_bytes(A100, **sizes) == (30 + 12 + 40) * MiB
    joined = allocator.idle_cache_bytes(A100, **sizes, expandable=True)
    assert joined == 12 * MiB + allocator.PAGES_BYTES
    assert allocator.idle_cache_bytes(CPU, **sizes) == 0
    prompt = {"forward_bytes": 40 * MiB, "cache_bytes": 80 * MiB}
    assert allocator.idle_after_prompt_bytes(A100, **prompt) == (10 + 20 + 20) * MiB
    assert allocator.idle_after_prompt_bytes(CPU, **prompt) == 0


def test_an_engine_takes_its_share_of_the_card_and_a_process_its_context() -> None:
    card = replace(A100, memory_bytes=100 * GiB, context_bytes=None)
    assert allocator.pool_bytes(card, "vllm") == 92 * GiB
    assert allocator.pool_bytes(card, "paged") == 90 * GiB
    assert allocator.pool_bytes(card, "dynamic") == 0
    today = Libraries()
    assert allocator.context_bytes(card, today) == 500 * MiB
    assert allocator.context_bytes(replace(card, context_bytes=7), today) == 7
    assert allocator.context_bytes(CPU, today) == 0


def test_a_torch_before_lazy_loading_holds_every_kernel() -> None:
    """transformers' page on training on one GPU prints 1,343 MiB, a block of 2 among them."""
    v100 = find_gpu("v100-sxm2-16gb")
    before = allocator.context_bytes(v100, Libraries(torch="1.10.1"))
    assert before / MiB == pytest.approx(1341, abs=2)
    since = allocator.context_bytes(v100, Libraries(torch="1.13"))
    assert since == allocator.context_bytes(v100, Libraries()) < before / 3
    assert allocator.context_bytes(CPU, Libraries(torch="1.10.1")) == 0


def test_a_pinned_block_is_a_power_of_two() -> None:
    """129.5 MB took 256 MiB: pytorch issue 150517."""
    weight = 18944 * 3584 * 2
    assert allocator.pinned_remainder_bytes(weight) == 256 * MiB - weight
    assert [allocator.pinned_remainder_bytes(size) for size in (0, 1, 4, 5)] == [0, 0, 0, 3]
