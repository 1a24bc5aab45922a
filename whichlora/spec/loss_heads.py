"""What is special about each loss head, so that nobody else asks for its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.spec.run import LossHead


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHeadSpec:
    """Facts about one value of `loss_head`.

    Args:
        in_tiles: it makes logits tile by tile, each with its gradient; there is no tensor of all.
        in_triton: its kernels are written in Triton.
        fuses_layers: whoever takes it takes the norms and rotations of its library, too.
        own_trainer: the library whose trainer alone runs it; empty where any Trainer does.
        keeps_input: a trained head saves what it read; else its gradient is made in the forward.
        passes: bytes that kernels of its own read and write per token and vocabulary entry,
            forward and backward. Kind: estimate, read.
    """

    in_tiles: bool = False
    in_triton: bool = False
    fuses_layers: bool = False
    own_trainer: str = ""
    keeps_input: bool = True
    passes: int = 0


LOSS_HEADS: Mapping[LossHead, LossHeadSpec] = {
    "hf": LossHeadSpec(),
    "raw": LossHeadSpec(),
    "trl-fused": LossHeadSpec(in_tiles=True, own_trainer="TRL", passes=16),
    "liger": LossHeadSpec(
        in_tiles=True, in_triton=True, fuses_layers=True, keeps_input=False, passes=16
    ),
    "unsloth": LossHeadSpec(in_triton=True, fuses_layers=True, own_trainer="unsloth", passes=30),
    "unsloth-fused": LossHeadSpec(in_tiles=True, in_triton=True, own_trainer="unsloth", passes=16),
}
