"""NVIDIA's GPUs."""

from __future__ import annotations

from whichlora.spec.backends.base import Backend, SdpaCall, SdpaKernel

MAX_FLASH_HEAD_DIM = 256
FLASH_CAPABILITY = 8.0  # so much has units for bf16, too
# Of a target that is an amount of memory; `store.gpus` says so.
ASSUMED_CAPABILITY = "8.0"
_MIB = 1024**2
_WORKSPACE_BYTES = {"9": 32 * _MIB, "10": 32 * _MIB, "12": 32 * _MIB}  # by major capability
OLDER_WORKSPACE_BYTES = 8_519_680  # ":4096:2:16:8": 2 of 4 MiB and 8 of 16 KiB
# Threads that a multiprocessor holds at most, where these are not `_MOST_RESIDENT_THREADS`.
# Source: CUDA C++ programming guide, technical specifications per compute capability.
_RESIDENT_THREADS = {"7.5": 1024, **dict.fromkeys(("8.6", "8.7", "8.9", "12.0", "12.1"), 1536)}
_MOST_RESIDENT_THREADS = 2048
# What a context takes for each of them: 1 KiB is the default stack. What torch's first kernels add.
# Kind: estimate, the medians of published readings. Source: `benchmarks/contexts.csv`.
THREAD_BYTES, FIRST_KERNELS_BYTES = 2082, 60 * _MIB
# Kernels of cuBLAS and others that a step loads on compute capability 9 and later, beyond those.
# Kind: estimate: the mean of an H100 and an H200 (torch 2.13, CUDA 13); a T4 and an A100 have none.
_LATER_KERNELS_BYTES = 170 * _MIB
# What all kernels of torch and its libraries add to those, where they are loaded at once, before
# capability 8.0 and since: torch for CUDA 10 has no kernels for the latter.
# Kind: estimate, one reading each of a V100 (torch 1.10) and of an RTX 3090 (1.8.2); earlier
# releases have less. Source: `benchmarks/contexts.csv`.
_UNCALLED_KERNELS_BYTES = (956 * _MIB, 1377 * _MIB)


def resident_threads(compute_capability: str) -> int:
    """That one multiprocessor holds at most."""
    return _RESIDENT_THREADS.get(compute_capability, _MOST_RESIDENT_THREADS)


def idle_context_bytes(
    compute_capability: str | None, num_multiprocessors: int | None
) -> int | None:
    """Of a process whose first kernel has run; None where the card is not known."""
    if compute_capability is None or num_multiprocessors is None:
        return None
    threads = num_multiprocessors * resident_threads(compute_capability)
    return threads * THREAD_BYTES + FIRST_KERNELS_BYTES


def step_kernels_bytes(compute_capability: str | None) -> int:
    """What the kernels of a training step or a generation add to it."""
    is_later = float(compute_capability or ASSUMED_CAPABILITY) >= 9.0
    return _LATER_KERNELS_BYTES if is_later else 0


def uncalled_kernels_bytes(compute_capability: str | None) -> int:
    """What all kernels add to those that a process calls, before torch 1.13."""
    return _UNCALLED_KERNELS_BYTES[float(compute_capability or ASSUMED_CAPABILITY) >= 8.0]


def workspace_bytes(compute_capability: str | None) -> int:
    """Of cuBLAS. Source: torch 2.13 `CublasHandlePool.cpp`, `parseChosenWorkspaceSize`."""
    major = (compute_capability or ASSUMED_CAPABILITY).split(".")[0]
    return _WORKSPACE_BYTES.get(major, OLDER_WORKSPACE_BYTES)


def sdpa(call: SdpaCall) -> SdpaKernel:
    """The kernel that runs.

    cuDNN's, which Hopper and data-centre Blackwell try first, keeps what flash keeps and takes no
    call that flash and the memory-efficient kernel both refuse: it counts as flash.

    Source: torch 2.13 `sdp_utils.cpp`: `can_use_flash_attention`,
    `can_use_mem_efficient_attention`, `select_sdp_backend`.
    """
    if call.groups == "broadcast":
        return "math"
    capability = float(call.compute_capability or ASSUMED_CAPABILITY)
    is_half = call.dtype != "fp32"
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small_shared_memory = 8.6 <= capability < 9.0 or capability >= 12.0
    too_wide_backward = call.needs_grad and small_shared_memory and call.head_dim > 192
    flash = (
        is_half
        and not call.masked
        and capability >= FLASH_CAPABILITY
        and call.head_dim == call.v_head_dim <= MAX_FLASH_HEAD_DIM
        and not (too_wide_backward and (call.dropout or call.head_dim <= 224))
    )
    if flash:
        return "flash"
    # minimum_gemm_alignment, less_than_sm80_mem_efficient_dtypes
    alignment = 8 if is_half else 4 if capability >= FLASH_CAPABILITY else 1
    efficient = (
        (call.groups == "none" or call.libraries.efficient_takes_groups)
        and (call.dtype != "bf16" or capability >= FLASH_CAPABILITY)
        and call.head_dim % alignment == call.v_head_dim % alignment == 0
    )
    return "efficient" if efficient else "math"


BACKEND = Backend(
    kind="cuda",
    called="NVIDIA's GPUs",
    torch_device="cuda",
    allocator="segments",
    sdpa=sdpa,
    has_efficient=True,
    workspace_bytes=workspace_bytes,
    idle_context_bytes=idle_context_bytes,
    step_kernels_bytes=step_kernels_bytes,
    uncalled_kernels_bytes=uncalled_kernels_bytes,
    multiplies_before_softmax=True,  # torch 2.13 `softmax_backward_cuda_out`
    fuses_half_softmax=True,  # torch 2.13 `SoftMax.cpp`: `half_to_float`
    has_bf16_since=FLASH_CAPABILITY,
    has_tf32=True,
    quants=frozenset({"nf4", "nf4-dq", "fp4", "int8"}),
    expandable_since="2.0",
    keeps_mxfp4=True,
)
