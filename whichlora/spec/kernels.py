"""Operators of a layer that one kernel computes in place of several of PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKernel = Literal["none", "in_place", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Which operators of the layers are such kernels, and where their gradients go.

    Args:
        norm: an RMSNorm that keeps its input and a deviation for each row. Its gradient is written
            over the one that it gets ("in_place"), or into a new tensor ("apart").
        rope: queries and keys are rotated where they are, and so are their gradients.
        gated: the activation of a gate and its product with the other half. It keeps both, and
            writes their gradients over them.
    """

    norm: NormKernel = "none"
    rope: bool = False
    gated: bool = False


NO_KERNELS = FusedKernels()
