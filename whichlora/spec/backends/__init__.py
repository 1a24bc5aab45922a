"""Backends of torch by the kind that `gpu.json` gives a device; one small file each.

Whoever needs to know how devices differ asks `backend_of`; nobody else asks for a vendor.
"""

from __future__ import annotations

from whichlora.spec.backends import cpu, cuda, hpu, mps, rocm, xpu
from whichlora.spec.backends.base import Backend, SdpaCall, SdpaKernel

BACKENDS: dict[str, Backend] = {
    module.BACKEND.kind: module.BACKEND for module in (cuda, rocm, xpu, hpu, mps, cpu)
}


def backend_of(kind: str) -> Backend:
    """The backend of a device of `kind`."""
    return BACKENDS[kind]


__all__ = ["BACKENDS", "Backend", "SdpaCall", "SdpaKernel", "backend_of"]
