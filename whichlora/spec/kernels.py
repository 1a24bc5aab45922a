"""Operators of a layer that one kernel computes in place of several of PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["none", "in_place", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Which operators of the layers are such kernels, and where their gradients go.

    Args:
        norm: an RMSNorm that keeps its input and a deviation for each row. Its gradient is written
            over the one that it gets ("in_place"), or into a new tensor ("apart").
        rope: queries and keys are rotated where they are; their gradients are, too ("in_place"),
            or new tensors ("apart").
        gated: the activation of a gate and its product with the other half. It keeps both, and
            writes their gradients over them.
        adapters: functions of whole groups of LoRA matrices (`symbolic.fused_lora`). One of the
            largest matrices that are quantised stays expanded, unless adapters drop.
        experts: grouped products of all experts of a layer (`symbolic.grouped_experts`).
    """

    norm: Kernel = "none"
    rope: Kernel = "none"
    gated: bool = False
    adapters: bool = False
    experts: bool = False


NO_KERNELS = FusedKernels()
