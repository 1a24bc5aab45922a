"""What is special about each loss head, so that nobody else asks for its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whichlora.spec.run import LossHead


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHeadSpec:
    """Facts about one value of `loss_head`.

    Args:
        is_outside: the caller computes the loss itself, of logits that the model returns.
        has_vocabulary: it is of a head that projects to a vocabulary, and can't score labels.
        in_tiles: it makes logits tile by tile, each with its gradient; there is no tensor of all.
        recomputes: its backward makes each tile of logits again.
        casts_tiles: it casts a tile of the weight at a time, and no copy of the head stays.
        leaves_out_last: it projects no row's last position, whose next token nobody knows.
        folds_in_torch: where there is no Triton, operators of torch stand in for its kernels.
        in_triton: its kernels are written in Triton.
        fuses_layers: whoever takes it takes the norms and rotations of its library, too.
        own_trainer: the library whose trainer alone runs it; empty where any Trainer does.
        keeps_input: a trained head saves what it read; else its gradient is made in the forward.
        passes: bytes that kernels of its own read and write per token and vocabulary entry,
            forward and backward. Kind: estimate, read.
    """

    is_outside: bool = False
    has_vocabulary: bool = True
    in_tiles: bool = False
    recomputes: bool = False
    casts_tiles: bool = False
    leaves_out_last: bool = False
    folds_in_torch: bool = False
    in_triton: bool = False
    fuses_layers: bool = False
    own_trainer: str = ""
    keeps_input: bool = True
    passes: int = 0


TRL = "TRL"
LOSS_HEADS: Mapping[LossHead, LossHeadSpec] = {
    "hf": LossHeadSpec(has_vocabulary=False),
    "raw": LossHeadSpec(has_vocabulary=False, is_outside=True),
    "trl-fused": LossHeadSpec(
        in_tiles=True,
        recomputes=True,
        casts_tiles=True,
        leaves_out_last=True,
        folds_in_torch=True,
        own_trainer=TRL,
        passes=16,
    ),
    "liger": LossHeadSpec(
        in_tiles=True, in_triton=True, fuses_layers=True, keeps_input=False, passes=16
    ),
    "unsloth": LossHeadSpec(in_triton=True, fuses_layers=True, own_trainer="unsloth", passes=30),
    "unsloth-fused": LossHeadSpec(in_tiles=True, in_triton=True, own_trainer="unsloth", passes=16),
}
