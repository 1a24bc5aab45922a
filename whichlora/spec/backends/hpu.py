"""Intel's Gaudi, whose torch is a plug-in that is not public."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whichlora.spec.backends.base import (
    NARROW_OR_PAGED,
    Backend,
    Lack,
    SdpaCall,
    SdpaKernel,
    expands_always,
)

if TYPE_CHECKING:
    from whichlora.spec.run import RunConfig


def sdpa(call: SdpaCall) -> SdpaKernel:
    """Taken as fused. Source: none that is public; its compiler decides."""
    return "flash"


def notes(run: RunConfig) -> Iterator[str]:
    yield (
        "Gaudi compiles graphs (lazy mode, the default, and torch.compile), and its compiler "
        "decides what they keep: the bytes are those of eager mode, and nobody has compared them"
    )


BACKEND = Backend(
    kind="hpu",
    called="Gaudi",
    torch_device="hpu",
    allocator="unknown",
    sdpa=sdpa,
    wide_dropout_masks=True,  # torch 2.13 `Dropout.cpp`, `is_fused_kernel_acceptable`
    has_foreach=False,  # torch 2.13 `_foreach_utils.py`
    has_triton=False,
    has_paged_states=False,
    fused_4bit_rows=expands_always,
    quants=frozenset({"nf4", "nf4-dq", "int8"}),  # bitsandbytes 0.50.2 `backends/hpu/ops.py`
    lacks=(
        Lack(
            "optimizer",
            NARROW_OR_PAGED,
            "does not run on Gaudi: bitsandbytes 0.50 has no 8-bit or paged optimizer for hpu",
            "use adamw_torch_fused",
        ),
        Lack(
            "attn",
            ("flash_attention_2",),
            "does not run on Gaudi: flash-attn is built for CUDA and ROCm",
            "use sdpa",
        ),
    ),
    lacks_kernels="Triton, their language, has no backend for Gaudi",
    driver_files=("/dev/accel/accel_controlD0", "/dev/hl0"),
    notes=notes,
)
