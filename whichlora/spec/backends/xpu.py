"""Intel's GPUs: torch's own backend, with oneDNN and SYCL kernels."""

from __future__ import annotations

from whichlora.spec.backends.base import Backend, SdpaCall, SdpaKernel

# SYCL's names of architectures, without "intel_gpu_". Source: torch 2.13
# `transformers/xpu/sdp_utils.cpp`, `check_flash_attention_hardware_support`.
FLASH_ARCHITECTURES = ("pvc", "pvc_vg", "bmg_g21", "bmg_g31")
MAX_HEAD_DIM, MAX_FLASH_HEAD_DIM = 576, 192


def sdpa(call: SdpaCall) -> SdpaKernel:
    """oneDNN's kernel where nothing needs a gradient, else SYCL's flash; both count as flash.

    Source: torch 2.13 `mkldnn/xpu/Attention.cpp`, `select_sdp_backend_xpu`,
    `can_use_overrideable_attention`; `transformers/xpu/sdp_utils.cpp`, `can_use_flash_attention`;
    `native_functions.yaml`, where oneDNN's kernel has no backward.
    """
    if call.groups == "broadcast" or call.dropout:
        return "math"
    if not call.needs_grad:
        return "flash" if max(call.head_dim, call.v_head_dim) <= MAX_HEAD_DIM else "math"
    flash = (
        call.dtype != "fp32"
        and not call.masked
        and call.head_dim == call.v_head_dim <= MAX_FLASH_HEAD_DIM
        and call.compute_capability in (None, *FLASH_ARCHITECTURES)
    )
    return "flash" if flash else "math"


def fused_4bit_rows(compute_capability: str | None) -> int:
    """One row has a kernel. Source: bitsandbytes 0.50.2 `backends/xpu/ops.py`, `gemm_4bit`."""
    return 1


BACKEND = Backend(
    kind="xpu",
    called="Intel's GPUs",
    torch_device="xpu",
    allocator="segments",  # torch 2.13 `XPUCachingAllocator.cpp`: the constants of CUDA's
    sdpa=sdpa,
    takes_groups_since="2.8",
    fuses_half_softmax=True,
    expands_int8_to_train=True,  # bitsandbytes 0.50.2 `matmul`: MatMul8bitFp on "cpu" and "xpu"
    fused_4bit_rows=fused_4bit_rows,
    quants=frozenset({"nf4", "nf4-dq", "fp4", "int8"}),
    expandable_since="2.13",  # `XPUCachingAllocator.cpp`, `ExpandableSegment`
)
