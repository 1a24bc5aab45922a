"""From live tensors to the card: what the caching allocator and the device add."""

from __future__ import annotations

from collections.abc import Iterable

from whichlora.memory.allocator_simulator import (
    LARGE_SEGMENT_BYTES,
    MIN_OWN_SEGMENT_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from whichlora.memory.entries import Fact, Group, Tensor, tensor_bytes
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count, added, divides, floor_div, is_plain, largest, round_up
from whichlora.spec.versions import Libraries
from whichlora.units import MiB

PAGES_BYTES = (2 + 20) * MiB  # the last page of the small and of the large pool, where expandable
SEGMENT_BYTES = 20 * MiB  # a request between 1 and 10 MiB reserves this much
TYPICAL_CONTEXT_BYTES = 500 * MiB  # of a card whose multiprocessors are not known


WORKSPACE = Fact(
    part="temporary",
    what="cuBLAS workspaces",
    shape="one per thread that runs products",
    dtype="bytes",
    why="the library asks the framework's allocator once and keeps them",
    source="torch CublasHandlePool.cpp getChosenWorkspaceSize",
)


def workspace_bytes(gpu: GpuSpec, *, training: bool) -> int:
    """Workspaces of cuBLAS or hipBLAS in the framework's pool: one per thread that runs products.

    Kind: exact to Hopper, unmeasured after and on AMD. Source: `workspace_bytes` of the backend;
    two published figures of 8.5 and 17 MB left after inference and after training; 32 and 64 MiB
    on an H200, calibration/h200-sxm-141gb/facts.json.
    """
    # a workspace belongs to a handle of the library, and handles to a thread
    # (`getCurrentCUDABlasHandle` of torch CublasHandlePool.cpp); autograd runs the backward in a
    # thread of its own
    return gpu.backend.workspace_bytes(gpu.compute_capability) * (2 if training else 1)


def kernel_workspace_bytes(gpu: GpuSpec, dtypes: Dtypes) -> int:
    """One of these workspaces among a run's requests; no trace has it.

    Kind: exact to Hopper. Source: `workspace_bytes`.
    """
    return dtypes.kernel_buffers * gpu.backend.workspace_bytes(gpu.compute_capability)


PINNED_REMAINDERS = Fact(
    part="temporary",
    what="pinned blocks: what they are larger than their tensors",
    shape="[the next power of two]",
    dtype="bytes",
    why="the allocator of pinned host memory rounds each request up",
    source="torch 2.13 CachingHostAllocator.h PowerOf2Ceil; pytorch issues 95823, 150517",
)


def pinned_remainder_bytes(num_bytes: Count) -> int:
    """What a block of pinned host memory is larger than its tensor: the next power of two.

    So since torch 1.11, unless `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF says less.
    Kind: exact. Source: torch 2.13 `ATen/core/CachingHostAllocator.h`, `PowerOf2Ceil`.
    """
    size = int(num_bytes)
    return (1 << (size - 1).bit_length()) - size if size > 0 else 0


def splits_all(gpu: GpuSpec, *, expandable: bool) -> bool:
    """Whether no block is larger than what was asked, 512 bytes apart."""
    return gpu.backend.allocator != "segments" or expandable


REMAINDERS = Fact(
    part="activations",
    what="allocator: unsplit remainders",
    shape="[1 MiB of 20 MiB; of 10 MiB and more what 2 MiB round up]",
    dtype="bytes",
    count="kept and trained tensors of more than 1 MiB that do not divide a segment",
    why="what a hole has more than was asked, up to 1 MiB, stays with the block",
    source="torch 2.13 CUDACachingAllocator should_split, kSmallSize, kLargeBuffer, kRoundLarge",
    kind="estimate",
)


def expected_remainder(size: Count) -> Count:
    """What the block of a tensor of `size` bytes is larger than the tensor.

    A block of more than 1 MiB is split only where more than 1 MiB would be left; what is less
    belongs to the tensor, and counts as allocated. A segment of 20 MiB serves requests below
    10 MiB. Sizes that divide it without such a rest, multiples of 2 or of 1.25 MiB, leave none;
    others leave one of up to 1 MiB at its end, and further ones where it is used again and again:
    1 MiB is counted for each segment, a twentieth of what is in it. A larger request has a segment
    of its own, rounded up to 2 MiB, so that its rest is known.

    Kind: estimate. 177 replays of fine-tuning without checkpointing hold less in 73 % of the runs;
    it is 0.1 % of the peak in the median and 3.3 % at most, of models below 1 GiB. Source: torch
    2.13 `c10/cuda/CUDACachingAllocator.cpp`, `should_split`, `kSmallSize`, `kLargeBuffer`,
    `kRoundLarge`; `memory.allocator_simulator` has the rules.
    """
    fills = divides(2 * MiB, size) | divides(5 * MiB // 4, size)
    is_shared = (size > SMALL_BYTES) & (size < MIN_OWN_SEGMENT_BYTES)
    shared = floor_div(size, LARGE_SEGMENT_BYTES // SMALL_BYTES) * (1 - fills)
    remainder = round_up(size, SEGMENT_ROUNDING_BYTES) - size
    unsplit = remainder * (remainder <= SMALL_BYTES)
    return is_shared * shared + (size >= MIN_OWN_SEGMENT_BYTES) * unsplit


def remainder_bytes(groups: Iterable[Group], *, like: Count) -> Count:
    """Expected remainders of all tensors in `groups`.

    Kind: estimate. Source: `expected_remainder`.
    """
    remainders: list[Count] = [0 * like]
    for group in groups:
        alike: dict[tuple[object, ...], list[Tensor]] = {}
        for tensor in group.tensors:
            terms = (tensor.per_token, tensor.per_token_pair, tensor.constant)
            alike.setdefault(tuple(map(_hashable, terms)), []).append(tensor)
        for tensors in alike.values():
            size = tensor_bytes(tensors[:1], tokens=group.tokens, span=group.span)
            remainders.append(group.count * len(tensors) * expected_remainder(size))
    return added(remainders)


def _hashable(term: Count) -> object:
    """Equal for equal terms, numbers or arrays."""
    return term if is_plain(term) else (term.shape, term.tobytes())


IDLE = Fact(
    part="allocator",
    what="idle segments",
    shape="segments that the peak cannot use",
    dtype="bytes",
    why="the caching allocator keeps what earlier moments left, and gives it back before it fails",
    source="torch CUDACachingAllocator.cpp; docs/memory.md section 6",
    kind="upper bound",
)


def idle_cache_bytes(
    gpu: GpuSpec, *, logits_bytes: Count, layer_bytes: Count, expandable: bool = False
) -> Count:
    """Cached segments that cannot be joined into the blocks that the peak needs.

    At the loss, blocks of vocabulary width are needed; the 16-bit logits and the working set of
    one layer's forward were allocated before as smaller segments and lie idle. In expandable
    segments, which are joined, only the latter leave holes.
    Kind: fitted to nothing; an estimate that replays of Llama-3-8B bracket (`docs/memory.md`).
    Source: replays in `docs/memory.md`, section 6.
    """
    if gpu.backend.allocator == "host":
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
    `docs/accuracy/ledger.md`; that older versions leave more is read off nvidia-smi in 150
    published A100 runs, and its mechanism is not known (`docs/accuracy/published.md`).
    Source: torch 2.13 `CUDACachingAllocator.cpp`, `get_free_block`.
    """
    if gpu.backend.allocator == "host":
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
    `benchmarks/traces/draw-1.jsonl`; the odd ones are `docs/accuracy/ledger.md`'s check of it.
    Source: torch 2.13 `CUDACachingAllocator.cpp`, `should_split`.
    """
    if gpu.backend.allocator == "host":
        return 0 * forward_bytes
    return (forward_bytes + cache_bytes) // 4 + SEGMENT_BYTES


def in_whole_segments(num_bytes: Count, block_bytes: Count) -> Count:
    """Segments that blocks of about `block_bytes` and `num_bytes` in all are cut from.

    Blocks up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, and larger
    ones have their own: small models reserve a segment where they need a part of it.
    Kind: lower bound, holes left out. Source: torch 2.13
    `CUDACachingAllocator::get_allocation_size`; `memory.allocator_simulator` has the rules.
    """
    shared = (block_bytes > SMALL_BYTES) * (block_bytes < MIN_OWN_SEGMENT_BYTES)
    segment = SMALL_SEGMENT_BYTES + shared * (SEGMENT_BYTES - SMALL_SEGMENT_BYTES)
    return round_up(num_bytes, segment)


# Share of the card that an engine takes for its block pool: transformers continuous batching
# 0.9, vLLM 0.92 (0.90 before 2026).
POOL_SHARE = {"paged": 0.90, "vllm": 0.92}


POOL = Fact(
    part="allocator",
    what="free blocks of the preallocated pool",
    shape="share of the card",
    dtype="bytes",
    why="the engine takes its pool at start, whatever the requests are",
    source="vLLM gpu_memory_utilization; transformers ContinuousBatchingConfig",
)


def pool_bytes(gpu: GpuSpec, kv_cache: str) -> int:
    """Device memory that an engine with a preallocated block pool takes at start; else 0.

    Kind: exact. Source: vLLM `gpu_memory_utilization`; transformers 5.23
    `ContinuousBatchingConfig`.
    """
    return int(POOL_SHARE.get(kv_cache, 0.0) * gpu.memory_bytes)


CONTEXT = Fact(
    part="context",
    what="device context",
    shape="driver and kernels",
    dtype="bytes",
    why="every process that uses the device has one, outside of the allocator",
    source="calibration/<gpu>/gpu.json, or spec.backends: by the threads that a card holds",
    kind="estimate",
)


def context_bytes(gpu: GpuSpec, libraries: Libraries) -> int:
    """Device memory of a process that trains or generates, outside the allocator.

    Kind: estimate. Source: `gpu.json` of the device, else its backend, else what is typical; what
    kernels that nobody calls add is of the backend.
    """
    uncalled = 0
    if libraries.loads_all_kernels:
        uncalled = gpu.backend.uncalled_kernels_bytes(gpu.compute_capability)
    if gpu.context_bytes is not None:
        return gpu.context_bytes + uncalled
    idle = derived_context_bytes(gpu)
    if idle is None:
        return TYPICAL_CONTEXT_BYTES + uncalled
    return idle + gpu.backend.step_kernels_bytes(gpu.compute_capability) + uncalled


def derived_context_bytes(gpu: GpuSpec) -> int | None:
    """What its backend says of a process whose first kernel has run; None where it says nothing."""
    return gpu.backend.idle_context_bytes(gpu.compute_capability, gpu.num_multiprocessors)


def idle_context_bytes(gpu: GpuSpec) -> int:
    """The same before a step has loaded its kernels.

    Kind: estimate. Source: as of `context_bytes`.
    """
    idle = derived_context_bytes(gpu)
    of_step = context_bytes(gpu, Libraries())
    return of_step if idle is None else min(idle, of_step)
