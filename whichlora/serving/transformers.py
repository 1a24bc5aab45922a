"""`generate` of transformers: all prompts in one forward, memory as sequences grow."""

from __future__ import annotations

from whichlora.serving.base import Engine

ENGINE = Engine(
    name="transformers",
    summary="generate of transformers: one batch after the other",
)
