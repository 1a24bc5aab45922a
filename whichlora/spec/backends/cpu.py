"""The host's own processor, a device like any other."""

from __future__ import annotations

from whichlora.spec.backends.base import (
    Backend,
    SdpaCall,
    SdpaKernel,
    expands_always,
    no_context,
)


def sdpa(call: SdpaCall) -> SdpaKernel:
    """Its flash kernel reads grouped keys and masks. Source: torch 2.13 `sdp_utils_cpp.cpp`."""
    return "math" if call.dropout or call.groups == "broadcast" else "flash"


BACKEND = Backend(
    kind="cpu",
    called="CPUs",
    torch_device="cpu",
    allocator="host",
    sdpa=sdpa,
    widens_norms=False,
    widens_cross_entropy=True,
    wide_dropout_masks=True,
    has_foreach=False,
    has_triton=False,
    has_paged_states=False,
    expands_int8_to_train=True,
    fused_4bit_rows=expands_always,
    quants=frozenset({"nf4", "nf4-dq", "fp4", "int8"}),
    idle_context_bytes=no_context,
    shares_host_memory=True,
)
