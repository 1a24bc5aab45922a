"""How an engine is asked to draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DraftedBy = Literal["layer", "eagle", "eagle3", "model", "text"]
BY_A_DRAFTER: frozenset[DraftedBy] = frozenset({"eagle", "eagle3", "model"})  # its own checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """How an engine is asked to draft.

    Args:
        by: a layer of the model, a small model that reads its states (EAGLE), one of its own, or
            text that was read before.
        tokens: that are drafted for a sequence before a step verifies them.
        passes: of what drafts for one step.
        queries: tokens of a sequence that a step verifies, the last accepted one among them.
    """

    by: DraftedBy
    tokens: int
    passes: int
    queries: int

    @property
    def has_drafter(self) -> bool:
        """Whether another model drafts, whose config has to be known."""
        return self.by in BY_A_DRAFTER
