"""AMD's GPUs: torch's CUDA code, translated to HIP; other libraries of products and attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whichlora.spec.backends.base import Backend, SdpaCall, SdpaKernel

if TYPE_CHECKING:
    from whichlora.spec.run import RunConfig

# Architectures of AOTriton's flash and memory-efficient kernels; EXPERIMENTAL ones need the
# variable TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 and count as without. Source: torch 2.13
# `testing/_internal/common_cuda.py`, `evaluate_platform_supports_flash_attention`;
# `sdp_utils.cpp`, `check_flash_attention_hardware_support`.
AOTRITON = ("gfx90a", "gfx942", "gfx1100", "gfx1201", "gfx950")
EXPERIMENTAL = ("gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200")
_MIB = 1024**2


def _max_head_dim(architecture: str | None) -> int:
    """Source: torch 2.13 `sdp_utils.cpp`, `aotriton_max_hdim`."""
    return 256 if (architecture or "").startswith("gfx11") else 512


def workspace_bytes(compute_capability: str | None) -> int:
    """Of hipBLAS. Source: torch 2.13 `CublasHandlePool.cpp`, `parseChosenWorkspaceSize`."""
    return (128 if compute_capability in ("gfx942", "gfx950") else 32) * _MIB


def sdpa(call: SdpaCall) -> SdpaKernel:
    """The kernel that runs: flash takes grouped keys, the memory-efficient one does not.

    Source: torch 2.13 `sdp_utils.cpp` with `USE_ROCM`: `check_head_dim_size_flash`,
    `check_head_dim_size_mem_efficient`, `check_mem_efficient_hardware_support`.
    """
    architecture = call.compute_capability
    if call.groups == "broadcast" or architecture not in (None, *AOTRITON):
        return "math"
    is_half, widest = call.dtype != "fp32", max(call.head_dim, call.v_head_dim)
    if widest > _max_head_dim(architecture):
        return "math"
    if is_half and not call.masked and call.head_dim == call.v_head_dim:
        return "flash"
    alignment = 8 if is_half else 4
    aligned = call.head_dim % alignment == call.v_head_dim % alignment == 0
    return "efficient" if call.groups == "none" and aligned else "math"


def fused_4bit_rows(compute_capability: str | None) -> int:
    """Source: bitsandbytes 0.50.2 `_gemm_4bit_use_custom_rocm`."""
    return 8 if (compute_capability or "").startswith(("gfx11", "gfx12")) else 4


def notes(run: RunConfig) -> Iterator[str]:
    if run.expandable_segments:
        # torch 2.13 `CUDAAllocatorConfig.h`: ROCM_VERSION < 70000 warns, and does without
        yield "expandable_segments needs ROCm 7 or later; an older one goes on without"


BACKEND = Backend(
    kind="rocm",
    called="AMD's GPUs",
    torch_device="cuda",
    allocator="segments",
    sdpa=sdpa,
    has_efficient=True,
    workspace_bytes=workspace_bytes,
    multiplies_before_softmax=True,
    fuses_half_softmax=True,
    fused_4bit_rows=fused_4bit_rows,
    quants=frozenset({"nf4", "nf4-dq", "fp4", "int8"}),
    expandable_since="2.13",
    # PyPI's torch for Linux is CUDA's. This index has 2.13 and 2.14, rocm7.1 ends with 2.13.
    torch_index="https://download.pytorch.org/whl/rocm7.2",
    driver_files=("/dev/kfd",),
    notes=notes,
)
