"""From live tensors to the card: what the caching allocator and the device add."""

from __future__ import annotations

from collections.abc import Iterable

from whichlora.memory.entries import Group, tensor_bytes
from whichlora.memory.replay import (
    MIN_OWN_SEGMENT_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from whichlora.numeric import Count, largest, round_up
from whichlora.specs import GpuSpec
from whichlora.units import MiB

PAGES_BYTES = (2 + 20) * MiB  # the last page of the small and of the large pool, where expandable
SEGMENT_BYTES = 20 * MiB  # a request between 1 and 10 MiB reserves this much
# not split with probability SMALL / ROUNDING, and then half of SMALL in the mean
_EXPECTED_REMAINDER_BYTES = SMALL_BYTES**2 // (2 * SEGMENT_ROUNDING_BYTES)
TYPICAL_CONTEXT_BYTES = 500 * MiB  # 250 to 600 MiB where somebody looked
WORKSPACE_BYTES = {"9": 32 * MiB, "10": 32 * MiB, "12": 32 * MiB}  # cuBLAS, by major capability
OLDER_WORKSPACE_BYTES = 8_519_680


def workspace_bytes(gpu: GpuSpec, *, training: bool) -> int:
    """cuBLAS workspaces in the framework's pool: one per thread that runs products.

    Kind: exact before Hopper, unmeasured after. Source: torch 2.13 `CUDABlas`; two published
    figures of 8.5 and 17 MB left after inference and after training.
    """
    if gpu.kind != "cuda":
        return 0
    major = (gpu.compute_capability or "8.0").split(".")[0]
    each = WORKSPACE_BYTES.get(major, OLDER_WORKSPACE_BYTES)
    return each * (2 if training else 1)


def remainder_bytes(
    gpu: GpuSpec, groups: Iterable[Group], *, like: Count, expandable: bool = False
) -> Count:
    """What blocks of kept tensors are larger than the tensors; allocated, though nobody asked.

    A block of the large pool is split only where more than 1 MiB would be left; what is less
    belongs to the tensor. Segments are multiples of 2 MiB, so that what a request leaves of a hole
    is taken as equally likely anywhere in 2 MiB: half of the time it is not split off, and half a
    MiB then. Where weights lie is known: they are cut from the one block that loading warms up.

    Kind: estimate, an expectation; at most 1 MiB per block of more than 1 MiB. What lies in
    expandable segments is always split. Source: torch 2.13 `c10/cuda/CUDACachingAllocator.cpp`,
    `should_split`, `kSmallSize`, `kRoundLarge`; `memory.replay` has the rules.
    """
    if gpu.kind not in ("cuda", "rocm") or expandable:
        return 0 * like
    num_blocks: Count = 0 * like
    for group in groups:
        for tensor in group.tensors:
            size = tensor_bytes((tensor,), tokens=group.tokens, span=group.span)
            num_blocks = num_blocks + group.count * (size > SMALL_BYTES)
    return num_blocks * _EXPECTED_REMAINDER_BYTES


def idle_cache_bytes(
    gpu: GpuSpec, *, logits_bytes: Count, layer_bytes: Count, expandable: bool = False
) -> Count:
    """Cached segments that cannot be joined into the blocks that the peak needs.

    At the loss, blocks of vocabulary width are needed; the 16-bit logits and the working set of
    one layer's forward were allocated before as smaller segments and lie idle. In expandable
    segments, which are joined, only the latter leave holes.
    Kind: fitted to nothing; an estimate that replays of Llama-3-8B bracket (`docs/memory.md`).
    """
    if gpu.kind == "cpu":
        return 0 * logits_bytes
    if expandable:
        return 0 * logits_bytes + layer_bytes + PAGES_BYTES
    return logits_bytes + layer_bytes + 2 * SEGMENT_BYTES


def idle_after_step_bytes(
    gpu: GpuSpec,
    *,
    loss_bytes: Count,
    layer_bytes: Count,
    left_bytes: Count,
    narrow_logits_bytes: Count,
    expandable: bool = False,
) -> Count:
    """Cached segments that the peak of a training step cannot use.

    What the layers left before the loss, and the 16-bit logits, cannot be joined into blocks of
    vocabulary width. A layer's backward is cut from all of it, so it asks for more only where it
    needs more than that. Expandable segments have the same holes between live blocks: replays of
    five TinyLlama steps reserve from 2.8 % more to 6.8 % less.

    Args:
        left_bytes: working set of a layer's forward; where the logits are shifted (transformers
            before 4.50), of its backward.

    Kind: estimate, fitted to nothing: factors on its terms that fit half of the traced steps do
    not bring the other half closer. Its errors against replays of 270 steps are in
    `docs/accuracy_ledger.md`; that older versions leave more is read off nvidia-smi in 150
    published A100 runs, and its mechanism is not known (`docs/accuracy.md`).
    """
    if gpu.kind == "cpu":
        return 0 * loss_bytes
    segments = largest(loss_bytes + narrow_logits_bytes + left_bytes, layer_bytes)
    last = PAGES_BYTES if expandable else 2 * SEGMENT_BYTES
    return segments - largest(loss_bytes, layer_bytes) + last


def idle_after_prompt_bytes(gpu: GpuSpec, *, forward_bytes: Count, cache_bytes: Count) -> Count:
    """Cached segments that the prompt pass cannot use.

    Each layer's keys and values stay, cut from the segments of its working set, and the next
    layer's tensors no longer fit what is left of them: holes in the working set, and beside what
    stays. How large they are depends on the order of sizes in the layer's code.
    Kind: fitted, both quarters to replays of the traced decoders of even number in
    `benchmarks/traces.jsonl`; the odd ones are `docs/accuracy_ledger.md`'s check of it.
    """
    if gpu.kind == "cpu":
        return 0 * forward_bytes
    return (forward_bytes + cache_bytes) // 4 + SEGMENT_BYTES


def in_whole_segments(num_bytes: Count, block_bytes: Count) -> Count:
    """Segments that blocks of about `block_bytes` and `num_bytes` in all are cut from.

    Blocks up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, and larger
    ones have their own: small models reserve a segment where they need a part of it.
    Kind: lower bound, holes left out. Source: torch 2.13
    `CUDACachingAllocator::get_allocation_size`; `memory.replay` has the rules.
    """
    shared = (block_bytes > SMALL_BYTES) * (block_bytes < MIN_OWN_SEGMENT_BYTES)
    segment = SMALL_SEGMENT_BYTES + shared * (SEGMENT_BYTES - SMALL_SEGMENT_BYTES)
    return round_up(num_bytes, segment)


# Share of the card that an engine takes for its block pool: transformers continuous batching
# 0.9, vLLM 0.92 (0.90 before 2026).
POOL_SHARE = {"paged": 0.90, "vllm": 0.92}


def pool_bytes(gpu: GpuSpec, kv_cache: str) -> int:
    """Device memory that an engine with a preallocated block pool takes at start; else 0."""
    return int(POOL_SHARE.get(kv_cache, 0.0) * gpu.memory_bytes)


def context_bytes(gpu: GpuSpec) -> int:
    """Device memory of the process outside the allocator: context, kernels, driver's share."""
    if gpu.kind == "cpu":
        return 0
    return TYPICAL_CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes
