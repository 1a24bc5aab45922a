"""Operators of a layer that one kernel computes in place of several of PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["none", "in_place", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTiles:
    """What Unsloth's loss makes of the logits.

    Args:
        tiles: fp32 logits of some rows ("rows"), chunks ("chunks"), or none, as a kernel keeps them
            in registers ("registers").
        chunk_gib: fp32 logits that a chunk should have.
        chunks_up: four times as many chunks are made as fill it, one where it takes all; else this
            is rounded to the nearest, so that twice as much is one chunk.
        whole: up to so many tokens all are there in 16 bit, and the caller gets them; None: always.
        head_gradient: a gradient is made of the head, which is frozen.
    """

    tiles: Literal["rows", "chunks", "registers"] = "rows"
    chunk_gib: int = 0
    chunks_up: bool = False
    whole: int | None = 0
    head_gradient: bool = False


ROWS = LogitTiles()


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
        adapters: functions of whole groups of LoRA matrices (`symbolic.fused_lora`).
        adds_apart: what an adapter adds to a result is a tensor as large as that, before it is
            added; else a product adds it where the result is.
        keeps_expanded: one of the largest matrices that are quantised stays expanded, unless
            adapters drop; else each product expands its own.
        experts: grouped products of all experts of a layer (`symbolic.grouped_experts`).
        narrow_layer_norm: a LayerNorm returns the dtype that it is given, also under autocast.
        rope_positions: each attention has cosines and sines of so many positions, or of all that
            the model knows where these are fewer; None: as the release of transformers has them.
        logits: of the loss that is fused with the head.
    """

    norm: Kernel = "none"
    rope: Kernel = "none"
    gated: bool = False
    adapters: bool = False
    adds_apart: bool = False
    keeps_expanded: bool = True
    experts: bool = False
    narrow_layer_norm: bool = False
    rope_positions: int | None = None
    logits: LogitTiles = ROWS


NO_KERNELS = FusedKernels()
