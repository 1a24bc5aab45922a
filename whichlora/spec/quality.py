"""How good a base model is: a score of a benchmark, as somebody measured it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whichlora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One result of one model; scores of one benchmark are compared, the higher the better.

    Args:
        date: of the result, as its source writes it.

    Raises:
        ConfigError: the score is no finite number.
    """

    model: str
    score: float
    benchmark: str = ""
    date: str = ""
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.score):
            raise ConfigError(f"score: must be a finite number, got {self.score!r}")

    @property
    def in_words(self) -> str:
        """Such as "45.1 (MMLU-Pro, my-evals, 2026-10-01)"."""
        where = ", ".join(word for word in (self.benchmark, self.source, self.date) if word)
        return f"{self.score:g} ({where})" if where else f"{self.score:g}"
